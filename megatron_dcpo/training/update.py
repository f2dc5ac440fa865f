"""The policy update: score the rollout, fix the global denominators, run the mini-batches through the schedule.

A response is one :class:`TrainingSample` all the way: ``MiniBatch.of`` deals it to a rank, ``with_old_logprobs`` and
``score`` fill its fields, ``token_batch`` puts it beside the policy's log-probs, ``micro_batch_loss`` sums its tokens'
losses (docs/one_step.md shows one with its numbers). Every rank scores the whole mini-batch, which costs nothing next to a
forward pass, so that groups are never cut by the split over data-parallel ranks and the denominators are global.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import Objective, Scored, TokenBatch
from megatron_dcpo.policy.batching import (
    MicroBatch,
    assign_to_ranks,
    sequence_length,
    split_micro_batches,
)
from megatron_dcpo.policy.gradient_probe import probe_block_gradients
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import gather_parameters, gradient_norm, zero_gradients
from megatron_dcpo.policy.output_layer import TokenOutputs
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.distributed import all_gather_objects, max_over_ranks
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.training.sampling import TrainingSample
from megatron_dcpo.types import BLOCKS, Judgement, replaced
from megatron_dcpo.weights.architecture import Architecture

logger = logging.getLogger(__name__)

MISMATCH_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)  # of |engine - trainer| log-probs
ROUTED_OTHERWISE = {"fp32": 1e-3, "bf16": 0.1}  # the edge that no token of a model without experts reaches


@dataclass
class UpdateStatistics:
    """What the updates of one rollout measured. ``sums`` add up over tokens and ranks, ``maxima`` do not."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    block_gradients: dict[str, float] = field(default_factory=dict)
    samples: list[TrainingSample] = field(default_factory=list)
    learning_rate: float = 0.0
    skipped: int = 0


def update_policy(run: TrainingRun, samples: Sequence[TrainingSample], step: int) -> UpdateStatistics:
    """Take ``updates_per_rollout`` optimizer steps on the rollout's mini-batches. Collective.

    An update whose loss or gradient is not finite is skipped; raises :class:`UserError` when too many follow one another.
    """
    statistics = UpdateStatistics()
    mini_batches = [MiniBatch.of(run, part) for part in split_groups(samples, run.config.training.updates_per_rollout)]
    # Log-probs of the policy that sampled, needed as soon as a second update leaves it. On the only update of a rollout
    # the old policy is the current one, and its log-probs are those of the forward pass itself.
    if len(mini_batches) > 1 or run.objective.method.needs_old_logprobs:
        mini_batches = [with_old_logprobs(run, mini_batch) for mini_batch in mini_batches]
    if run.reference is not None:
        with run.reference() as reference:
            mini_batches = [with_ref_logprobs(run, mini_batch, reference) for mini_batch in mini_batches]
    for number, mini_batch in enumerate(mini_batches):
        scored = score(run, mini_batch)
        statistics.samples.extend(scored.samples)
        update_once(run, scored, statistics, probe=number == 0 and _probe_due(run, step), step=step)
    gather_parameters(run.policy)
    return statistics


@dataclass(frozen=True)
class MiniBatch:
    """The responses of one optimizer step, equal on all ranks; ``local``: indices of those that this data-parallel rank
    trains on; ``micro_batches``: lists of indices into ``local``."""

    samples: tuple[TrainingSample, ...]
    local: tuple[int, ...]
    micro_batches: list[list[int]]

    @classmethod
    def of(cls, run: TrainingRun, samples: Sequence[TrainingSample]) -> MiniBatch:
        """Deal ``samples`` over the data-parallel ranks and cut this rank's into micro-batches."""
        lengths = [sequence_length(sample) for sample in samples]
        shares = assign_to_ranks(lengths, run.topology.dp_size)
        parallel = run.config.parallel
        micro_batches = split_micro_batches(
            [[lengths[i] for i in share] for share in shares],
            run.topology.dp_rank,
            micro_batch_size=run.config.training.micro_batch_size,
            max_tokens=run.config.training.max_tokens_per_micro_batch,
            packing=parallel.sequence_packing,
            multiple_of=run.topology.pp_size if parallel.virtual_pipeline_model_parallel_size > 1 else 1,
        )
        return cls(tuple(samples), tuple(shares[run.topology.dp_rank]), micro_batches)

    @property
    def local_samples(self) -> list[TrainingSample]:
        return [self.samples[i] for i in self.local]

    @property
    def judgements(self) -> list[Judgement]:
        return [sample.judgement for sample in self.samples]

    def with_fields(self, fields: Mapping[int, Mapping[str, Any]]) -> MiniBatch:
        """Fill fields of the samples, by index."""
        samples = (replaced(sample, **fields.get(i, {})) for i, sample in enumerate(self.samples))
        return dataclasses.replace(self, samples=tuple(samples))


