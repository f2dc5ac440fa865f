"""One dictionary of numbers for a set of judged samples: the same for a training step and for an
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.binned import binned_error, null_ece
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

INTERVALS = ("accuracy", "ece", "pce", "brier", "auroc")


def summarize(
    confidences: Confidences,
    correct: Correct,
    problem_ids: Sequence[Any] | None = None,
    statuses: Sequence[str] | None = None,
    *,
    bins: int = DEFAULT_BINS,
    resamples: int = 0,
    seed: int = 0,
    ranking_only: bool = False,
) -> dict[str, Any]:
    """Return all metrics of N judged samples. ``None``/NaN/out-of-range confidences are unparsed.

    ``accuracy`` is over all N samples, calibration metrics are over the parsed ones
    (``accuracy_parsed`` is theirs),
    ``*_worst`` over all N with every unparsed confidence at the wrong end. ``violation_rate`` is
    the share of
    ``statuses`` that are not ``ok`` (``violations``: per kind), or 1 - parse_rate without statuses.
    With ``resamples``
    > 0 there are ``ci95``: {name: [low, high]}, bootstrapped over ``problem_ids``,
    ``ece_corrected``, the ECE that its
    interval is around, and ``ece_null95``, the largest of 95 % of calibrated models. Undefined
    values are NaN; see
    ``json_ready`` for writing them. ``ranking_only``: the confidences are scores of any size (a
    mean log-prob);
    AUROC, AUPRC and AURC are of all of them, everything else treats what lies outside [0, 1] as
    unparsed.
    """
    c = metrics.as_confidences(confidences)
    y = metrics.as_correct(correct)
    valid, valid_correct = metrics.valid_rows(c, y)
    if ranking_only:
        ranked = c
        ranked_correct = y
    else:
        ranked = valid
        ranked_correct = valid_correct
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
        "auprc": metrics.auprc(ranked, ranked_correct),
        **selective_summary(ranked, ranked_correct),
        "mean_confidence": float(valid.mean(dtype=np.float64)) if len(valid) else math.nan,
        "std_confidence": float(valid.std(dtype=np.float64)) if len(valid) else math.nan,
        "overconfidence": metrics.overconfidence(c, y),
        "parse_rate": parsed,
        "violation_rate": 1.0 - parsed,
        "ece_worst": metrics.ece(worst, y, bins),
        "pce_worst": metrics.pce(worst, y, bins),
        "brier_worst": metrics.brier(worst, y),
    }
    if statuses is not None:
        summary |= violation_rates(statuses)
    if resamples:
        summary["ece_corrected"] = binned_error(
            confidences=c,
            correct=y,
            problem_ids=problem_ids,
            bins=bins,
            resamples=resamples,
            seed=seed,
        ).estimate
        summary["ece_null95"] = null_ece(
            confidences=c,
            bins=bins,
            resamples=min(resamples, 200),
            seed=seed,
        )
        summary["ci95"] = intervals(
            confidences=c,
            correct=y,
            problem_ids=problem_ids,
            bins=bins,
            resamples=resamples,
            seed=seed,
        )
    return summary


def violation_rates(statuses: Sequence[str]) -> dict[str, Any]:
    """Return ``violation_rate`` and ``violations``: {kind: share of all samples}, with every kind
    there is.
    """
    n = len(statuses)
    share = {kind: sum(s == kind for s in statuses) / n if n else math.nan for kind in MALFORMED}
    return {
        "violation_rate": sum(s != "ok" for s in statuses) / n if n else math.nan,
        "violations": share,
    }


def intervals(
    confidences: np.ndarray,
    correct: np.ndarray,
    problem_ids: Sequence[Any] | None,
    *,
    bins: int = DEFAULT_BINS,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return 95 % intervals [low, high] of ``INTERVALS``, clustered by problem: bootstrap
    percentiles, and of the binned errors those of ``binned_error``.
    """

    def auroc_of_valid(c: np.ndarray, y: np.ndarray) -> float:
        return metrics.auroc(*metrics.valid_rows(c, y))

    functions: dict[str, metrics.Metric] = {
        "accuracy": lambda c, y: metrics.accuracy(y),
        "brier": metrics.brier,
        "auroc": auroc_of_valid,
    }
    found = {
        name: list(
            metrics.bootstrap_ci(function, confidences, correct, problem_ids, resamples, seed=seed)
        )
        for name, function in functions.items()
    }
    for name in ("ece", "pce"):
        error = binned_error(
            confidences=confidences,
            correct=correct,
            problem_ids=problem_ids,
            bins=bins,
            resamples=resamples,
            seed=seed,
            over_only=name == "pce",
        )
        found[name] = [error.low, error.high]
    return {name: found[name] for name in INTERVALS}


def json_ready(value: Any) -> Any:
    """Return the same structure with NaN and infinities as ``None``, NumPy values as Python's and
    lone surrogates as U+FFFD, for strict JSON in UTF-8.
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
