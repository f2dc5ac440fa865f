"""The record of one step, under the names of the field."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dcpo.calibration import abstention_rates, summarize
from megatron_dcpo.calibration.metrics import DEFAULT_BINS
from megatron_dcpo.calibration.summary import OF_CONFIDENCE, Bootstrap
from megatron_dcpo.calibration.turns import SessionTurns, summaries_by_turn
from megatron_dcpo.data.problem_kinds import kinds_of
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.policy.batching import sequence_length
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import peak_tflops
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.mismatch import mismatch_metrics
from megatron_dcpo.training.trainer import UpdateStatistics
from megatron_dcpo.types import BLOCKS, MALFORMED, Judgement, TrainingSample
from megatron_dcpo.weights.arithmetic import sequence_flops

LOSS_METRICS = {
    "clipped": "loss/clip_fraction",
    "ratio": "loss/ratio",
    "entropy": "entropy",
    "kl": "loss/kl",
    "teacher_kl": "loss/teacher_kl",
}


def step_metrics(
    samples: Sequence[TrainingSample], statistics: UpdateStatistics, timers: Timers
) -> dict[str, Any]:
    """Return the record of one step. Undefined values are NaN here and null in the file."""
    metrics = {
        **response_metrics(samples),
        **update_metrics(samples, statistics),
        **phase_metrics(samples, timers),
    }
    for name, values in statistics.callback.items():
        if name in metrics:
            raise UserError(f"training.callback returned {name}, which every step has; rename it")
        metrics[name] = _mean_of_updates(values)
    return metrics


def response_metrics(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Return what the responses of a step are worth: accuracy, calibration, format, length."""
    judgements = [sample.judgement for sample in samples]
    summary = summarize(
        [judgement.confidence for judgement in judgements],
        [judgement.correct for judgement in judgements],
        statuses=[judgement.status for judgement in judgements],
        bootstrap=Bootstrap(problem_ids=[sample.prompt.prompt_id for sample in samples]),
        kinds=kinds_of([sample.prompt for sample in samples]).within(),
    )
    R_c = np.array([sample.R_c for sample in samples])
    mean_R_c = float(np.nanmean(R_c)) if np.isfinite(R_c).any() else math.nan
    without_answer = [not judgement.answered for judgement in judgements]
    lengths = [sample.response.sampled_length for sample in samples]
    truncated = [sample.response.finish_reason == "length" for sample in samples]
    return {
        "reward/accuracy": summary["accuracy"],
        **group_metrics(samples),
        **signal_metrics(samples),
        "reward/calibration": mean_R_c,
        "confidence/mean": summary["mean_confidence"],
        "confidence/std": summary["std_confidence"],
        "confidence/extremes": extremes(judgements),
        "answer/most_frequent": most_frequent_answer(judgements),
        "format/violation_rate": summary["violation_rate"],
        **{f"format/{kind}": summary["violations"][kind] for kind in MALFORMED},
        "format/no_answer": float(np.mean(without_answer)),
        **verifier_metrics(judgements),
        **{f"calibration/{name}": summary[name] for name in OF_CONFIDENCE},
        "length/mean": float(np.mean(lengths)),
        "length/max": int(max(lengths)),
        **thinking_metrics(judgements),
        **turn_metrics(samples),
        "length/truncated": float(np.mean(truncated)),
    }


def update_metrics(
    samples: Sequence[TrainingSample], statistics: UpdateStatistics
) -> dict[str, Any]:
    """Return what the updates of a step measured: losses, gradients, engine against trainer."""
    sampled_tokens = sum(map(sequence_length, samples))
    trained_tokens = sum(map(sequence_length, statistics.trained))
    return {
        "loss/policy": _mean_of_updates(statistics.losses),
        **loss_metrics(statistics.sums),
        "grad_norm/total": _mean_of_updates(statistics.grad_norms),
        **statistics.coefficients,
        **mismatch_metrics(statistics.sums),
        **statistics.maxima,
        "learning_rate": statistics.learning_rate,
        "updates/skipped": statistics.skipped,
        "train/skipped_tokens": sampled_tokens - trained_tokens,
    }


def phase_metrics(samples: Sequence[TrainingSample], timers: Timers) -> dict[str, Any]:
    """Return seconds, memory and response tokens per second of the phases of a step."""
    tokens = sum(sample.response.sampled_length for sample in samples)
    metrics: dict[str, Any] = {}
    for phase in ("rollout", "train"):
        seconds = timers.seconds.get(phase)
        if seconds:
            metrics[f"tokens/s/{phase}"] = tokens / seconds
    metrics |= {f"time/{phase}": seconds for phase, seconds in timers.seconds.items()}
    metrics |= {f"memory/{name}": value for name, value in timers.memory.items()}
    return metrics


def thinking_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the mean number of tokens of a thinking trace, its end-of-thinking token included, if
    any response has one.
    """
    lengths = [judgement.thinking_tokens for judgement in judgements if judgement.thinking_tokens]
    if not lengths:
        return {}
    return {"length/thinking": float(np.mean(lengths))}


def turn_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the calibration of the confidences that were stated behind earlier answers of agents,
    by the number of the turn.
    """
    sessions = [
        SessionTurns(
            confidences=sample.response.turn_confidences,
            calls=1,
            correct=sample.judgement.correct,
        )
        for sample in samples
    ]
    metrics = {}
    for turn, (_, _, summary) in summaries_by_turn(sessions, DEFAULT_BINS).items():
        for name in ("mean_confidence", "accuracy", "ece", "auroc", "violation_rate"):
            metrics[f"turn/{turn}/{name}"] = summary[name]
    return metrics


