"""Compute ``evaluation.json`` from judged samples. This needs no model, so the ``samples.jsonl`` of
an earlier evaluation can be scored again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.kinds import (
    auroc_within,
    auroc_within_ci,
    fitted_lookup,
    folds_of,
)
from megatron_dcpo.calibration.metrics import DEFAULT_BINS, Bins
from megatron_dcpo.calibration.selective import abstention_rates, coverage_to_json
from megatron_dcpo.calibration.summary import (
    OF_CONFIDENCE,
    Bootstrap,
    json_ready,
    summarize,
    violation_rates,
)
from megatron_dcpo.calibration.turns import SessionTurns, stopping_curve, summaries_by_turn
from megatron_dcpo.data.problem_kinds import (
    MOST_KINDS,
    ProblemKinds,
    check_kinds,
    described,
    kinds_of,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.headline import HEADLINE
from megatron_dcpo.evaluation.question_only import read_questions
from megatron_dcpo.evaluation.samples import Sample

logger = logging.getLogger(__name__)

# of the confidences behind an earlier answer of an agent
OF_A_TURN = ("n", "accuracy", "mean_confidence", "ece", "brier", "auroc", "violation_rate")
SEVERAL = 5  # stated confidences that are said to be all the same
CONFIDENCE_KINDS: Mapping[str, Callable[[Sample], float | None]] = MappingProxyType(
    {
        "verbal": lambda sample: sample.judgement.confidence,
        "token": lambda sample: sample.measures.token_confidence,
        "token_product": lambda sample: _product(
            sample.measures.token_confidence, sample.judgement.sampled_length
        ),
        "token_min": lambda sample: _exp(sample.measures.min_logprob),
        "token_mean_logprob": lambda sample: _log(sample.measures.token_confidence),
        "logprob": lambda sample: sample.measures.reasoning_logprob,
        "token_entropy": lambda sample: _exp(_negative(sample.measures.mean_entropy)),
        "consistency": lambda sample: sample.measures.consistency_confidence,
        "posthoc": lambda sample: sample.measures.posthoc_confidence,
    }
)
# in nats, not probabilities: they rank samples and do nothing else
RANKING_ONLY = frozenset({"token_mean_logprob", "logprob"})
# blocks of scores, and rows of tables: the fitted lookup, and what the question's text tells
LOOKUP = "lookup"
QUESTION_ONLY = "question only"
BASELINES = (QUESTION_ONLY, LOOKUP)


def _product(mean: float | None, length: int) -> float | None:
    """Return the product of ``length`` probabilities with this geometric mean, None if either is
    not known: other tools' logs have no length in tokens, and it is 0.
    """
    return None if mean is None or not length else mean**length


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _log(value: float | None) -> float | None:
    if value is None:
        return None
    return math.log(value) if value > 0 else -math.inf


def _none_for_nan(values: np.ndarray) -> list[float | None]:
    """Return values [N] as confidences: None where a value is NaN."""
    return [None if math.isnan(value) else float(value) for value in values]


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the distinct kinds of confidence in a list such as ``"verbal,token"``. Raises
    :class:`UserError` for an unknown kind and an empty list.
    """
    parts = [part.strip() for part in text.split(",")]
    kinds = tuple(dict.fromkeys(filter(None, parts)))
    unknown = [kind for kind in kinds if kind not in CONFIDENCE_KINDS]
    if unknown or not kinds:
        raise UserError(
            f"unknown confidence {(unknown or [text])[0]!r}; known: {', '.join(CONFIDENCE_KINDS)}"
        )
    return kinds


@dataclass(frozen=True)
class _Options:
    """How samples are scored: bins of the binned errors, resamples and seed of the intervals, and
    what the kinds of problem are named by (:func:`kinds_of`).
    """

    bins: int
    resamples: int
    seed: int
    kinds_by: str


