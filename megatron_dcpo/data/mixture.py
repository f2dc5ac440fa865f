"""Mix several sources in one run by weight: the prompt at a position is a function of seed and
position alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import Prompt

_STREAM = 0x6D6978  # separates these random numbers from the random numbers of the epochs


@dataclass(frozen=True)
class LoadedSource:
    """The prompts of a source, and its weight. ``ranks`` order the prompts in a curriculum."""

    name: str
    path: str
    prompts: Sequence[Prompt]
    weight: float
    ranks: np.ndarray | None


@dataclass(frozen=True)
class Mixture:
    """Draws ``per_step`` prompts at a time. A source of weight w gets w * ``per_step`` positions,
    rounded up or down at random so that the mean is exact, in random order. Each source goes
    through epochs independently of the others.

    ``weights`` add up to 1. ``ranks`` order the prompts of each source in a curriculum
    (:func:`curriculum`).
    """

    sources: Sequence[Sequence[Prompt]]
    weights: Sequence[float]
    per_step: int
    seed: int
    shuffle: bool
    ranks: Sequence[np.ndarray | None]
    # by step: how often each source was drawn before it
    _before: list[np.ndarray] = field(default_factory=list)

    def __call__(self, first: int, count: int) -> list[Prompt]:
        """Return the prompts at the positions ``first`` to ``first + count - 1`` (0-based)."""
        step, offset = divmod(first, self.per_step)
        last_step = math.ceil((first + count) / self.per_step)
        steps = range(step, last_step + 1)
        chosen = np.concatenate([self._sources_of(number) for number in steps])
        before = self._drawn_before(step) + self._counts(chosen[:offset])
        chosen = chosen[offset : offset + count]
        drawn = []
        for number, source in enumerate(self.sources):
            prompts = draw_prompts(
                source,
                first=int(before[number]),
                count=int(np.count_nonzero(chosen == number)),
                seed=self.seed,
                shuffle=self.shuffle,
                ranks=self.ranks[number],
            )
            drawn.append(iter(prompts))
        return [next(drawn[number]) for number in chosen]

    def _sources_of(self, step: int) -> np.ndarray:
        """Return the source of each position of a step, int64 [per_step], by systematic sampling
        and a random permutation.
        """
        random = np.random.default_rng([self.seed, _STREAM, step])
        points = (np.arange(self.per_step) + random.random()) / self.per_step
        sources = np.searchsorted(np.cumsum(self.weights)[:-1], points, side="right")
        return random.permutation(sources)

    def _counts(self, chosen: np.ndarray) -> np.ndarray:
        """Return how often each source occurs among ``chosen``, int64 [S]."""
        return np.bincount(chosen, minlength=len(self.sources))

    def _drawn_before(self, step: int) -> np.ndarray:
        """Return how often each source was drawn before a step, int64 [S]."""
        known = self._before or [np.zeros(len(self.sources), np.int64)]
        for earlier in range(len(known) - 1, step):
            known.append(known[-1] + self._counts(self._sources_of(earlier)))
        self._before[:] = known
        return known[step]


def curriculum(prompts: Sequence[Prompt], column: str, source: str) -> np.ndarray:
    """Return the rank of each prompt by its ``column``, int64 [N]; equal values have the same rank.
    Texts that are all numbers, as a table of CSV has them, are ordered as numbers. Raises
    :class:`UserError` if a row lacks the column, or if numbers and texts are mixed.
    """
    values = _numbers([(prompt.row or {}).get(column) for prompt in prompts])
    all_numbers = all(isinstance(value, int | float) for value in values)
    all_texts = all(isinstance(value, str) for value in values)
    if not all_numbers and not all_texts:
        odd = 0
        for index, value in enumerate(values):
            if value is None or not isinstance(value, type(values[0])):
                odd = index
                break
        raise UserError(
            f"data.order={column}: expected a number in every row of {source}, or a text in every "
            f"row; {prompts[odd].prompt_id} has {values[odd]!r:.60}"
        )
    return np.unique(np.array(values), return_inverse=True)[1]


def _numbers(values: list[object]) -> list[object]:
    """Return texts that are all numbers as these, any other values as they are."""
    if not all(isinstance(value, str) for value in values):
        return values
    try:
        return [float(str(value)) for value in values]
    except ValueError:
        return values


def extended_fingerprint(
    fingerprints: Sequence[str], weights: Sequence[float], ranks: Sequence[np.ndarray | None]
) -> str:
    """Return a short name of the prompts of all sources, their weights and their order."""
    orders = [None if one is None else one.tolist() for one in ranks]
    text = repr((list(fingerprints), list(weights), orders))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