def group_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the standard deviation of R within a group, as a mean over groups, and the share of
    groups in which it is 0, which have no gradient in the reasoning (TRL's names).
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.prompt_id, []).append(sample.R)
    stds = [float(np.std(rewards)) for rewards in groups.values()]
    are_zero = [std < 1e-6 for std in stds]
    return {"reward/std": float(np.mean(stds)), "frac_reward_zero_std": float(np.mean(are_zero))}


def signal_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return for each block the share of the batch's groups that have a signal in it: a token with
    a weight and an advantage other than 0.
    """
    groups = {sample.prompt.prompt_id for sample in samples}
    metrics = {}
    for block, block_id in BLOCKS.items():
        with_signal = {
            sample.prompt.prompt_id for sample in samples if Method.has_advantage(sample, block_id)
        }
        metrics[f"signal/{block}"] = len(with_signal) / len(groups)
    return metrics


def extremes(judgements: Sequence[Judgement]) -> float:
    """Return the share of the valid confidences that are exactly 0 or 1; NaN if none is valid."""
    valid = [each.confidence for each in judgements if each.confidence is not None]
    if not valid:
        return math.nan
    return float(np.mean([confidence in (0.0, 1.0) for confidence in valid]))


def most_frequent_answer(judgements: Sequence[Judgement]) -> float:
    """Return the share of the responses that give the most frequent answer, as text; NaN if none
    gives one.
    """
    answers = Counter(each.answer for each in judgements if each.answer is not None)
    if not answers:
        return math.nan
    ((_, times),) = answers.most_common(1)
    return times / len(judgements)


def source_metrics(samples: Sequence[TrainingSample], names: Sequence[str]) -> dict[str, float]:
    """Return accuracy, ECE and the share of the most frequent answer of each source of a mixture;
    NaN when a step has no response to a problem of it.
    """
    metrics: dict[str, float] = {}
    for name in names:
        judgements = [sample.judgement for sample in samples if sample.prompt.task == name]
        summary: dict[str, Any] = {}
        if judgements:
            summary = summarize(
                [judgement.confidence for judgement in judgements],
                [judgement.correct for judgement in judgements],
            )
        metrics[f"reward/accuracy/{name}"] = summary.get("accuracy", math.nan)
        metrics[f"calibration/ece/{name}"] = summary.get("ece", math.nan)
        metrics[f"answer/most_frequent/{name}"] = most_frequent_answer(judgements)
    return metrics


def verifier_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the means of the numbers that users' verifiers logged, ``verifier/score`` among them;
    nothing when no response was judged by one.
    """
    numbers: dict[str, list[float]] = {}
    for judgement in judgements:
        for name, value in (judgement.logged or {}).items():
            if isinstance(value, bool | int | float):
                numbers.setdefault(f"verifier/{name}", []).append(float(value))
    return {name: float(np.mean(values)) for name, values in numbers.items()}


def abstention_metrics(samples: Sequence[TrainingSample], always: bool) -> dict[str, float]:
    """Return ``abstention/...`` if a response abstained, or if the method ``always`` reports it."""
    abstained = [sample.judgement.abstained for sample in samples]
    if not (always or any(abstained)):
        return {}
    rates = abstention_rates([sample.judgement.correct for sample in samples], abstained)
    return {f"abstention/{name}": value for name, value in rates.items()}


def loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the means of the loss's statistics over all tokens and per block."""
    tokens = {block: max(sums.get(f"tokens/{block}", 0.0), 1.0) for block in BLOCKS}
    metrics: dict[str, float] = {}
    for name in (*LOSS_METRICS, "tis_weight", "tis_masked"):
        if not any(f"{name}/{block}" in sums for block in BLOCKS):
            continue
        metric = LOSS_METRICS.get(name, name)
        totals = {block: sums.get(f"{name}/{block}", 0.0) for block in BLOCKS}
        metrics[metric] = sum(totals.values()) / sum(tokens.values())
        for block in BLOCKS:
            metrics[f"{metric}_{block}"] = totals[block] / tokens[block]
    return metrics


def utilization(
    policy: Policy, samples: Sequence[TrainingSample], timers: Timers
) -> dict[str, float]:
    """Return the MFU of the training phase on a GPU of known speed: ``mfu/train``, model arithmetic
    (forward and backward of every token of ``samples`` once, without recomputation) per second and
    GPU over the card's dense bf16 peak, and ``tflops/train``.
    """
    peak = peak_tflops()
    seconds = timers.seconds.get("train")
    if peak is None or not seconds:
        return {}
    lengths = map(sequence_length, samples)
    forward = sum(sequence_flops(policy.arch, policy.layout, length, length) for length in lengths)
    reached = 3 * forward / seconds / policy.topology.world_size / 1e12
    return {"tflops/train": reached, "mfu/train": reached / peak}


def _mean_of_updates(values: list[float]) -> float:
    """Average over the applied updates; undefined when all were skipped."""
    return float(np.mean(values)) if values else math.nan
