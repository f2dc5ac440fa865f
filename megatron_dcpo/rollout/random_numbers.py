"""Random numbers of one sample, the same for any batching, resumption or split over ranks."""

from __future__ import annotations

import numpy as np

from megatron_dcpo.rollout.sampling import digest_of


def uniforms(seed: int, step: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """Return float64 [count] uniform numbers in [0, 1), counted (Philox): a longer ``count`` begins
    with the same ones.
    """
    key = np.frombuffer(digest_of(16, seed, step, prompt_id, sample_index), np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def request_seed(seed: int, step: int, prompt_id: str, index: int, begun: int = 0) -> int:
    """Return a seed of 62 bits, for an engine that draws its own numbers, another seed after
    ``begun`` tokens.
    """
    if begun:
        digest = digest_of(8, seed, step, prompt_id, index, begun)
    else:
        digest = digest_of(8, seed, step, prompt_id, index)
    return int.from_bytes(digest, "little") >> 2