def score_samples(
    samples: Sequence[Sample],
    kinds: Sequence[str] = ("verbal", "token", "consistency"),
    model: str = "",
    bins: int = DEFAULT_BINS,
    resamples: int = 1000,
    seed: int = 0,
    kinds_by: str = "",
) -> dict[str, Any]:
    """Return ``{"model", "kinds", "benchmarks": {NAME: scores}, "overall": scores}`` as strict
    JSON, with None for undefined values.

    ``overall`` pools the samples of all benchmarks; its ``macro`` is the plain mean over
    benchmarks, which papers usually print as "Overall", None where one of them is undefined.
    ``kinds`` says what the kinds of problem are named by (``by``, None if there are none), and what
    they could be (``possible``). Raises :class:`UserError` if no problem has a kind by
    ``kinds_by``.
    """
    by_benchmark: dict[str, list[Sample]] = {}
    for sample in samples:
        by_benchmark.setdefault(sample.prompt.task, []).append(sample)
    named = checked_kinds(samples, kinds_by)
    options = _Options(bins=bins, resamples=resamples, seed=seed, kinds_by=kinds_by)
    benchmarks = {name: _score(group, kinds, options) for name, group in by_benchmark.items()}
    for name, scores in benchmarks.items():
        _report_constant(name, scores.get("verbal", {}))
    if len(benchmarks) == 1:
        # Its pooled scores are its scores, and computing their intervals is slow.
        overall = dict(*benchmarks.values())
    else:
        overall = _score(samples, kinds, options)
    overall["macro"] = _macro(benchmarks, kinds)
    return json_ready(
        {
            "model": model,
            "kinds": named,
            "benchmarks": benchmarks,
            "overall": overall,
        }
    )


def checked_kinds(samples: Sequence[Sample], kinds_by: str) -> dict[str, Any]:
    """Return what the kinds of problem are named by, and could be (:func:`kinds.described`). Raises
    :class:`UserError` if no problem has a kind by ``kinds_by``.
    """
    prompts = list({sample.problem_key: sample.prompt for sample in samples}.values())
    check_kinds(prompts, kinds_by)
    return described(prompts, kinds_by)


def _report_constant(name: str, verbal: Mapping[str, Any]) -> None:
    """Say if every answer of a benchmark states the same confidence."""
    count = verbal.get("n_parsed", 0)
    if count >= SEVERAL and verbal["std_confidence"] < 1e-9:  # float64 leaves 1e-16
        logger.warning(
            "%s: all %d stated confidences are %.4g; one number tells no right answer from a wrong "
            "one, whatever its ECE",
            name,
            count,
            verbal["mean_confidence"],
        )


def headline(
    evaluation: Mapping[str, Any], kind: str = "verbal", benchmark: str | None = None
) -> dict[str, Any]:
    """Return the one-line summary of an evaluation: its ``HEADLINE`` values for one kind of
    confidence, overall or on one benchmark.
    """
    scores = evaluation["benchmarks"][benchmark] if benchmark else evaluation["overall"]
    flat = {**scores.get(kind, {}), "accuracy": scores["accuracy"], "n": scores["n"]}
    return {key: flat.get(key) for key in HEADLINE}


def scores_of_arms(
    samples: Sequence[Sample],
    arms: Mapping[str, Sequence[float | None]],
    kinds_by: str = "",
) -> dict[str, dict[str, Any]]:
    """Return the ``HEADLINE`` values of several confidences of the same samples, by their names,
    of a reader of the question alone, and last of the fitted lookup; with ``kinds_used``,
    ``kinds_left_out`` and ``problems_used``.
    """
    options = _Options(bins=DEFAULT_BINS, resamples=0, seed=0, kinds_by=kinds_by)
    answers = _Answers.of(samples, options)
    summaries = {}
    for name, confidences in arms.items():
        summaries[name] = answers.summarized(confidences)
        summaries[name]["skill"] = skill(confidences, answers.lookup, answers.correct)
    of_question = _of_question(answers)
    if of_question is not None:
        summaries[QUESTION_ONLY] = of_question
    summaries[LOOKUP] = _of_lookup(answers)
    shown = (*HEADLINE, "kinds_used", "kinds_left_out", "problems_used")
    return {name: {key: summary[key] for key in shown} for name, summary in summaries.items()}


def confidences_of(samples: Sequence[Sample], kind: str) -> list[float | None]:
    """Return one kind of confidence of each sample, None where it has none."""
    return [CONFIDENCE_KINDS[kind](sample) for sample in samples]


