"""Where the paper's advantages drive a stated confidence: a calculation from the labels and the
spread of a trained run, compared with what this run states. It is a check of consistency and no
prediction.

A policy states c = m + noise (Gaussian, cut to [0, 1]) whatever the problem is. The expected
gradient on m is in proportion to E[A_c,i (c_i - m)], averaged over groups; where it is zero and
falling, m is stable. For a spread that shrinks the drift has a closed form
(docs/algorithms.md#4-advantages). The groups are those of a published run: each test problem's
responses, as many of them right as were right.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from lab.fitted import Records
from lab.results import read_archive

GRID = np.linspace(0.02, 0.98, 97)


@dataclass(frozen=True)
class Advantage:
    """Describe a confidence advantage: the score, the share of the group accuracy in its target,
    the normalization.
    """

    loss: str = "l1"
    lam: float = 0.5
    normalization: str = "std"


PAPER = Advantage()
PROPER = Advantage("brier", 0.0, "mean")


def advantages(c: np.ndarray, R: np.ndarray, rule: Advantage) -> np.ndarray:
    """Return A_c of groups [..., G] that state ``c`` and are right with ``R``, as `objectives.dcpo`
    computes them.
    """
    target = rule.lam * R.mean(axis=-1, keepdims=True) + (1 - rule.lam) * R
    score = -np.abs(c - target) if rule.loss == "l1" else -np.square(c - target)
    centred = score - score.mean(axis=-1, keepdims=True)
    return (
        centred / (score.std(axis=-1, keepdims=True) + 1e-6)
        if rule.normalization == "std"
        else centred
    )


def drift(
    m: float, right: np.ndarray, spread: float, rule: Advantage = PAPER, samples: int = 4000
) -> float:
    """Return E[A_c (c - m)] for groups of which ``right`` [G + 1] is the distribution of the number
    of right responses. ``spread``: standard deviation of the noise; ``samples`` pairs of opposite
    sign are drawn, the same for every m.
    """
    G = len(right) - 1
    z = spread * np.random.default_rng(0).normal(size=(samples, G))
    z = np.concatenate([z, -z])
    c = np.clip(m + z, 0, 1)
    labels = (np.arange(G) < np.arange(G + 1)[:, None]).astype(float)
    return float(right @ np.array([(advantages(c, R, rule) * z).mean() for R in labels]))


def stable_points(
    right: np.ndarray, spread: float, rule: Advantage = PAPER, samples: int = 4000
) -> list[float]:
    """Return the confidences at which the drift changes from upward to downward, in (0.02,
    0.98).
    """
    values = np.array([drift(m, right, spread, rule, samples) for m in GRID])
    below = np.flatnonzero((values[:-1] > 0) & (values[1:] <= 0))
    step = values[below] / (values[below] - values[below + 1])
    return [float(m) for m in GRID[below] + step * (GRID[below + 1] - GRID[below])]


def right_in_groups(r: Records) -> np.ndarray:
    """Return the distribution [G + 1] of the number of right responses among the G responses to a
    problem.
    """
    right = np.bincount(r.problem, weights=r.correct).astype(int)
    return np.bincount(right, minlength=len(r.problem) // len(right) + 1) / len(right)


def spread_within_problems(r: Records) -> float:
    """Return the root mean variance of the stated confidences of one problem's responses."""
    stated = r.confidence.reshape(r.problem.max() + 1, -1)
    return float(np.sqrt(np.nanmean(np.nanvar(stated, axis=1))))


def drift_of_run(r: Records, start: Records) -> dict[str, Any]:
    """Compare what a run states with the stable points of the paper's advantages and of Brier on
    its own groups.

    ``start`` are responses of the policy it was trained from: on the way from one to the other,
    groups are taken from both. Labels drawn anew from each problem's share of right responses have
    their noise a second time.
    """
    right, spread, first = (right_in_groups(r), spread_within_problems(r), right_in_groups(start))
    G = len(right) - 1
    shares = np.arange(G + 1) / G
    anew = right @ stats.binom.pmf(np.arange(G + 1), G, shares[:, None])
    mixtures = [part * right + (1 - part) * first for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return {
        "accuracy": float(r.correct.mean()),
        "stated_mean": float(np.nanmean(r.confidence)),
        "stated_sd": float(np.nanstd(r.confidence)),
        "spread_within_problems": spread,
        "stable": stable_points(right, spread),
        "stable_with_labels_drawn_anew": stable_points(anew, spread),
        "stable_brier": stable_points(right, spread, PROPER),
        "stable_at_a_spread_of_0.045_0.067": [
            stable_points(right, other)[0] for other in (0.045, 0.067)
        ],
        "on_the_way": [
            {"accuracy": float(m @ shares), "stable": stable_points(m, spread)} for m in mixtures
        ],
        "confidence": GRID.tolist(),
        "drift": [drift(m, right, spread) for m in GRID],
        "drift_brier": [drift(m, right, spread, PROPER) for m in GRID],
    }


def curve_of_run(archive: Path, run: str) -> dict[str, Any]:
    """Return what the training stated on the way, from step 50, where it understates: accuracy
    minus ECE, the lowest and the last point.
    """
    points = list(csv.DictReader(io.StringIO(read_archive(archive)[f"{run}/curve.csv"].decode())))[
        4:
    ]
    accuracy, error = (
        np.array([float(p[key]) for p in points]) for key in ("reward/accuracy", "calibration/ece")
    )
    low = int(np.argmin(accuracy - error))
    lowest = {
        "step": int(points[low]["step"]),
        "stated": accuracy[low] - error[low],
        "accuracy": accuracy[low],
    }
    return {"lowest_on_the_way": lowest, "last_of_training": accuracy[-1] - error[-1]}
