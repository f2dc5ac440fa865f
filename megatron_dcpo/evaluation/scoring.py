"""From judged samples to ``evaluation.json``. Needs no model: old ``samples.jsonl`` files can be
scored again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.metrics import DEFAULT_BINS, Bins
from megatron_dcpo.calibration.selective import abstention_rates, coverage_to_json
from megatron_dcpo.calibration.summary import (
    INTERVALS,
    Bootstrap,
    json_ready,
    summarize,
    violation_rates,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample

CONFIDENCE_KINDS: Mapping[str, Callable[[Sample], float | None]] = MappingProxyType(
    {
        "verbal": lambda sample: sample.judgement.confidence,
        "token": lambda sample: sample.measures.token_confidence,
        "token_product": lambda sample: _power(
            sample.measures.token_confidence, sample.judgement.length
        ),
        "token_min": lambda sample: _exp(sample.measures.min_logprob),
        "token_mean_logprob": lambda sample: _log(sample.measures.token_confidence),
        "logprob": lambda sample: sample.measures.reasoning_logprob,
        "token_entropy": lambda sample: _exp(_negative(sample.measures.mean_entropy)),
        "consistency": lambda sample: sample.measures.consistency_confidence,
        "posthoc": lambda sample: sample.measures.posthoc_confidence,
    }
)
RANKING_ONLY = frozenset(
    {"token_mean_logprob", "logprob"}
)  # in nats, no probability: they rank, nothing else
BETTER: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "accuracy": max,
        "ece": min,
        "pce": min,
        "brier": min,
        "auroc": max,
        "skill": max,
        "violation_rate": min,
    }
)
HEADLINE = (
    "accuracy",
    "ece",
    "pce",
    "brier",
    "auroc",
    "skill",
    "mean_confidence",
    "violation_rate",
    "n",
)


def _power(base: float | None, exponent: int) -> float | None:
    return None if base is None else base**exponent


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _log(value: float | None) -> float | None:
    if value is None:
        return None
    return math.log(value) if value > 0 else -math.inf


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the parts of ``"verbal,token"``, checked."""
    kinds = tuple(
        dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    )
    unknown = [kind for kind in kinds if kind not in CONFIDENCE_KINDS]
    if unknown or not kinds:
        raise UserError(
            f"unknown confidence {(unknown or [text])[0]!r}; known: {', '.join(CONFIDENCE_KINDS)}"
        )
    return kinds