def _refused(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of samples that a server refused, if it refused any."""
    refused = sum(sample.response.refusal is not None for sample in samples)
    return {"refused_rate": refused / len(samples)} if refused else {}


def _guessed(samples: Sequence[Sample], kinds_by: str) -> dict[str, Any]:
    """Return ``prompt_blind`` and ``by_kind``, where there is something to say."""
    found = {"prompt_blind": prompt_blind(samples), "by_kind": by_kind(samples, kinds_by)}
    return {name: value for name, value in found.items() if value}


def _score(samples: Sequence[Sample], kinds: Sequence[str], options: _Options) -> dict[str, Any]:
    """Score one benchmark, or all of them pooled: accuracy and a block per kind of confidence."""
    answers = _Answers.of(samples, options)
    passed = passes(samples, options.resamples, options.seed)
    scores = _of_answers(answers)
    scores["pass_at_k"] = {str(k): value for k, value in passed.values.items()}
    of_lookup = _of_lookup(answers)
    intervals: dict[str, Any] = {
        "pass_at_k": {str(k): ends for k, ends in passed.intervals.items()},
        LOOKUP: of_lookup.pop("ci95", {}),
    }
    scores[LOOKUP] = {"kinds": len(set(answers.kinds.names)), **of_lookup}
    of_question = _of_question(answers) if options.resamples else None
    if of_question is not None:
        intervals[QUESTION_ONLY] = of_question.pop("ci95", {})
        scores[QUESTION_ONLY] = of_question
    for kind in kinds:
        block = _of_confidence(answers, kind)
        ci95 = block.pop("ci95", {})
        intervals["accuracy"] = ci95.pop("accuracy", None)
        intervals[kind] = ci95
        scores[kind] = block
    accuracies = []
    for repeat in _comparable_repeats(answers):
        rows = _samples_of_repeat(samples, repeat)
        accuracies.append(metrics.accuracy([float(sample.correct) for sample in rows]))
    scores["runs"] = _spread(accuracies)
    if any(sample.response.turn_confidences for sample in samples):
        scores["turns"] = _of_turns(samples, options.bins)
    if options.resamples:
        scores["ci95"] = intervals
    return scores


@dataclass(frozen=True)
class _Answers:
    """Samples that are scored together: whether each is right, the name of its problem, the number
    of each repeat, the kinds of problem, and what the fitted lookup says of each.
    """

    samples: Sequence[Sample]
    options: _Options
    correct: Sequence[float]
    problems: Sequence[str]
    repeats: Sequence[int]
    kinds: ProblemKinds
    lookup: Sequence[float | None]

    @classmethod
    def of(cls, samples: Sequence[Sample], options: _Options) -> _Answers:
        correct = [float(sample.correct) for sample in samples]
        problems = ["/".join(sample.problem_key) for sample in samples]
        kinds = kinds_of([sample.prompt for sample in samples], options.kinds_by)
        return cls(
            samples=samples,
            options=options,
            correct=correct,
            problems=problems,
            repeats=sorted({sample.response.sample_index for sample in samples}),
            kinds=kinds,
            lookup=_none_for_nan(fitted_lookup(correct, kinds.names, problems)),
        )

    def summarized(
        self,
        confidences: Sequence[float | None],
        statuses: Sequence[str] | None = None,
        ranking_only: bool = False,
    ) -> dict[str, Any]:
        """Return the metrics of confidences of these answers, with intervals if they are wanted."""
        bootstrap = Bootstrap(
            problem_ids=self.problems, resamples=self.options.resamples, seed=self.options.seed
        )
        return summarize(
            confidences,
            self.correct,
            statuses,
            bins=self.options.bins,
            bootstrap=bootstrap,
            ranking_only=ranking_only,
            kinds=self.kinds.within(),
        )


def _of_answers(answers: _Answers) -> dict[str, Any]:
    """Return the statistics of answers that need no confidence."""
    samples = answers.samples
    judgements = [sample.judgement for sample in samples]
    scores: dict[str, Any] = {
        "accuracy": metrics.accuracy(answers.correct),
        "n": len(samples),
        "problems": len(set(answers.problems)),
        "repeats": len(answers.repeats),
        "mean_length": _mean([judgement.sampled_length for judgement in judgements]),
        "truncated_rate": _mean([s.response.finish_reason == "length" for s in samples]),
        "answer_rate": _mean([judgement.answer is not None for judgement in judgements]),
        "parse_rate": metrics.parse_rate([judgement.confidence for judgement in judgements]),
        **violation_rates([judgement.status for judgement in judgements]),
        **_refused(samples),
        **_guessed(samples, answers.options.kinds_by),
    }
    thinking = [j.thinking_tokens for j in judgements if j.thinking_tokens]
    if thinking:
        scores["mean_thinking"] = _mean(thinking)
    categories = Counter(j.category for j in judgements if j.category is not None)
    if categories:
        shares = {}
        for name, count in sorted(categories.items()):
            shares[name] = count / len(samples)
        scores["categories"] = shares
    abstained = [judgement.abstained for judgement in judgements]
    if any(abstained):
        scores["abstention"] = abstention_rates(answers.correct, abstained)
    return scores


def _of_turns(samples: Sequence[Sample], bins: int) -> dict[str, Any]:
    """Return the metrics of the confidences behind earlier answers of agents, by the number of the
    turn, and the curve of stopping at one that is too low.
    """
    sessions = sessions_of(samples)
    by_turn = {}
    for turn, (confidences, correct, summary) in summaries_by_turn(sessions, bins).items():
        block = {name: summary[name] for name in OF_A_TURN}
        block["bins"] = bins_to_json(metrics.bin_rows(confidences, correct, bins))
        by_turn[str(turn)] = block
    return {"by_turn": by_turn, "stopping": stopping_curve(sessions)}


def sessions_of(samples: Sequence[Sample]) -> list[SessionTurns]:
    """Return the confidences of each sample's turns."""
    return [
        SessionTurns(
            confidences=sample.response.turn_confidences,
            calls=int((sample.response.counted or {}).get("agent_calls", 1)),
            correct=float(sample.correct),
        )
        for sample in samples
    ]


def _of_lookup(answers: _Answers) -> dict[str, Any]:
    """Return the metrics of the fitted lookup. By definition its skill is 0 and its AUROC within
    kinds .5.
    """
    fold = folds_of(answers.kinds.names, answers.problems)
    summary = _cross_fitted(answers, answers.lookup, fold)
    summary["skill"] = 0.0
    if summary["kinds_used"]:
        summary["auroc_within"] = 0.5
        if "ci95" in summary:
            summary["ci95"]["auroc_within"] = [0.5, 0.5]
    return summary


def _of_question(answers: _Answers) -> dict[str, Any] | None:
    """Return the metrics of a predictor that reads the question alone, None if the answers are to
    too few questions for it.
    """
    read = read_questions(answers.samples, answers.correct)
    if read is None:
        return None
    summary = _cross_fitted(answers, read.expected, read.fold)
    summary["skill"] = skill(read.expected, answers.lookup, answers.correct)
    return summary


def _cross_fitted(
    answers: _Answers, confidences: Sequence[float | None], fold: np.ndarray
) -> dict[str, Any]:
    """Return the metrics of confidences that were fitted on the answers of the other folds, with
    the AUROC of the pairs in one ``fold`` [N].
    """
    summary = answers.summarized(confidences)
    summary["auroc"] = auroc_within(confidences, answers.correct, fold).value
    if "ci95" in summary:
        low, high = auroc_within_ci(
            confidences=confidences,
            correct=answers.correct,
            kinds=fold,
            problem_ids=answers.problems,
            resamples=answers.options.resamples,
            seed=answers.options.seed,
        )
        summary["ci95"]["auroc"] = [low, high]
    return summary


def _of_confidence(answers: _Answers, kind: str) -> dict[str, Any]:
    """Return the block of one kind of confidence: its metrics, bins and curve."""
    samples = answers.samples
    confidences = confidences_of(samples, kind)
    statuses = None
    if kind == "verbal":
        statuses = [sample.judgement.status for sample in samples]
    block = answers.summarized(confidences, statuses, ranking_only=kind in RANKING_ONLY)
    block["mean"] = block["mean_confidence"]
    block["skill"] = math.nan
    if kind not in RANKING_ONLY:
        block["skill"] = skill(confidences, answers.lookup, answers.correct)
    if kind == "posthoc":
        block["by"] = sorted({s.measures.posthoc_by for s in samples if s.measures.posthoc_by})
    bins = metrics.bin_rows(confidences, answers.correct, answers.options.bins)
    block["bins"] = bins_to_json(bins)
    block["curve"] = _coverage_curve(kind, confidences, answers.correct)
    block["runs"] = _per_run(answers, kind)
    return block


def _coverage_curve(
    kind: str, confidences: Sequence[float | None], correct: Sequence[float]
) -> Mapping[str, Sequence[Any]]:
    """Return the accuracy-coverage curve of one kind of confidence."""
    if kind in RANKING_ONLY:
        scored, outcomes = metrics.ranked_rows(confidences, correct)
    else:
        scored, outcomes = metrics.valid_rows(confidences, correct)
    return coverage_to_json(scored, outcomes)


def _per_run(answers: _Answers, kind: str) -> dict[str, Any]:
    """Return the calibration metrics of single repeats: their mean and sample standard deviation
    over the repeats, NaN if some problems have other repeats than others.
    """
    values: dict[str, list[float]] = {name: [] for name in OF_CONFIDENCE}
    without_intervals = replace(answers.options, resamples=0)
    for repeat in _comparable_repeats(answers):
        rows = _samples_of_repeat(answers.samples, repeat)
        summary = _Answers.of(rows, without_intervals).summarized(
            confidences_of(rows, kind), ranking_only=kind in RANKING_ONLY
        )
        for name, summaries in values.items():
            summaries.append(summary[name])
    return {name: _spread(summaries) for name, summaries in values.items()}


def _comparable_repeats(answers: _Answers) -> Sequence[int]:
    """Return the repeats if every problem has all of them, else none: repeats of different problems
    differ by more than chance.
    """
    answered = set()
    for sample in answers.samples:
        answered.add((sample.problem_key, sample.response.sample_index))
    wanted = len(set(answers.problems)) * len(answers.repeats)
    return answers.repeats if len(answered) == wanted else ()


def _samples_of_repeat(samples: Sequence[Sample], repeat: int) -> list[Sample]:
    return [sample for sample in samples if sample.response.sample_index == repeat]


def _spread(values: Sequence[float]) -> dict[str, float]:
    defined = [value for value in values if not math.isnan(value)]
    deviation = math.nan
    if len(defined) > 1:
        deviation = float(np.std(defined, ddof=1))
    return {"mean": _mean(defined), "sd": deviation}


def _macro(benchmarks: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the plain means over the benchmarks, NaN where one of them is undefined."""
    macro: dict[str, Any] = {
        "accuracy": _mean([scores["accuracy"] for scores in benchmarks.values()])
    }
    sizes = [set(scores["pass_at_k"]) for scores in benchmarks.values()]
    common = set.intersection(*sizes) if sizes else set()
    macro["pass_at_k"] = {
        k: _mean([scores["pass_at_k"][k] for scores in benchmarks.values()])
        for k in sorted(common, key=int)
    }
    for kind in kinds:
        means = {}
        for name in OF_CONFIDENCE:
            means[name] = _mean([scores[kind][name] for scores in benchmarks.values()])
        macro[kind] = means
    return macro


def scored_kinds(scores: Mapping[str, Any]) -> list[str]:
    """Return the kinds of confidence in the scores of a benchmark."""
    kinds = []
    for key, block in scores.items():
        is_kind = key in CONFIDENCE_KINDS
        if is_kind and isinstance(block, Mapping) and "bins" in block:
            kinds.append(key)
    return kinds


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


# --------------------------------------------------------------------- without reading the question
#
# A policy that learns by reinforcement finds the most frequent answer of a task before it finds the
# task. So an accuracy has to be compared with that of a policy that always gives this answer, and
# a mean over kinds of problems has to be shown with its parts (docs/lab/real_model.md shows what
# else it may be).


def prompt_blind(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return ``accuracy``, the share of the problems whose key is the most frequent key of their
    benchmark, and that ``answer`` if there is one benchmark; empty if there are no keys to compare.

    Keys are compared as texts, so that two spellings of one number count as two answers and the
    value is too low then. Programs have no key; no answer changes the verdict of a forecast.
    """
    by_benchmark: dict[str, dict[str, str]] = {}
    for sample in samples:
        key = sample.prompt.ground_truth.strip()
        if key and not sample.is_code and sample.prompt.form != "forecast":
            by_benchmark.setdefault(sample.prompt.task, {})[sample.problem_key[1]] = key
    if not by_benchmark:
        return {}
    answers: list[str] = []
    right = 0
    problems = 0
    for keys in by_benchmark.values():
        answer, count = Counter(keys.values()).most_common(1)[0]
        answers.append(answer)
        right += count
        problems += len(keys)
    found: dict[str, Any] = {"accuracy": right / problems}
    if len(answers) == 1:
        found["answer"] = answers[0]
    return found


def by_kind(samples: Sequence[Sample], kinds_by: str = "") -> dict[str, dict[str, Any]]:
    """Return the scores of each kind of problem (:func:`kinds_of`) of one benchmark: ``n``,
    ``problems``, ``accuracy``, and ``prompt_blind`` of this kind. Empty if the samples are of
    several benchmarks, or have fewer than two kinds, or more than ``MOST_KINDS``.
    """
    if len({sample.prompt.task for sample in samples}) != 1:
        return {}
    groups: dict[str, list[Sample]] = {}
    named = kinds_of([sample.prompt for sample in samples], kinds_by).names
    for sample, (_, kind) in zip(samples, named, strict=True):
        groups.setdefault(kind, []).append(sample)
    if not 2 <= len(groups) <= MOST_KINDS:
        return {}
    scores = {}
    for kind, members in sorted(groups.items()):
        scores[kind] = {
            "n": len(members),
            "problems": len({sample.problem_key for sample in members}),
            "accuracy": sum(sample.correct for sample in members) / len(members),
            "prompt_blind": prompt_blind(members),
        }
    return scores


def skill(
    confidences: Sequence[float | None], lookup: Sequence[float | None], correct: Sequence[float]
) -> float:
    """Return 1 - Brier / (Brier of the lookup), on the samples that have both; NaN if the lookup is
    perfect.
    """
    rows = []
    for row in zip(confidences, lookup, correct, strict=True):
        if row[0] is not None and row[1] is not None:
            rows.append(row)
    if not rows:
        return math.nan
    c, guess, y = (np.array(column, float) for column in zip(*rows, strict=True))
    reference = float(np.mean((guess - y) ** 2))
    if not reference:
        return math.nan
    return 1.0 - float(np.mean((c - y) ** 2)) / reference


# ------------------------------------------------------------------------------------------- pass@k


@dataclass(frozen=True)
class PassAtK:
    """``values`` of k, the mean over the problems, and the 95 % interval [low, high] of each, none
    without resamples, and none of a value in which the problems do not differ.
    """

    values: Mapping[int, float]
    intervals: Mapping[int, list[float]]


def pass_at_k(count: int, right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) of one problem with n responses, of
    which c are right (Chen et al. 2021). Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} responses")
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def passes(samples: Sequence[Sample], resamples: int, seed: int) -> PassAtK:
    """Return pass@k of all problems of the samples, for the k that every problem has responses for:
    the powers of two and the largest. Intervals are percentiles of a bootstrap over problems.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        counted = counts.setdefault(sample.problem_key, [0, 0])
        counted[0] += 1
        counted[1] += int(sample.correct)
    values: dict[int, float] = {}
    intervals: dict[int, list[float]] = {}
    for k in _sizes(min((count for count, _ in counts.values()), default=0)):
        chances = np.array([pass_at_k(n, c, k) for n, c in counts.values()])
        values[k] = float(chances.mean())
        if resamples and (ends := _interval(chances, resamples, seed)) is not None:
            intervals[k] = ends
    return PassAtK(values, intervals)


def _sizes(largest: int) -> list[int]:
    sizes = []
    k = 1
    while k < largest:
        sizes.append(k)
        k *= 2
    if largest:
        sizes.append(largest)
    return sizes


def _interval(chances: np.ndarray, resamples: int, seed: int) -> list[float] | None:
    """Return the bootstrap interval of the mean; Wilson's if every problem is solved, or none; None
    if the problems have one value in common otherwise, of which resamples know no spread.
    """
    if np.ptp(chances) == 0:
        if chances[0] not in (0.0, 1.0):
            return None
        return metrics.wilson_of_equal(float(chances[0]), len(chances))
    generator = np.random.default_rng(seed)
    count = len(chances)
    means = np.empty(resamples)
    for i in range(resamples):
        means[i] = chances[generator.integers(count, size=count)].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]