def split_groups(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """``parts`` mini-batches of whole groups, in the order in which the prompts first occur."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.prompt_id, []).append(sample)
    prompts, size = list(groups), len(groups) // parts
    return [[s for p in prompts[n * size : (n + 1) * size] for s in groups[p]] for n in range(parts)]


def with_old_logprobs(run: TrainingRun, mini_batch: MiniBatch) -> MiniBatch:
    """``old_logprobs`` of every sample, by the policy as it is. Collective."""
    own = compute_logprobs(run.policy, mini_batch.local_samples, mini_batch.micro_batches, **_forward_options(run))
    fields: dict[int, Mapping[str, Any]] = {}
    for part in all_gather_objects(dict(zip(mini_batch.local, own, strict=True))):
        fields |= {index: {"old_logprobs": logprobs} for index, logprobs in part.items()}
    return mini_batch.with_fields(fields)


def with_ref_logprobs(run: TrainingRun, mini_batch: MiniBatch, reference: Policy) -> MiniBatch:
    """``ref_logprobs`` of this rank's samples, by the frozen reference policy. Collective."""
    own = compute_logprobs(reference, mini_batch.local_samples, mini_batch.micro_batches, **_forward_options(run))
    return mini_batch.with_fields({i: {"ref_logprobs": row} for i, row in zip(mini_batch.local, own, strict=True)})


def score(run: TrainingRun, mini_batch: MiniBatch) -> MiniBatch:
    """Rewards, token advantages and token weights of every sample. No communication: all ranks have all samples."""
    old = [s.old_logprobs for s in mini_batch.samples if s.old_logprobs is not None]
    return with_scores(run, mini_batch, run.objective.score(mini_batch.judgements, old or None))


def with_scores(run: TrainingRun, mini_batch: MiniBatch, scored: Scored) -> MiniBatch:
    """``mini_batch`` with what an objective made of its judgements, and the run's own token weights."""
    weights = run.objective.token_weights(scored, run.objective.counts(scored))
    columns = zip(scored.R, scored.R_c, scored.tokens, weights, strict=True)
    names = ("R", "R_c", "tokens", "weights")
    return mini_batch.with_fields({i: dict(zip(names, row, strict=True)) for i, row in enumerate(columns)})


def update_once(run: TrainingRun, mini_batch: MiniBatch, statistics: UpdateStatistics, probe: bool, step: int) -> None:
    """One optimizer step on a scored mini-batch. Collective."""
    if probe:
        block, bearing = _lighter_block(run, mini_batch)
        collected, gradients = probe_block_gradients(
            run.policy, run.optimizer, partial(accumulate, run, bearing, block), partial(accumulate, run, mini_batch)
        )
        statistics.block_gradients = (gradients if block == "reasoning" else gradients.swapped()).metrics()
    else:
        zero_gradients(run.policy, run.optimizer)
        if run.adapter is not None:
            run.adapter.zero_grad()
        collected = accumulate(run, mini_batch)
    _check_logprob_diff(run, collected, step)
    loss = _reduce(run, collected, statistics)
    adapter_norm = run.adapter.reduce() if run.adapter is not None else 0.0
    grad_norm = adapter_norm
    if run.optimizer is not None:
        grad_norm, statistics.learning_rate = gradient_norm(run.optimizer), run.optimizer.param_groups[0]["lr"]
    if _skip_nonfinite(run, loss, grad_norm + adapter_norm, statistics, step):
        return
    if run.optimizer is not None:
        run.optimizer.step()
        run.scheduler.step(1)
    if run.adapter is not None:
        adapter_lr = run.adapter.step(adapter_norm)
        statistics.maxima["grad_norm/adapter_max"] = adapter_norm
        statistics.learning_rate = statistics.learning_rate if run.optimizer is not None else adapter_lr
    statistics.grad_norms.append(grad_norm)
    statistics.losses.append(loss)


def _lighter_block(run: TrainingRun, mini_batch: MiniBatch) -> tuple[str, MiniBatch]:
    """The block in which fewer responses have a gradient, and those."""
    scored = [(s, s.weights, s.tokens) for s in mini_batch.samples if s.weights is not None and s.tokens is not None]
    bearing = {
        block: [s for s, weights, t in scored if run.objective.bears_gradient(weights, t, index)]
        for block, index in BLOCKS.items()
    }
    block = min(bearing, key=lambda name: len(bearing[name]))
    return block, MiniBatch.of(run, bearing[block])


def _skip_nonfinite(run: TrainingRun, loss: float, grad_norm: float, statistics: UpdateStatistics, step: int) -> bool:
    """Whether loss or gradient is infinite or not a number on any rank: then parameters, optimizer and schedule stay as
    they are. Collective. Raises :class:`UserError` after ``training.max_nonfinite_steps`` such updates in a row."""
    progress, most = run.progress, run.config.training.max_nonfinite_steps
    if not max_over_ranks(int(not (math.isfinite(loss) and math.isfinite(grad_norm)))):
        progress.nonfinite_in_a_row = 0
        return False
    zero_gradients(run.policy, run.optimizer)
    statistics.skipped += 1
    progress.nonfinite_in_a_row += 1
    values = f"loss {loss}, gradient norm {grad_norm}"
    if run.topology.rank == 0:
        logger.warning("step %d: update skipped (%s), %d in a row", step, values, progress.nonfinite_in_a_row)
    if progress.nonfinite_in_a_row >= most:
        run.saver.wait()
        raise UserError(
            f"{most} updates in a row without a finite loss and gradient (training.max_nonfinite_steps), the last in step "
            f"{step}: {values}; continue from the last checkpoint with --resume auto and a lower optimizer.lr"
        )
    return True


def accumulate(run: TrainingRun, mini_batch: MiniBatch, block: str | None = None) -> list[dict[str, float]]:
    """Add the gradient of a scored mini-batch's loss (of its tokens in one ``block``) to the buffers; its statistics."""
    return accumulate_gradients(
        run.policy,
        mini_batch.local_samples,
        mini_batch.micro_batches,
        partial(micro_batch_loss, run.objective, block),
        columns=loss_columns,
        separable=run.objective.separable,
        **_forward_options(run),
    )


def micro_batch_loss(
    objective: Objective, block: str | None, batch: MicroBatch, outputs: TokenOutputs
) -> tuple[Tensor, dict[str, float]]:
    """Sum of the weighted token losses of a micro-batch or a part of it, and the statistics of a whole one. The probe asks
    for one ``block``, and reads no statistics."""
    tokens = token_batch(batch, outputs, with_statistics=not (batch.is_part or block))
    losses, stats = objective.token_loss(tokens)
    if block is not None:
        losses = losses * (tokens.block_ids == BLOCKS[block])
    loss = losses.sum()
    if not tokens.with_statistics:
        return loss, {}
    stats = {"loss": loss.detach(), **stats}
    values = torch.stack([value.double() for value in stats.values()]).tolist()  # one wait for the device
    return loss, dict(zip(stats, values, strict=True)) | _mismatch(tokens)


def token_batch(batch: MicroBatch, outputs: TokenOutputs, with_statistics: bool) -> TokenBatch:
    """The columns of a micro-batch beside the policy's outputs."""
    columns: dict[str, Any] = dict(batch.columns)
    old = columns.pop("old_logprobs")
    return TokenBatch(
        logprobs=outputs.logprobs,
        old_logprobs=outputs.logprobs.detach() if old is None else old,
        sequence_ids=batch.sequence_ids,
        entropy=outputs.entropy,
        correct=None if batch.is_part else _flat([np.array([sample.R]) for sample in batch.samples]),
        with_statistics=with_statistics,
        **columns,
    )


def loss_columns(samples: Sequence[TrainingSample]) -> dict[str, Tensor | None]:
    """Return the per-token arrays of a micro-batch's samples, in the order of its rows."""
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    if len(tokens) < len(samples):
        raise ValueError("the mini-batch has samples without advantages: score() comes before the update")
    return {
        "old_logprobs": _flat([sample.old_logprobs for sample in samples]),
        "advantages": _flat([t.advantages for t in tokens]),
        "block_ids": _flat([t.block_ids for t in tokens], torch.int64),
        "weights": _flat([sample.weights for sample in samples]),
        "engine_logprobs": _flat([sample.response.logprobs for sample in samples]),
        "ref_logprobs": _flat([sample.ref_logprobs for sample in samples]),
    }


def _flat(rows: Sequence[Any], dtype: torch.dtype = torch.float32) -> Any:
    """The arrays of a micro-batch's samples as one tensor on the device; None where the samples have none."""
    if any(row is None for row in rows):
        return None
    return torch.as_tensor(np.concatenate([np.zeros(0), *rows]), dtype=dtype, device=current_device())


def _mismatch(tokens: TokenBatch) -> dict[str, float]:
    """Engine against trainer on the sampled tokens: absolute differences, all and per block, their histogram, and the k3
    estimate of the divergence."""
    assert tokens.engine_logprobs is not None
    with torch.no_grad():
        difference = tokens.old_logprobs - tokens.engine_logprobs
        magnitude = difference.abs()
        bins = torch.bucketize(magnitude, magnitude.new_tensor(MISMATCH_EDGES), right=True)
        result = {
            "engine/tokens": float(len(difference)),
            "engine/kl": float((torch.expm1(difference) - difference).sum()),
            "engine/abs": float(magnitude.sum()),
            "engine/logprob_diff_max": float(magnitude.max()) if len(difference) else 0.0,
        }
        for block, index in BLOCKS.items():
            inside = tokens.block_ids == index
            counts = torch.bincount(bins[inside], minlength=len(MISMATCH_EDGES) + 1).tolist()
            result |= {f"engine/histogram/{block}/{number}": float(count) for number, count in enumerate(counts)}
            result[f"engine/tokens/{block}"] = float(inside.sum())
            result[f"engine/abs/{block}"] = float(magnitude[inside].sum())
            result[f"engine/logprob_diff_max_{block}"] = float(magnitude[inside].max()) if inside.any() else 0.0
        return result


def mismatch_histogram(sums: dict[str, float]) -> dict[str, list[int]]:
    """Tokens of each block below the first edge, between two edges, above the last."""
    bins = range(len(MISMATCH_EDGES) + 1)
    return {block: [int(sums.get(f"engine/histogram/{block}/{n}", 0)) for n in bins] for block in BLOCKS}


def routing_mismatch(arch: Architecture, params_dtype: str, sums: dict[str, float]) -> dict[str, float]:
    """``engine/routing_mismatch``, of a model with experts: the share of the sampled tokens whose log-probs in engine and
    trainer differ by more than rounding alone makes them (docs/rollout.md#engine-against-trainer)."""
    if not arch.num_experts:
        return {}
    first = MISMATCH_EDGES.index(ROUTED_OTHERWISE[params_dtype]) + 1
    counts = np.sum(list(mismatch_histogram(sums).values()), axis=0)
    return {"engine/routing_mismatch": float(counts[first:].sum() / max(counts.sum(), 1))}


def _check_logprob_diff(run: TrainingRun, collected: Sequence[dict[str, float]], step: int) -> None:
    """Compare the largest difference of this mini-batch, on any rank, with the threshold, before the policy moves."""
    rollout = run.config.rollout
    if not rollout.logprob_diff_alarm:
        return
    local = max((part.get("engine/logprob_diff_max", 0.0) for part in collected), default=0.0)
    largest = max(all_gather_objects(local))
    if largest <= rollout.logprob_diff_alarm:  # False for NaN
        return
    text = (
        f"step {step}: engine and trainer differ by up to {largest:.3g} in the log-prob of a sampled token, more than "
        f"rollout.logprob_diff_alarm={rollout.logprob_diff_alarm:g}; see mismatch.jsonl"
    )
    if rollout.logprob_diff_action == "stop":
        raise UserError(f"{text}; nothing was updated in this step, the last checkpoint stands")
    if run.topology.rank == 0:
        logger.warning(text)


def _reduce(run: TrainingRun, collected: Sequence[dict[str, float]], statistics: UpdateStatistics) -> float:
    """Add up all micro-batches of all replicas, each counted once; returns the loss of the update."""
    loss = 0.0
    for part in all_gather_objects(list(collected) if run.topology.reports else []):
        for stats in part:
            loss += stats.get("loss", 0.0)
            for key, value in stats.items():
                if "_max" in key:
                    statistics.maxima[key] = max(statistics.maxima.get(key, 0.0), value)
                elif key != "loss":
                    statistics.sums[key] = statistics.sums.get(key, 0.0) + value
    return loss


def _probe_due(run: TrainingRun, step: int) -> bool:
    interval = run.config.training.gradient_probe_interval
    return interval > 0 and (step == 1 or step % interval == 0) and run.adapter is None


def _forward_options(run: TrainingRun) -> dict[str, Any]:
    return {"temperature": run.config.rollout.temperature, "packing": run.config.parallel.sequence_packing}
