"""Random numbers of one sample: the same for any batching, resumption or split over ranks."""

from __future__ import annotations

import hashlib

import numpy as np


def uniforms(seed: int, step: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """float64 [count] uniform numbers in [0, 1), counted (Philox): a longer ``count`` begins with the same ones."""
    key = np.frombuffer(_digest(16, seed, step, prompt_id, sample_index), np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def request_seed(seed: int, step: int, prompt_id: str, index: int) -> int:
    """62 bits, for an engine that draws its numbers itself."""
    return int.from_bytes(_digest(8, seed, step, prompt_id, index), "little") >> 2


def sample_seed(seed: int, prompt_id: str, repeat: int) -> int:
    """31 bits, for a server that is evaluated: servers differ in how wide a seed they take."""
    return int.from_bytes(_digest(4, seed, prompt_id, repeat), "little") >> 1


def _digest(size: int, *names: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=size).digest()
