"""What a confidence is for: not answering, voting, choosing among samples, asking a better model. NumPy only.

Every function takes judged samples as arrays [N]: ``problems`` (any labels), ``c`` (confidence; NaN ranks below all others)
and ``y`` (0/1). A problem with several samples counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

TARGETS = (0.01, 0.05, 0.1)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)


def use_summary(
    problems: Sequence[Any], c: np.ndarray, y: np.ndarray, answers: Sequence[Any], seed: int = 0
) -> dict[str, Any]:
    """All uses of one model's confidence, for ``evaluation.json``. ``answers`` [N]: equal where two responses agree, None
    without one."""
    _, index = np.unique(np.asarray(problems), return_inverse=True)
    scores = np.where(np.isnan(c), -1.0, c)
    return {
        "abstention": [abstention(index, scores, y, target, seed) for target in TARGETS],
        "votes": votes(index, scores, y, answers),
    }


def conformal_threshold(index: np.ndarray, c: np.ndarray, y: np.ndarray, target: float) -> float:
    """The least threshold t such that "answer where c >= t" is wrong on at most ``target`` of new problems, in expectation.

    Conformal risk control (Angelopoulos et al. 2022): the loss L_p(t) of a problem is the share of its samples that are
    answered and wrong; it lies in [0, 1] and falls with t. With n problems, t is the least with (sum_p L_p(t) + 1) / (n + 1)
    <= target; then E L_{n+1}(t) <= target for a problem exchangeable with them. ``inf``: too few problems, answer nothing.
    """
    repeats, n = np.bincount(index), int(index.max()) + 1
    order = np.argsort(-c, kind="stable")
    loss = np.cumsum((1.0 - y[order]) / repeats[index[order]])  # of answering these and all before
    last = np.append(c[order][1:] != c[order][:-1], True)  # samples of equal confidence are answered together
    allowed = np.flatnonzero(last & ((loss + 1.0) / (n + 1.0) <= target + 1e-12))
    return float(c[order][allowed[-1]]) if len(allowed) else math.inf


def abstention(index: np.ndarray, c: np.ndarray, y: np.ndarray, target: float, seed: int = 0) -> dict[str, float]:
    """The threshold from one random half of the problems, what it does on the other half.

    ``error`` is the share of all questions answered wrongly, which the guarantee is about; ``error_answered`` of those
    answered; ``coverage`` the share answered.
    """
    n = int(index.max()) + 1
    fitted = np.random.default_rng(seed).permutation(n) < n // 2
    mine = fitted[index]
    if n < 2:
        return {"target": target} | dict.fromkeys(("threshold", "coverage", "error", "error_answered"), math.nan)
    _, first = np.unique(index[mine], return_inverse=True)
    threshold = conformal_threshold(first, c[mine], y[mine], target)
    answered = c[~mine] >= threshold
    weight = 1.0 / (np.bincount(index)[index[~mine]] * (~fitted).sum())
    coverage, error = float(weight @ answered), float(weight @ (answered * (1.0 - y[~mine])))
    answered_error = error / coverage if coverage else math.nan
    return {
        "target": target,
        "threshold": threshold,
        "coverage": coverage,
        "error": error,
        "error_answered": answered_error,
    }


def votes(index: np.ndarray, c: np.ndarray, y: np.ndarray, answers: Sequence[Any]) -> dict[str, float]:
    """Accuracy over problems of one sample, of a plain majority of answers, of one weighted by confidence, and of the most
    confident sample (best of n). Ties count as their mean; a response without an answer has no vote."""
    totals = dict.fromkeys(("single", "majority", "weighted", "best_of_n"), 0.0)
    groups = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    for rows in groups:
        totals["single"] += float(y[rows].mean())
        totals["best_of_n"] += float(y[rows][c[rows] == c[rows].max()].mean())
        count: dict[Any, tuple[float, float, float]] = {}
        for row in rows:
            if answers[row] is not None:
                n, weight, _ = count.get(answers[row], (0.0, 0.0, 0.0))
                count[answers[row]] = (n + 1.0, weight + max(float(c[row]), 0.0), float(y[row]))
        for name, place in (("majority", 0), ("weighted", 1)):
            most = max((v[place] for v in count.values()), default=0.0)
            winners = [v[2] for v in count.values() if v[place] == most]
            totals[name] += float(np.mean(winners)) if winners else 0.0
    return {name: total / len(groups) for name, total in totals.items()}


def routing(
    problems: Sequence[Any], c: np.ndarray, y: np.ndarray, second: dict[Any, float], cost: float
) -> list[dict[str, float]]:
    """The least confident ``SHARES`` of the samples answered by a second model, right with ``second[problem]``, at ``cost``
    times the first one's: accuracy, that of sending as many at random, and cost per question (the first is asked always).
    Samples of equal confidence are sent in proportion. Samples whose problem ``second`` lacks are left out."""
    known = np.array([problem in second for problem in problems])
    if not known.any():
        return []
    scores = np.where(np.isnan(c), -1.0, c)[known]
    ours, theirs = y[known], np.array([second[p] for p, has in zip(problems, known, strict=True) if has])
    _, group = np.unique(scores, return_inverse=True)
    count = np.bincount(group)
    gain = np.bincount(group, weights=theirs - ours)
    found = []
    for share in SHARES:
        left = share * len(ours) - (np.cumsum(count) - count)  # samples still to send when a group's turn comes
        sent = np.clip(left / count, 0.0, 1.0)
        accuracy = float(ours.mean() + (sent * gain).sum() / len(ours))
        random = float((1.0 - share) * ours.mean() + share * theirs.mean())
        found.append({"share": share, "accuracy": accuracy, "random": random, "cost": 1.0 + share * cost})
    return found
