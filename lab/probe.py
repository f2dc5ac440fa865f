"""``python -m lab probe --config F.yaml [a.b=c ...]``: which gradients would the objectives take on
the same responses of a policy, and how do they agree?

Nothing is trained. ``torchrun ... -m lab probe`` uses the configuration's parallel layout. For
every batch the responses are sampled and judged as in training, and each of ``PARTS`` has its own
backward pass:

| part | advantage | on |
|---|---|---|
| ``accuracy`` | R - mean R | all tokens |
| ``mean_calibration`` | -l'(C) (c - mean c), l(C) = (C - accuracy)^2, C the mean c | all tokens |
| ``coupled_accuracy`` | (R - mean R) / std(R + w R_c) | all tokens |
| ``coupled_calibration`` | w (R_c - mean R_c) / std(R + w R_c) | all tokens |
| ``dcpo_accuracy`` | A_r | reasoning tokens |
| ``dcpo_calibration`` | A_c | confidence tokens |
| ``group_baseline`` | R_c - mean of the group's R_c | confidence tokens |
| ``counterfactual`` | R_c - mean of the others' score on this target | confidence tokens |

Options of the objective are the configuration's, whatever method it names. The first two are the
directions of the paper's proposition: one raises the accuracy, the other moves the mean confidence
towards it. The next two add up to the coupled objective's gradient, the next two to DCPO's. The
last two have the same expectation, and noise is what differs. The Fisher metric is the mean square
of the coupled objective's two parts over the batches. Memory: ten fp32 copies of what this rank's
optimizer holds, so use the distributed optimizer for a large model.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lab.gradient_probe import (
    ALL,
    PIECE,
    GradientPair,
    OwnedGradient,
    PairComparison,
    compare,
    layer_groups,
    part_gradient,
)
from megatron_dcpo.config import Config, load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, as_method, build_method, resolve
from megatron_dcpo.objectives.advantages import REWARD_TOLERANCE
from megatron_dcpo.objectives.method import SCORES
from megatron_dcpo.policy.optimizer import optimizer_group, zero_gradients
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.training.run import Run, build
from megatron_dcpo.types import BLOCK_REASONING, TrainingSample, replaced

logger = logging.getLogger(__name__)

PARTS = (
    "accuracy",
    "mean_calibration",
    "coupled_accuracy",
    "coupled_calibration",
    "dcpo_accuracy",
    "dcpo_calibration",
    "group_baseline",
    "counterfactual",
)
BASELINES = PARTS[-2:]  # of the confidence reward
PAIRS = {
    "proposition": ("accuracy", "mean_calibration"),
    "coupled": ("coupled_accuracy", "coupled_calibration"),
    "dcpo": ("dcpo_accuracy", "dcpo_calibration"),
}
SHOWN = {"proposition": "accuracy, mean confidence", "coupled": "coupled objective", "dcpo": "DCPO"}


def main(path: str, overrides: Sequence[str], batches: int, out: Path | None) -> None:
    """Probe the policy of the configuration at ``path``; write into ``out``, or its ``run_dir``."""
    config = load_config(path, list(overrides))
    if batches < 1:
        raise UserError(f"--batches must be at least 1, got {batches}")
    try:
        found = probe_policy(config, batches)
        if distributed.topology().rank == 0:
            directory = out or Path(config.run_dir)
            write_probe(found, directory)
            print("\n".join([*summary_lines(found), f"wrote {directory}"]))
    finally:
        distributed.destroy()


def probe_policy(config: Config, batches: int) -> dict[str, Any]:
    """Sample ``batches`` steps' worth of responses and compare the parts' gradients. Collective;
    equal on all ranks.
    """
    if config.frozen:
        raise UserError(
            "the probe compares gradients of the policy's own parameters; leave out model.adapter"
        )
    config = dataclasses.replace(config, objective=without_regularizers(config.objective))
    with build(config) as run:
        return _probe(run, batches)


def _probe(run: Run, batches: int) -> dict[str, Any]:
    policy, optimizer = run.policy, run.optimizer.megatron
    totals: dict[str, Moments] = {part: Moments() for part in PARTS}
    squares: list[Tensor] = []
    seen: list[TrainingSample] = []
    for step in range(1, batches + 1):
        run.offload.offload()
        # the same weights each time, under the version numbers of a training
        run.weight_sync.push(version=step - 1)
        samples = run.updater.trainer.fetch_share(run.rollouts.take(step).samples)
        run.engine.sleep()
        run.offload.reload()
        for part, scored in parts_of(samples, run.config.objective).items():
            _, gradients = part_gradient(
                policy, optimizer, partial(run.updater.accumulate, scored), copy=False
            )
            totals[part].add(gradients)
            if part.startswith("coupled"):
                squares = squares or [torch.zeros_like(g.gradient) for g in gradients]
                for square, one in zip(squares, gradients, strict=True):
                    square.addcmul_(one.gradient, one.gradient)
        seen += samples
        logger.info("batch %d of %d", step, batches)
    zero_gradients(policy, optimizer)
    return {
        "batches": batches,
        "policy": _facts(seen),
        **_measure(run, totals, [square / batches for square in squares]),
    }


def without_regularizers(objective: ObjectiveConfig) -> ObjectiveConfig:
    """Return DCPO with these options, but for KL and entropy terms: they would be part of every
    gradient alike.
    """
    return as_method(objective, "dcpo", kl_coef=0.0, entropy_coef=0.0)


def parts_of(
    samples: Sequence[TrainingSample], objective: ObjectiveConfig
) -> dict[str, list[TrainingSample]]:
    """Return the samples with each part's advantages on their tokens; block weights are left to the
    method.
    """

    def scores(method: str, **options: object) -> dict[str, np.ndarray]:
        chosen = build_method(as_method(objective, method, **options))
        rows = chosen.scaled_scores(samples, chosen.group_scores(samples))
        return dict(zip(SCORES, rows, strict=True))

    def confidence(baseline: str) -> np.ndarray:
        with_baseline = scores(
            "dcpo", confidence_baseline=baseline, advantage_normalization_confidence="mean"
        )
        return with_baseline["A_c"]

    options = resolve(as_method(objective, "coupled"))
    scored = build_method(as_method(objective, "dcpo")).score(samples)
    dcpo = scores("dcpo")
    coupled = scores("coupled")
    judgements = [sample.judgement for sample in samples]
    groups: dict[str, list[int]] = {}
    for row, judgement in enumerate(judgements):
        groups.setdefault(judgement.prompt_id, []).append(row)
    c = np.array([np.nan if j.confidence is None else j.confidence for j in judgements], float)
    well_formed = ~np.isnan(c)
    slope = 0.0
    if well_formed.any():
        slope = 2 * (c[well_formed].mean() - dcpo["R"].mean())

    # the advantages of each part on reasoning tokens and on confidence tokens
    columns = {part: np.zeros((2, len(samples))) for part in PARTS}
    for rows in groups.values():
        stated = np.array(rows)[well_formed[rows]]
        if len(stated):
            columns["mean_calibration"][:, stated] = -slope * (c[stated] - c[stated].mean())
        R = dcpo["R"][rows] - dcpo["R"][rows].mean()
        total = coupled["R"][rows] - coupled["R"][rows].mean()
        columns["accuracy"][:, rows] = R
        if np.ptp(total) >= REWARD_TOLERANCE:
            std = total.std(ddof=options.ddof) + options.eps
            columns["coupled_accuracy"][:, rows] = R / std
            columns["coupled_calibration"][:, rows] = (total - R) / std
    columns["dcpo_accuracy"][0] = dcpo["A_r"]
    columns["dcpo_calibration"][1] = dcpo["A_c"]
    size = np.array([len(groups[judgement.prompt_id]) for judgement in judgements])
    # the response's own R_c is left out of the mean, as for the counterfactual baseline
    columns["group_baseline"][1] = confidence("group") * size / (size - 1)
    columns["counterfactual"][1] = confidence("counterfactual")
    return {part: _with_advantages(scored, columns[part]) for part in PARTS}


def _with_advantages(
    samples: Sequence[TrainingSample], advantages: np.ndarray
) -> list[TrainingSample]:
    """Return scored samples with other advantages [2, N], of the two blocks."""
    replacements = []
    for sample, of_sample in zip(samples, advantages.T, strict=True):
        reasoning, confidence = of_sample
        columns = np.where(sample.block_ids == BLOCK_REASONING, reasoning, confidence)
        replacements.append(replaced(sample, advantages=columns))
    return replacements


@dataclass
class Moments:
    """The running sum of a part's gradients over batches, fp32, and the squared norm of each
    batch's gradient, of this rank's share.
    """

    sums: list[Tensor] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, gradients: list[OwnedGradient]) -> None:
        if not self.sums:
            self.sums = [torch.zeros_like(g.gradient) for g in gradients]
            self.groups = [g.group for g in gradients]
        for total, one in zip(self.sums, gradients, strict=True):
            total += one.gradient
        self.norms.append(sum(_squared_norm(g.gradient) for g in gradients))

    def mean(self, fisher: list[Tensor]) -> list[OwnedGradient]:
        """Return the mean gradient, with ``fisher`` as its metric."""
        batches = len(self.norms)
        return [
            OwnedGradient(group, total / batches, square)
            for group, total, square in zip(self.groups, self.sums, fisher, strict=True)
        ]


def _squared_norm(x: Tensor) -> float:
    return float(sum(piece.double().square().sum() for piece in x.reshape(-1).split(PIECE)))


def _measure(run: Run, totals: dict[str, Moments], fisher: list[Tensor]) -> dict[str, Any]:
    conflicts = {}
    for name, (accuracy, calibration) in PAIRS.items():
        comparison = compare(
            run.policy,
            run.optimizer.megatron,
            totals[accuracy].mean(fisher),
            totals[calibration].mean(fisher),
        )
        conflicts[name] = _as_json(comparison)
    return {
        "layer_groups": [*layer_groups(run.policy), ALL],
        "conflict": conflicts,
        "gradients": {part: _noise(run, totals[part]) for part in PARTS},
    }


def _as_json(found: PairComparison) -> dict[str, Any]:
    """Return a comparison as JSON: a is the gradient of accuracy, b that of calibration."""

    def named(comparison: GradientPair) -> dict[str, float]:
        return {
            "accuracy_norm": comparison.norm_a,
            "calibration_norm": comparison.norm_b,
            "cosine": comparison.cosine,
        }

    return {
        metric: {group: named(comparison) for group, comparison in getattr(found, metric).items()}
        for metric in ("plain", "fisher")
    }


def _noise(run: Run, moments: Moments) -> dict[str, float | None]:
    """Return the norm of the mean gradient and the variance of a batch's gradient (the trace of its
    covariance), both unbiased.

    ``signal_to_noise`` = |E g|^2 / tr Cov g of one batch. One batch has no variance.
    """
    n = len(moments.norms)
    squared_norm_of_mean = sum(map(_squared_norm, moments.sums)) / n**2
    values = torch.tensor([sum(moments.norms), squared_norm_of_mean], dtype=torch.float64)
    values = values.to(current_device())
    dist.all_reduce(values, group=optimizer_group(run.optimizer.megatron))
    squared, mean_squared = values.tolist()
    if n < 2:
        return {"mean_norm": mean_squared**0.5, "variance": None, "signal_to_noise": None}
    variance = (squared / n - mean_squared) * n / (n - 1)
    signal = max(mean_squared - variance / n, 0.0)
    return {
        "mean_norm": mean_squared**0.5,
        "variance": variance,
        "signal_to_noise": signal / variance if variance else None,
    }


def _facts(samples: Sequence[TrainingSample]) -> dict[str, float | None]:
    """Return accuracy, mean confidence, and their covariance over all responses and within
    prompts.
    """
    judged = [sample.judgement for sample in samples if sample.judgement.confidence is not None]
    if not judged:
        return dict.fromkeys(("accuracy", "confidence", "covariance", "covariance_within_prompts"))
    R = np.array([judgement.correct for judgement in judged])
    c = np.array([judgement.confidence for judgement in judged], float)
    prompt_ids = [judgement.prompt_id for judgement in judged]
    _, prompt, count = np.unique(prompt_ids, return_inverse=True, return_counts=True)

    def within_prompts(values: np.ndarray) -> np.ndarray:
        means = np.bincount(prompt, values) / count
        return values - means[prompt]

    within_R = within_prompts(R)
    within_c = within_prompts(c)
    return {
        "accuracy": float(R.mean()),
        "confidence": float(c.mean()),
        "covariance": float(np.mean((R - R.mean()) * (c - c.mean()))),
        "covariance_within_prompts": float(np.mean(within_R * within_c)),
    }


def write_probe(found: dict[str, Any], out: Path) -> None:
    """Write ``probe.json`` and ``probe.png`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "probe.json", json.dumps(found, indent=1) + "\n")
    draw_probe(found, out / "probe.png")


def summary_lines(found: dict[str, Any]) -> list[str]:
    """Return the measurement in a few lines of text."""
    lines = []
    for name, conflict in found["conflict"].items():
        plain, fisher = conflict["plain"][ALL], conflict["fisher"][ALL]
        lines.append(
            f"{SHOWN[name]:25} accuracy against calibration: cosine {plain['cosine']:+.3f} "
            f"(Fisher {fisher['cosine']:+.3f}), norms {plain['accuracy_norm']:.2e} and "
            f"{plain['calibration_norm']:.2e}"
        )
    for part in BASELINES:
        ratio = found["gradients"][part]["signal_to_noise"]
        shown = "needs at least two batches (--batches)" if ratio is None else f"{ratio:.2f}"
        lines.append(
            f"{part.replace('_', ' '):25} signal to noise of the confidence gradient: {shown}"
        )
    return lines


def draw_probe(found: dict[str, Any], path: Path) -> None:
    from megatron_dcpo.calibration.diagrams import PALETTE, saved_figure

    groups = found["layer_groups"]
    with saved_figure(path, columns=3) as (plain, fisher, noise):
        for axes, metric in ((plain, "plain"), (fisher, "fisher")):
            for shift, (name, color) in zip(
                (-0.27, 0.0, 0.27), zip(PAIRS, PALETTE, strict=False), strict=True
            ):
                values = [found["conflict"][name][metric][group]["cosine"] for group in groups]
                axes.bar(
                    np.arange(len(groups)) + shift, values, 0.25, color=color, label=SHOWN[name]
                )
            axes.axhline(0, color="#777777", lw=0.8)
            axes.set(ylim=(-1, 1), title=f"cosine, accuracy against calibration ({metric})")
            axes.set_xticks(np.arange(len(groups)), groups, rotation=45, ha="right")
        plain.legend()
        noise.bar(
            range(2),
            [found["gradients"][part]["signal_to_noise"] or 0.0 for part in BASELINES],
            color=PALETTE[2:4],
        )
        noise.set_xticks(range(2), ["group baseline", "counterfactual"])
        noise.set_title("signal to noise of the confidence gradient")