def score_samples(
    samples: Sequence[Sample],
    kinds: Sequence[str] = ("verbal", "token", "consistency"),
    model: str = "",
    bins: int = DEFAULT_BINS,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return ``{"model", "benchmarks": {NAME: scores}, "overall": scores}``, strict JSON (undefined
    values are ``None``).

    ``overall`` pools the samples of all benchmarks; its ``macro`` is the plain mean over
    benchmarks, which is what the papers of the field print as "Overall".
    """
    by_benchmark: dict[str, list[Sample]] = {}
    for sample in samples:
        by_benchmark.setdefault(sample.prompt.task, []).append(sample)
    options = {"bins": bins, "resamples": resamples, "seed": seed}
    benchmarks = {
        name: _score(group, kinds, **options) for name, group in by_benchmark.items()
    }
    # The intervals are the slow part, and one benchmark alone is its own pool.
    overall = (
        dict(*benchmarks.values())
        if len(benchmarks) == 1
        else _score(samples, kinds, **options)
    )
    overall["macro"] = _macro(benchmarks, kinds)
    return json_ready({"model": model, "benchmarks": benchmarks, "overall": overall})


def headline(
    evaluation: Mapping[str, Any], kind: str = "verbal", benchmark: str | None = None
) -> dict[str, Any]:
    """Return the one-line summary of an evaluation: ``HEADLINE`` of one kind of confidence, overall
    or of one benchmark.
    """
    scores = evaluation["benchmarks"][benchmark] if benchmark else evaluation["overall"]
    flat = {**scores.get(kind, {}), "accuracy": scores["accuracy"], "n": scores["n"]}
    return {key: flat.get(key) for key in HEADLINE}


def _score(
    samples: Sequence[Sample],
    kinds: Sequence[str],
    bins: int,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Score one benchmark, or all of them pooled: accuracy, and a block per kind of confidence."""
    correct = [float(sample.correct) for sample in samples]
    problems = ["/".join(sample.problem_key) for sample in samples]
    repeats = sorted({sample.response.sample_index for sample in samples})
    judgements = [sample.judgement for sample in samples]
    scores: dict[str, Any] = {
        "accuracy": metrics.accuracy(correct),
        "n": len(samples),
        "problems": len(set(problems)),
        "repeats": len(repeats),
        "mean_length": _mean([judgement.length for judgement in judgements]),
        "truncated_rate": _mean(
            [s.response.finish_reason == "length" for s in samples]
        ),
        "answer_rate": _mean(
            [judgement.answer is not None for judgement in judgements]
        ),
        "parse_rate": metrics.parse_rate(
            [judgement.confidence for judgement in judgements]
        ),
        **violation_rates([judgement.status for judgement in judgements]),
    }
    thinking = [
        judgement.thinking_tokens
        for judgement in judgements
        if judgement.thinking_tokens
    ]
    if thinking:
        scores["mean_thinking"] = _mean(thinking)
    categories = Counter(j.category for j in judgements if j.category is not None)
    if categories:
        scores["categories"] = {
            name: count / len(samples) for name, count in sorted(categories.items())
        }
    abstained = [judgement.abstained for judgement in judgements]
    if any(abstained):
        scores["abstention"] = abstention_rates(correct, abstained)
    lookup = lookup_confidence(samples)
    scores["lookup"] = {
        "kinds": len({(sample.prompt.task, sample.prompt.kind) for sample in samples}),
        **summarize(lookup, correct),
    }
    intervals: dict[str, Any] = {}
    for kind in kinds:
        confidences = [CONFIDENCE_KINDS[kind](sample) for sample in samples]
        statuses = None
        if kind == "verbal":
            statuses = [judgement.status for judgement in judgements]
        block = summarize(
            confidences,
            correct,
            statuses,
            bins=bins,
            bootstrap=Bootstrap(problem_ids=problems, resamples=resamples, seed=seed),
            ranking_only=kind in RANKING_ONLY,
        )
        ci95 = block.pop("ci95", {})
        intervals["accuracy"] = ci95.pop("accuracy", None)
        intervals[kind] = ci95
        block["mean"] = block["mean_confidence"]
        block["skill"] = (
            math.nan if kind in RANKING_ONLY else skill(confidences, lookup, correct)
        )
        block["bins"] = bins_to_json(metrics.bin_rows(confidences, correct, bins))
        # all rows with a score where only the rank counts, else the valid ones
        rows = metrics.ranked_rows if kind in RANKING_ONLY else metrics.valid_rows
        block["curve"] = coverage_to_json(*rows(confidences, correct))
        block["runs"] = _per_run(samples, kind, repeats, bins)
        scores[kind] = block
    scores["runs"] = _spread(
        [
            metrics.accuracy([float(s.correct) for s in _of_repeat(samples, r)])
            for r in repeats
        ]
    )
    if resamples:
        scores["ci95"] = intervals
    return scores


def lookup_confidence(samples: Sequence[Sample]) -> list[float | None]:
    """Return for each sample the accuracy of the other problems of its benchmark and kind; of its
    benchmark where there is no other of the kind, None where there is none at all. What every
    calibrated method has to beat.
    """
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in samples:
        prompt = sample.prompt
        for group in (
            (prompt.task,),
            (prompt.task, str(prompt.kind)),
            (prompt.task, "", prompt.prompt_id),
        ):
            groups.setdefault(group, []).append(sample)
    right = {
        group: (sum(s.correct for s in members), len(members))
        for group, members in groups.items()
    }

    def others(sample: Sample) -> float | None:
        prompt = sample.prompt
        own_right, own_count = right[prompt.task, "", prompt.prompt_id]
        for group in ((prompt.task, str(prompt.kind)), (prompt.task,)):
            all_right, count = right[group]
            if count > own_count:
                return (all_right - own_right) / (count - own_count)
        return None

    return [others(sample) for sample in samples]


def skill(
    confidences: Sequence[float | None],
    lookup: Sequence[float | None],
    correct: Sequence[float],
) -> float:
    """Return 1 - Brier / Brier of the lookup, on the samples that have both; not a number where the
    lookup is perfect.
    """
    rows = [
        row
        for row in zip(confidences, lookup, correct, strict=True)
        if row[0] is not None and row[1] is not None
    ]
    if not rows:
        return math.nan
    c, guess, y = (np.array(column, float) for column in zip(*rows, strict=True))
    reference = float(np.mean((guess - y) ** 2))
    return 1.0 - float(np.mean((c - y) ** 2)) / reference if reference else math.nan


def _per_run(
    samples: Sequence[Sample], kind: str, repeats: Sequence[int], bins: int
) -> dict[str, Any]:
    """Return the calibration metrics of every repeat on its own: mean and sample standard deviation
    over the repeats.
    """
    values: dict[str, list[float]] = {
        name: [] for name in INTERVALS if name != "accuracy"
    }
    for repeat in repeats:
        rows = _of_repeat(samples, repeat)
        confidences = [CONFIDENCE_KINDS[kind](sample) for sample in rows]
        correct = [float(sample.correct) for sample in rows]
        summary = summarize(
            confidences, correct, bins=bins, ranking_only=kind in RANKING_ONLY
        )
        for name, of_runs in values.items():
            of_runs.append(summary[name])
    return {name: _spread(of_runs) for name, of_runs in values.items()}


def _of_repeat(samples: Sequence[Sample], repeat: int) -> list[Sample]:
    return [sample for sample in samples if sample.response.sample_index == repeat]


def _spread(values: Sequence[float]) -> dict[str, float]:
    defined = [value for value in values if not math.isnan(value)]
    return {
        "mean": _mean(defined),
        "sd": float(np.std(defined, ddof=1)) if len(defined) > 1 else math.nan,
    }


def _macro(
    benchmarks: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]
) -> dict[str, Any]:
    names = [name for name in INTERVALS if name != "accuracy"]
    macro: dict[str, Any] = {
        "accuracy": _mean([scores["accuracy"] for scores in benchmarks.values()])
    }
    for kind in kinds:
        macro[kind] = {
            name: _spread([s[kind][name] for s in benchmarks.values()])["mean"]
            for name in names
        }
    return macro


def bins_to_json(bins: Bins) -> dict[str, list[float]]:
    return {
        "edges": bins.edges.tolist(),
        "count": bins.count.tolist(),
        "confidence_sum": bins.confidence_sum.tolist(),
        "correct_sum": bins.correct_sum.tolist(),
    }


def bins_from_json(value: Mapping[str, Sequence[float]]) -> Bins:
    return Bins(
        edges=np.asarray(value["edges"], float),
        count=np.asarray(value["count"], int),
        confidence_sum=np.asarray(value["confidence_sum"], float),
        correct_sum=np.asarray(value["correct_sum"], float),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
