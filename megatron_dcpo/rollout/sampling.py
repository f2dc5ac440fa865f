"""How responses are sampled: the options of every engine and server. Nothing here needs torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcpo.types import Prompt


@dataclass(frozen=True)
class SamplingConfig:
    """``n`` responses per prompt. ``temperature`` 0 is greedy: the most probable token, always.
    ``top_k`` 0 and ``top_p`` 1 are off; ``max_tokens`` counts EOS.

    ``raw_logprobs``: report log-probs of the raw logits instead of the distribution that was
    sampled (temperature, top-k, top-p). Training needs log-probs of the sampled distribution;
    evaluation needs raw ones, which the temperature of an evaluation does not change (vLLM's
    ``raw_logprobs``). ``top_logprobs``: also the K largest of every position, always of the raw
    logits.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 3000
    seed: int = 0
    raw_logprobs: bool = False
    top_logprobs: int = 0


Samples = Sequence[tuple[Prompt, int]]  # prompt and index of each response


def sample_seed(seed: int, prompt_id: str, repeat: int) -> int:
    """Return a seed of 31 bits, for a server that is evaluated: servers differ in how wide a seed
    they take.
    """
    return int.from_bytes(digest_of(4, seed, prompt_id, repeat), "little") >> 1


def digest_of(size: int, *names: object) -> bytes:
    """Return ``size`` bytes that depend on ``names``."""
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=size).digest()
