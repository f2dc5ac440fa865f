"""The record of one step, under the names of the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dcpo.calibration import abstention_rates, summarize
from megatron_dcpo.planning.traffic import sequence_flops
from megatron_dcpo.policy.batching import sequence_length
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import peak_tflops
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.mismatch import mismatch_metrics
from megatron_dcpo.training.updater import UpdateStatistics
from megatron_dcpo.types import BLOCKS, MALFORMED, VERIFIER_ERROR, Judgement, TrainingSample

COSINES = ("grad_cosine/reasoning_confidence", "grad_cosine_fisher/reasoning_confidence")
LOSS_METRICS = {
    "clipped": "loss/clip_fraction",
    "ratio": "loss/ratio",
    "entropy": "entropy",
    "kl": "loss/kl",
}


def step_metrics(
    samples: Sequence[TrainingSample], statistics: UpdateStatistics, timers: Timers
) -> dict[str, Any]:
    """Return the record of one step. Undefined values are NaN here and null in the file."""
    judgements = [sample.judgement for sample in samples]
    summary = summarize(
        [j.confidence for j in judgements],
        [j.correct for j in judgements],
        statuses=[j.status for j in judgements],
    )
    lengths = [len(sample.response_ids) for sample in samples]
    r_c = np.array([sample.R_c for sample in samples])
    unmeasured = dict.fromkeys(("grad_norm/reasoning", "grad_norm/confidence", *COSINES), math.nan)
    seconds = timers.seconds
    return {
        "reward/accuracy": summary["accuracy"],
        **group_metrics(samples),
        "reward/calibration": float(np.nanmean(r_c)) if np.isfinite(r_c).any() else math.nan,
        "confidence/mean": summary["mean_confidence"],
        "confidence/std": summary["std_confidence"],
        "format/violation_rate": summary["violation_rate"],
        **{f"format/{kind}": summary["violations"][kind] for kind in MALFORMED},
        "format/no_answer": float(np.mean([not j.answered for j in judgements])),
        **verifier_metrics(judgements),
        "calibration/ece": summary["ece"],
        "calibration/pce": summary["pce"],
        "calibration/brier": summary["brier"],
        "calibration/auroc": summary["auroc"],
        "length/mean": float(np.mean(lengths)),
        "length/max": int(max(lengths)),
        **thinking_metrics(judgements),
        "length/truncated": float(np.mean([s.response.finish_reason == "length" for s in samples])),
        "loss/policy": _mean_of_updates(statistics.losses),
        **loss_metrics(statistics.sums),
        "grad_norm/total": _mean_of_updates(statistics.grad_norms),
        **(unmeasured | statistics.block_gradients),
        **statistics.coefficients,
        **mismatch_metrics(statistics.sums),
        **statistics.maxima,
        "learning_rate": statistics.learning_rate,
        "updates/skipped": statistics.skipped,
        "train/skipped_tokens": sum(map(sequence_length, samples))
        - sum(map(sequence_length, statistics.trained)),
        **{
            f"tokens/s/{phase}": sum(lengths) / seconds[phase]
            for phase in ("rollout", "train")
            if seconds.get(phase)
        },
        **{f"time/{phase}": value for phase, value in seconds.items()},
        **{f"memory/{name}": value for name, value in timers.memory.items()},
    }


def thinking_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the mean number of tokens of a thinking, its end-of-thinking token included, where a
    response has one.
    """
    lengths = [j.thinking_tokens for j in judgements if j.thinking_tokens]
    return {"length/thinking": float(np.mean(lengths))} if lengths else {}


def group_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the standard deviation of R within a group, as a mean over groups, and the share of
    groups in which it is 0: they have no gradient in the reasoning (TRL's names).
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.prompt_id, []).append(sample.R)
    stds = [float(np.std(rewards)) for rewards in groups.values()]
    return {
        "reward/std": float(np.mean(stds)),
        "frac_reward_zero_std": float(np.mean([std < 1e-6 for std in stds])),
    }


def source_metrics(samples: Sequence[TrainingSample], names: Sequence[str]) -> dict[str, float]:
    """Return accuracy and ECE of each source of a mixture; NaN where a step has none of it."""
    found: dict[str, float] = {}
    for name in names:
        own = [sample.judgement for sample in samples if sample.prompt.task == name]
        summary = summarize([j.confidence for j in own], [j.correct for j in own]) if own else {}
        found[f"reward/accuracy/{name}"] = summary.get("accuracy", math.nan)
        found[f"calibration/ece/{name}"] = summary.get("ece", math.nan)
    return found


def verifier_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return of the responses that users' verifiers judged, where there are any, the share of
    errors, and the means of the numbers that they gave, ``verifier/score`` first of all.
    """
    own = [j for j in judgements if j.logged is not None]
    if not own:
        return {}
    numbers: dict[str, list[float]] = {}
    for name, value in (item for j in own for item in (j.logged or {}).items()):
        if isinstance(value, bool | int | float):
            numbers.setdefault(f"verifier/{name}", []).append(float(value))
    errors = float(np.mean([j.category == VERIFIER_ERROR for j in own]))
    return {
        "format/verifier_error": errors,
        **{name: float(np.mean(values)) for name, values in numbers.items()},
    }


def abstention_metrics(samples: Sequence[TrainingSample], always: bool) -> dict[str, float]:
    """Return ``abstention/...`` of a step in which a response abstained, or ``always``."""
    abstained = [sample.judgement.abstained for sample in samples]
    if not (always or any(abstained)):
        return {}
    rates = abstention_rates([sample.judgement.correct for sample in samples], abstained)
    return {f"abstention/{name}": value for name, value in rates.items()}


def loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the means of the loss's statistics over all tokens and per block."""
    tokens = {block: max(sums.get(f"tokens/{block}", 0.0), 1.0) for block in BLOCKS}

    def mean(name: str) -> dict[str, float]:
        total = sum(sums.get(f"{name}/{block}", 0.0) for block in tokens) / sum(tokens.values())
        return {"": total} | {
            f"_{block}": sums.get(f"{name}/{block}", 0.0) / count for block, count in tokens.items()
        }

    known = (*LOSS_METRICS, "tis_weight", "tis_masked")
    present = [name for name in known if any(f"{name}/{block}" in sums for block in tokens)]
    return {
        LOSS_METRICS.get(name, name) + suffix: value
        for name in present
        for suffix, value in mean(name).items()
    }


def utilization(
    policy: Policy, samples: Sequence[TrainingSample], timers: Timers
) -> dict[str, float]:
    """Return the MFU of the training phase on a GPU of known speed: ``mfu/train``, model arithmetic
    (forward and backward of every token of ``samples`` once, without recomputation) per second and
    GPU over the card's dense bf16 peak, and ``tflops/train``.
    """
    peak, seconds = peak_tflops(), timers.seconds.get("train")
    if peak is None or not seconds:
        return {}
    lengths = map(sequence_length, samples)
    forward = sum(sequence_flops(policy.arch, policy.layout, length, length) for length in lengths)
    reached = 3 * forward / seconds / policy.topology.world_size / 1e12
    return {"tflops/train": reached, "mfu/train": reached / peak}


def _mean_of_updates(values: list[float]) -> float:
    """Average over the applied updates; undefined when all were skipped."""
    return float(np.mean(values)) if values else math.nan
