"""Which prompts a step trains on: a function of seed and step alone, so that resuming needs no cursor."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_dcpo.types import Prompt


def prompts_of_step(
    prompts: Sequence[Prompt], step: int, prompts_per_step: int, *, seed: int, shuffle: bool
) -> list[Prompt]:
    """The ``prompts_per_step`` prompts of 1-based ``step``: epoch after epoch, each in its own order when ``shuffle``.

    The epoch is appended to ``prompt_id``, so that a prompt met twice in one step forms two groups.
    """
    chosen = []
    for position in range((step - 1) * prompts_per_step, step * prompts_per_step):
        epoch, index = divmod(position, len(prompts))
        prompt = prompts[int(_order(len(prompts), epoch, seed)[index]) if shuffle else index]
        chosen.append(dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}@{epoch}"))
    return chosen


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A short name for these prompts in this order: equal when a resumed run would train on the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.prompt_id, list(map(int, prompt.token_ids)), prompt.ground_truth)).encode())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _order(n: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
