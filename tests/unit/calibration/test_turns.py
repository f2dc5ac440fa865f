"""Confidences by the number of their turn, and what stopping early keeps and saves, by hand."""

from __future__ import annotations

import pytest

from megatron_dcpo.calibration.turns import SessionTurns, stopping_curve, summaries_by_turn

SESSIONS = [
    SessionTurns(((1, 0.9), (2, 0.8)), calls=3, correct=1.0),
    SessionTurns(((1, 0.7), (2, 0.1)), calls=4, correct=0.0),
    SessionTurns(((1, None),), calls=2, correct=1.0),
    SessionTurns((), calls=1, correct=0.0),
]


def test_by_turn() -> None:
    found = summaries_by_turn(SESSIONS, bins=20)
    assert list(found) == [1, 2]
    _, correct, first = found[1]
    assert correct == [1.0, 0.0, 1.0]
    assert (first["n"], first["n_parsed"]) == (3, 2)
    assert first["brier"] == pytest.approx((0.1**2 + 0.7**2) / 2)
    assert first["violation_rate"] == pytest.approx(1 / 3)
    assert found[2][2]["mean_confidence"] == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("threshold", "accuracy", "saved"),
    [
        (0.0, 2 / 4, 0.0),
        (0.5, 2 / 4, 2 / 10),  # the wrong session behind its second call of four
        (0.8, 2 / 4, 3 / 10),  # and behind its first
        (0.82, 1 / 4, 4 / 10),  # the right one behind its second of three
        (1.0, 1 / 4, 5 / 10),  # one that has stated no number goes on
    ],
)
def test_stopping(threshold: float, accuracy: float, saved: float) -> None:
    curve = stopping_curve(SESSIONS)
    at = curve["threshold"].index(threshold)
    assert curve["accuracy"][at] == pytest.approx(accuracy)
    assert curve["saved"][at] == pytest.approx(saved)
