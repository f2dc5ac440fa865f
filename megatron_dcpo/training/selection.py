"""Which checkpoint is the best, and when validation no longer improves: ``training.keep_best`` and
``training.early_stop``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_dcpo.evaluation.headline import improves, value_of


class Selection:
    """The validations of a run so far.

    ``metric`` is what ``training.keep_best`` names (empty: nothing is selected), ``patience`` the
    number of validations of ``training.early_stop`` (0: never). ``measured`` holds
    ``evaluation/BENCHMARK/METRIC`` by step.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self.metric = metric
        self.patience = patience
        self.measured: dict[int, Mapping[str, float]] = {}
        self.best_step: int | None = None

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Note a validation; return whether its checkpoint is the best one."""
        self.measured[step] = metrics
        return self._note_best(step)

    def restore(self, measured: Mapping[int, Mapping[str, float]], saved: Collection[int]) -> None:
        """Take over the validations of a run that is resumed; ``saved`` are the steps of its intact
        checkpoints.
        """
        self.measured = dict(measured)
        for step in sorted(saved):
            if step in self.measured:
                self._note_best(step)

    def recall(
        self, step: int, metric: str, value: float, measured: dict[int, dict[str, float]]
    ) -> None:
        """Add to ``measured`` what ``best.json`` says of the best step, if the records of that step
        are lost.
        """
        if metric == self.metric and step not in measured:
            measured[step] = {f"evaluation/{metric.removeprefix('evaluation/')}": value}

    def value(self, step: int) -> float:
        """Return the value of the metric after ``step``."""
        return value_of(self.measured[step], self.metric)

    def stagnation(self) -> tuple[int, int | None]:
        """Return how many validations in a row have not improved, and the step of the best one,
        None when every value was undefined. A validation before the first step does not count.
        """
        best: int | None = None
        stagnant = 0
        for step in sorted(self.measured.keys() - {0}):
            before = self.measured[best] if best is not None else None
            if improves(self.metric, self.measured[step], before):
                best = step
                stagnant = 0
            else:
                stagnant += 1
        return stagnant, best

    def is_exhausted(self) -> bool:
        """Return whether ``training.early_stop`` ends the run."""
        return self.patience > 0 and self.stagnation()[0] >= self.patience

    def _note_best(self, step: int) -> bool:
        if not self.metric or step == 0:
            return False
        before = self.measured[self.best_step] if self.best_step is not None else None
        if not improves(self.metric, self.measured[step], before):
            return False
        self.best_step = step
        return True
