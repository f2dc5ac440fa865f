"""Several sources in one run: which prompt stands at which position, by weight, as a function of
seed and position alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import Prompt

_STREAM = 0x6D6978  # apart from the random numbers of the epochs


@dataclass(frozen=True)
class LoadedSource:
    """The prompts of a source, its share, and the name of its verifier; ``ranks``: their order in a
    curriculum.
    """

    name: str
    path: str
    prompts: Sequence[Prompt]
    weight: float
    verifier: str
    ranks: np.ndarray | None


@dataclass(frozen=True)
class Mixture:
    """Draws ``per_step`` positions at a time: a source of weight w has w ``per_step`` of them,
    rounded up or down at random so that its mean is exact, in random order. Each source goes
    through its own epochs.

    ``weights`` add up to 1; ``ranks``: of the prompts of each source in a curriculum, see
    :func:`curriculum`.
    """

    sources: Sequence[Sequence[Prompt]]
    weights: Sequence[float]
    per_step: int
    seed: int
    shuffle: bool
    ranks: Sequence[np.ndarray | None]
    _before: list[np.ndarray] = field(
        default_factory=list
    )  # how often each source was drawn before a step

    def __call__(self, first: int, count: int) -> list[Prompt]:
        """Return the prompts at the positions ``first`` to ``first + count - 1`` (0-based)."""
        step, offset = divmod(first, self.per_step)
        steps = range(step, -(-(first + count) // self.per_step) + 1)
        chosen = np.concatenate([self._sources_of(number) for number in steps])
        before = self._drawn_before(step) + np.bincount(
            chosen[:offset], minlength=len(self.sources)
        )
        chosen = chosen[offset : offset + count]
        drawn = []
        for number, (source, ranks) in enumerate(
            zip(self.sources, self.ranks, strict=True)
        ):
            prompts = draw_prompts(
                source,
                first=int(before[number]),
                count=int(np.count_nonzero(chosen == number)),
                seed=self.seed,
                shuffle=self.shuffle,
                ranks=ranks,
            )
            drawn.append(iter(prompts))
        return [next(drawn[number]) for number in chosen]

    def _sources_of(self, step: int) -> np.ndarray:
        """Return the source of each position of a step, int64 [per_step]: systematic sampling, then
        shuffled.
        """
        random = np.random.default_rng([self.seed, _STREAM, step])
        points = (np.arange(self.per_step) + random.random()) / self.per_step
        sources = np.searchsorted(np.cumsum(self.weights)[:-1], points, side="right")
        return random.permutation(sources)

    def _drawn_before(self, step: int) -> np.ndarray:
        known = self._before or [np.zeros(len(self.sources), np.int64)]
        for earlier in range(len(known) - 1, step):
            known.append(
                known[-1]
                + np.bincount(self._sources_of(earlier), minlength=len(self.sources))
            )
        self._before[:] = known
        return known[step]


def curriculum(prompts: Sequence[Prompt], column: str, source: str) -> np.ndarray:
    """Return the rank of each prompt by its ``column``, int64 [N]; equal values have one rank.
    Raises :class:`UserError` where a row lacks it, or numbers and texts are mixed.
    """
    values = [(prompt.row or {}).get(column) for prompt in prompts]
    if not (
        all(isinstance(v, int | float) for v in values)
        or all(isinstance(v, str) for v in values)
    ):
        odd = next(
            p
            for p, v in zip(prompts, values, strict=True)
            if not isinstance(v, type(values[0])) or v is None
        )
        raise UserError(
            f"data.order={column}: expected a number in every row of {source}, or a text in every "
            f"row; {odd.prompt_id} has "
            f"{(odd.row or {}).get(column)!r:.60}"
        )
    return np.unique(np.array(values), return_inverse=True)[1]


def extended_fingerprint(
    fingerprints: Sequence[str],
    weights: Sequence[float],
    ranks: Sequence[np.ndarray | None],
) -> str:
    """Return a short name of the prompts of all sources, their weights and their order."""
    orders = [None if one is None else one.tolist() for one in ranks]
    return hashlib.sha256(
        repr((list(fingerprints), list(weights), orders)).encode()
    ).hexdigest()[:16]
