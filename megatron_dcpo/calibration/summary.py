"""One dictionary of numbers for a set of judged samples, the same for a training step and for an
evaluation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.binned import binned_error, null_ece
from megatron_dcpo.calibration.kinds import (
    Kinds,
    WithinKinds,
    WithinProblems,
    auroc_within,
    auroc_within_ci,
    auroc_within_problem,
    auroc_within_problem_ci,
)
from megatron_dcpo.calibration.metrics import (
    DEFAULT_BINS,
    Confidences,
    Correct,
    ece_adaptive,
    ece_debiased,
)
from megatron_dcpo.calibration.selective import selective_summary
from megatron_dcpo.runtime.text import encodable
from megatron_dcpo.types import MALFORMED

# the metrics of a confidence that have an interval
OF_CONFIDENCE = ("ece", "pce", "brier", "auroc", "auroc_within", "auroc_within_problem")
INTERVALS = ("accuracy", *OF_CONFIDENCE)


@dataclass(frozen=True)
class Bootstrap:
    """A bootstrap over problems: ``problem_ids`` has the problem of each sample (without it every
    sample is its own problem). Without ``resamples`` there are no intervals.
    """

    problem_ids: Sequence[Any] | None = None
    resamples: int = 0
    seed: int = 0


NO_BOOTSTRAP = Bootstrap()


def summarize(
    confidences: Confidences,
    correct: Correct,
    statuses: Sequence[str] | None = None,
    *,
    bins: int = DEFAULT_BINS,
    bootstrap: Bootstrap = NO_BOOTSTRAP,
    ranking_only: bool = False,
    kinds: Kinds | None = None,
) -> dict[str, Any]:
    """Return all metrics of N judged samples. ``None``, NaN and out-of-range confidences are
    unparsed. Undefined values are NaN; see :func:`json_ready` for writing them.

    ``accuracy`` is over all N samples. Calibration metrics and ``accuracy_parsed`` are over the
    parsed ones; ``*_worst`` are over all N with every unparsed confidence at the wrong end.
    ``violation_rate`` is the share of ``statuses`` that are not ``ok`` (``violations``: per kind),
    or 1 - parse_rate without statuses. With a ``bootstrap`` there are also ``ci95``: {name: [low,
    high]}, ``ece_corrected``, the ECE at the center of its interval, and ``ece_null95``, below
    which 95 % of calibrated models stay.

    ``kinds`` [N] are the kinds of problem that ``auroc_within`` is measured within; ``kinds_used``
    of them have a right and a wrong answer, ``kinds_left_out`` do not. Without kinds it is NaN.
    ``auroc_within_problem`` is that among answers to one problem, and ``problems_used`` the number
    of problems that have a right and a wrong one; it needs the ``problem_ids`` of ``bootstrap``.

    With ``ranking_only`` the confidences are scores of any size (a mean log-prob): AUROC, AUPRC and
    AURC are over all of them, and everything else treats scores outside [0, 1] as unparsed.
    """
    c = metrics.as_confidences(confidences)
    y = metrics.as_correct(correct)
    valid, valid_correct = metrics.valid_rows(c, y)
    scores = c if ranking_only else np.where(metrics.is_valid(c), c, math.nan)
    ranked, ranked_correct = metrics.ranked_rows(scores, y)
    within = WithinKinds(value=math.nan, used=0, left_out=0)
    if kinds is not None:
        within = auroc_within(scores, y, kinds)
    within_problem = WithinProblems(value=math.nan, mixed=0)
    if bootstrap.problem_ids is not None:
        within_problem = auroc_within_problem(scores, y, bootstrap.problem_ids)
    mean_confidence = math.nan
    std_confidence = math.nan
    if len(valid):
        mean_confidence = float(valid.mean(dtype=np.float64))
        std_confidence = float(valid.std(dtype=np.float64))
    worst = metrics.pessimistic(c, y)
    parts = metrics.brier_decomposition(c, y, bins)
    parsed = metrics.parse_rate(c)
    summary: dict[str, Any] = {
        "n": len(y),
        "n_parsed": len(valid),
        "accuracy": metrics.accuracy(y),
        "accuracy_parsed": metrics.accuracy(valid_correct),
        "ece": metrics.ece(c, y, bins),
        "pce": metrics.pce(c, y, bins),
        "mce": metrics.mce(c, y, bins),
        "ece_equal_mass": metrics.ece_equal_mass(c, y, bins),
        "ece_adaptive": ece_adaptive(c, y, bins),
        "ece_debiased": ece_debiased(c, y, bins),
        "brier": metrics.brier(c, y),
        "brier_reliability": parts.reliability,
        "brier_resolution": parts.resolution,
        "brier_uncertainty": parts.uncertainty,
        "nll": metrics.nll(c, y),
        "auroc": metrics.auroc(ranked, ranked_correct),
        "auroc_within": within.value,
        "kinds_used": within.used,
        "kinds_left_out": within.left_out,
        "auroc_within_problem": within_problem.value,
        "problems_used": within_problem.mixed,
        "auprc": metrics.auprc(ranked, ranked_correct),
        **selective_summary(ranked, ranked_correct),
        "mean_confidence": mean_confidence,
        "std_confidence": std_confidence,
        "overconfidence": metrics.overconfidence(c, y),
        "parse_rate": parsed,
        "violation_rate": 1.0 - parsed,
        "ece_worst": metrics.ece(worst, y, bins),
        "pce_worst": metrics.pce(worst, y, bins),
        "brier_worst": metrics.brier(worst, y),
    }
    if statuses is not None:
        summary |= violation_rates(statuses)
    if bootstrap.resamples:
        summary["ece_corrected"] = binned_error(
            confidences=c,
            correct=y,
            problem_ids=bootstrap.problem_ids,
            bins=bins,
            resamples=bootstrap.resamples,
            seed=bootstrap.seed,
        ).estimate
        summary["ece_null95"] = null_ece(
            confidences=c, bins=bins, resamples=min(bootstrap.resamples, 200), seed=bootstrap.seed
        )
        summary["ci95"] = intervals(
            confidences=c,
            correct=y,
            bootstrap=bootstrap,
            bins=bins,
            kinds=kinds,
            ranking_only=ranking_only,
        )
    return summary


def violation_rates(statuses: Sequence[str]) -> dict[str, Any]:
    """Return ``violation_rate`` and ``violations``, the share of all samples for every kind of
    violation.
    """
    n = len(statuses)
    if not n:
        return {"violation_rate": math.nan, "violations": dict.fromkeys(MALFORMED, math.nan)}
    counts = Counter(statuses)
    return {
        "violation_rate": (n - counts["ok"]) / n,
        "violations": {kind: counts[kind] / n for kind in MALFORMED},
    }


def intervals(
    confidences: np.ndarray,
    correct: np.ndarray,
    bootstrap: Bootstrap,
    bins: int = DEFAULT_BINS,
    kinds: Kinds | None = None,
    ranking_only: bool = False,
) -> dict[str, list[float]]:
    """Return 95 % intervals [low, high] of ``INTERVALS``: from ``binned_error`` for the binned
    errors, bootstrap percentiles for the others, Wilson's for an accuracy of 0 or 1. Without
    ``kinds`` there is none of ``auroc_within``, without problems none of ``auroc_within_problem``.
    """

    def scores_of(c: np.ndarray) -> np.ndarray:
        return c if ranking_only else np.where(metrics.is_valid(c), c, math.nan)

    functions: dict[str, metrics.Metric] = {
        "accuracy": lambda c, y: metrics.accuracy(y),
        "brier": metrics.brier,
        "auroc": lambda c, y: metrics.auroc(scores_of(c), y),
    }
    by_name = {}
    for name, function in functions.items():
        low, high = metrics.bootstrap_ci(
            metric=function,
            confidences=confidences,
            correct=correct,
            problem_ids=bootstrap.problem_ids,
            resamples=bootstrap.resamples,
            seed=bootstrap.seed,
        )
        by_name[name] = [low, high]
    if len(correct) and np.ptp(correct) == 0:  # all right or all wrong: resamples do not differ
        problems = len(correct)
        if bootstrap.problem_ids is not None:
            problems = len(set(bootstrap.problem_ids))
        by_name["accuracy"] = metrics.wilson_of_equal(float(correct[0]), problems)
    if kinds is not None:
        low, high = auroc_within_ci(
            confidences=scores_of(confidences),
            correct=correct,
            kinds=kinds,
            problem_ids=bootstrap.problem_ids,
            resamples=bootstrap.resamples,
            seed=bootstrap.seed,
        )
        by_name["auroc_within"] = [low, high]
    if bootstrap.problem_ids is not None:
        low, high = auroc_within_problem_ci(
            confidences=scores_of(confidences),
            correct=correct,
            problem_ids=bootstrap.problem_ids,
            resamples=bootstrap.resamples,
            seed=bootstrap.seed,
        )
        by_name["auroc_within_problem"] = [low, high]
    for name in ("ece", "pce"):
        error = binned_error(
            confidences=confidences,
            correct=correct,
            problem_ids=bootstrap.problem_ids,
            bins=bins,
            resamples=bootstrap.resamples,
            seed=bootstrap.seed,
            over_only=name == "pce",
        )
        by_name[name] = [error.low, error.high]
    return {name: by_name[name] for name in INTERVALS if name in by_name}


def json_ready(value: Any) -> Any:  # noqa: ANN401 - JSON of any shape
    """Return the value for strict JSON in UTF-8: NaN and infinities as ``None``, NumPy values as
    Python's, lone surrogates as U+FFFD.
    """
    if isinstance(value, dict):
        return {encodable(str(key)): json_ready(item) for key, item in value.items()}
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list | tuple | np.ndarray):
        return [json_ready(item) for item in value]
    if isinstance(value, np.generic):
        return json_ready(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
