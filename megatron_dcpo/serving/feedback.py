"""Verdicts on answers that were served, and the calibration error that they show."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.calibration.binned import BinnedError, binned_error
from megatron_dcpo.calibration.metrics import ece

MOST_ANSWERS = 100_000  # whose confidence is remembered until a verdict comes
MOST_VERDICTS = 10_000  # the last ones, over which the error runs
_RESAMPLES = 300

Key = tuple[str, int]  # id of a response and index of a choice


@dataclass(frozen=True)
class RunningError:
    """The ECE over the last ``n`` verdicts, NaN without one; and the estimate corrected for its
    bias, with the ends of its 95 % interval (``calibration/binned.py``).
    """

    n: int
    ece: float
    corrected: BinnedError


class UnknownAnswerError(LookupError):
    """No answer of this id and index was served, or it was too long ago."""


class Feedback:
    """Remembers the confidences of answers and collects verdicts on them. Thread-safe."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Key, float | None] = OrderedDict()
        self._verdicts: OrderedDict[Key, tuple[float, bool]] = OrderedDict()
        self._lock = threading.Lock()
        self._changed = True
        self._error = RunningError(0, np.nan, BinnedError(np.nan, np.nan, np.nan))

    def remember(self, name: str, index: int, confidence: float | None) -> None:
        """Remember the confidence of an answer."""
        if not name:
            return
        with self._lock:
            self._answers[name, index] = confidence
            if len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)

    def judge(self, name: str, index: int, correct: bool) -> float | None:
        """Take a verdict, in the place of an earlier one on the same answer, and return the
        confidence of the answer. Without a confidence it does not count. Raises
        :class:`UnknownAnswerError`.
        """
        key = (name, index)
        with self._lock:
            if key not in self._answers:
                raise UnknownAnswerError(name)
            confidence = self._answers[key]
            if confidence is not None:
                self._verdicts[key] = (confidence, correct)
                self._changed = True
                if len(self._verdicts) > MOST_VERDICTS:
                    self._verdicts.popitem(last=False)
            return confidence

    def error(self) -> RunningError:
        """Return the error over the last verdicts; it is computed when there is a new one."""
        with self._lock:
            if not self._changed:
                return self._error
            verdicts = list(self._verdicts.values())
            self._changed = False
        confidences = np.array([confidence for confidence, _ in verdicts], np.float64)
        correct = np.array([right for _, right in verdicts], np.float64)
        self._error = RunningError(
            n=len(verdicts),
            ece=ece(confidences, correct),
            corrected=binned_error(confidences, correct, resamples=_RESAMPLES),
        )
        return self._error
