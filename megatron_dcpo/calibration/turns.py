"""Confidences at every turn of a session: how calibrated they are by the number of the turn, and
what stopping below one would save. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dcpo.calibration.summary import summarize

THRESHOLDS = tuple(number / 50 for number in range(51))


@dataclass(frozen=True)
class SessionTurns:
    """The confidences that were stated behind earlier answers of a session than the last, each with
    the number of its turn, None if malformed; the number of ``calls``, and whether the session is
    right, 0 or 1.
    """

    confidences: Sequence[tuple[int, float | None]]
    calls: int
    correct: float


def summaries_by_turn(
    sessions: Sequence[SessionTurns], bins: int
) -> dict[int, tuple[Sequence[float | None], Sequence[float], dict[str, Any]]]:
    """Return confidences, correctness of their sessions, and their summary, by the number of the
    turn.
    """
    by_turn: dict[int, tuple[list[float | None], list[float]]] = {}
    for session in sessions:
        for turn, confidence in session.confidences:
            confidences, correct = by_turn.setdefault(turn, ([], []))
            confidences.append(confidence)
            correct.append(session.correct)
    return {
        turn: (confidences, correct, summarize(confidences, correct, bins=bins))
        for turn, (confidences, correct) in sorted(by_turn.items())
    }


def stopping_curve(sessions: Sequence[SessionTurns]) -> dict[str, list[float]]:
    """Return what would become of the sessions if each were stopped behind its first answer whose
    confidence is below a ``threshold``: ``accuracy``, a stopped session counting as wrong, and
    ``saved``, the share of all calls that would not be made. A stop behind turn k saves the calls
    after the k-th.
    """
    right = np.array([session.correct for session in sessions], float)
    calls = np.array([session.calls for session in sessions], float)
    accuracies, saved = [], []
    for threshold in THRESHOLDS:
        stops = [_stopped_at(session, threshold) for session in sessions]
        goes_on = np.array([stop is None for stop in stops])
        made = [calls[n] if stop is None else min(stop, calls[n]) for n, stop in enumerate(stops)]
        accuracies.append(float(np.mean(right * goes_on)))
        saved.append(float(1 - np.sum(made) / max(calls.sum(), 1)))
    return {"threshold": list(THRESHOLDS), "accuracy": accuracies, "saved": saved}


def _stopped_at(session: SessionTurns, threshold: float) -> int | None:
    """Return the turn behind which a session stops, None if it does not."""
    stops = [
        turn
        for turn, confidence in session.confidences
        if confidence is not None and confidence < threshold
    ]
    return min(stops, default=None)
