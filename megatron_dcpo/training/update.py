"""The policy update: score the rollout, fix the global denominators, run the mini-batches through the schedule.

Every rank scores the whole mini-batch, which costs nothing next to a forward pass. Groups are therefore never cut by
the split over data-parallel ranks, and the denominators are global by construction, before the schedule starts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo import runtime
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import DigitBatch, Scored, TokenBatch
from megatron_dcpo.policy.batching import MicroBatch, Sample, assign_to_ranks, split_micro_batches
from megatron_dcpo.policy.gradient_probe import probe_block_gradients
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import complete_parameters, gradient_norm, zero_gradients
from megatron_dcpo.policy.schedule import Alternatives, accumulate_gradients, compute_logprobs
from megatron_dcpo.runtime.distributed import all_gather_objects, max_over_ranks
from megatron_dcpo.training.run import Run
from megatron_dcpo.training.sampling import Rollout
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, TokenAdvantages

logger = logging.getLogger(__name__)

BLOCKS = {"reasoning": BLOCK_REASONING, "confidence": BLOCK_CONFIDENCE}
MISMATCH_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)  # of |engine - trainer| log-probs


@dataclass
class UpdateStatistics:
    """What the updates of one rollout measured. ``sums`` add up over tokens and ranks, ``maxima`` do not."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    block_gradients: dict[str, float] = field(default_factory=dict)
    scored: list[Scored] = field(default_factory=list)
    learning_rate: float = 0.0
    skipped: int = 0


def update_policy(run: Run, rollout: Rollout, step: int) -> UpdateStatistics:
    """Take ``updates_per_rollout`` optimizer steps on the rollout's mini-batches. Collective.

    An update whose loss or gradient is not finite is skipped; raises :class:`UserError` when too many follow one another.
    """
    statistics = UpdateStatistics()
    mini_batches = _mini_batches(run, rollout)
    # log-probs of the policy that sampled, needed as soon as a second update leaves it. On the only update of a rollout
    # the old policy is the current one, and its log-probs are those of the forward pass itself.
    shares = [Share.of(run, part) for part in mini_batches]
    if len(mini_batches) > 1 or run.objective.method.needs_old_logprobs:
        shares = [share.with_old_logprobs(run) for share in shares]
    if run.reference is not None:
        shares = [share.with_ref_logprobs(run, run.reference) for share in shares]
    for number, share in enumerate(shares):
        _update_once(run, share, statistics, probe=number == 0 and _probe_due(run, step), step=step)
    complete_parameters(run.policy)
    return statistics


@dataclass(frozen=True)
class Share:
    """One mini-batch and the part this data-parallel rank trains on.

    ``old_logprobs``: of all its responses; ``ref_logprobs``: of this rank's, by the frozen reference policy.
    """

    rollout: Rollout
    mine: list[int]
    samples: list[Sample]
    splits: list[list[int]]
    old_logprobs: list[np.ndarray] | None = None
    ref_logprobs: dict[int, np.ndarray] | None = None

    @classmethod
    def of(cls, run: Run, rollout: Rollout) -> Share:
        samples = [
            Sample(np.asarray(rollout.prompts[r.prompt_id].token_ids, np.int64), np.asarray(r.token_ids, np.int64))
            for r in rollout.responses
        ]
        lengths = [sample.length for sample in samples]
        shares = assign_to_ranks(lengths, run.topology.dp_size)
        mine = shares[run.topology.dp_rank]
        parallel = run.config.parallel
        splits = split_micro_batches(
            [[lengths[i] for i in share] for share in shares],
            run.topology.dp_rank,
            micro_batch_size=run.config.training.micro_batch_size,
            max_tokens=run.config.training.max_tokens_per_micro_batch,
            packing=parallel.sequence_packing,
            multiple_of=run.topology.pp_size if parallel.virtual_pipeline_model_parallel_size > 1 else 1,
        )
        return cls(rollout, mine, [samples[i] for i in mine], splits)

    def with_old_logprobs(self, run: Run) -> Share:
        own = compute_logprobs(run.policy, self.samples, self.splits, **_forward_options(run))
        everyone: dict[int, np.ndarray] = {}
        for part in all_gather_objects(dict(zip(self.mine, own, strict=True))):
            everyone |= part
        old = [everyone[i] for i in range(len(self.rollout.responses))]
        return dataclasses.replace(self, old_logprobs=old)

    def with_ref_logprobs(self, run: Run, reference: Policy) -> Share:
        logprobs = compute_logprobs(reference, self.samples, self.splits, **_forward_options(run))
        return dataclasses.replace(self, ref_logprobs=dict(zip(self.mine, logprobs, strict=True)))


def _update_once(run: Run, share: Share, statistics: UpdateStatistics, probe: bool, step: int) -> None:
    scored = run.objective.score(share.rollout.judgements, share.old_logprobs)
    zero_gradients(run.policy, run.optimizer)
    backward = partial(accumulate, run, share, scored)
    if probe:
        (first, second), gradients = probe_block_gradients(run.policy, run.optimizer, backward)
        collected = first + [{"loss": part["loss"]} for part in second]
        statistics.block_gradients = gradients.metrics()
    else:
        collected = backward()
    _alarm(run, collected, step)
    statistics.learning_rate = run.optimizer.param_groups[0]["lr"]
    statistics.scored.append(scored)
    loss, grad_norm = _reduce(run, collected, statistics), gradient_norm(run.optimizer)
    if _skip_nonfinite(run, loss, grad_norm, statistics, step):
        return
    run.optimizer.step()
    run.scheduler.step(1)
    statistics.grad_norms.append(grad_norm)
    statistics.losses.append(loss)


def _skip_nonfinite(run: Run, loss: float, grad_norm: float, statistics: UpdateStatistics, step: int) -> bool:
    """Whether loss or gradient is infinite or not a number on any rank: then parameters, optimizer and schedule stay as
    they are. Collective. Raises :class:`UserError` after ``training.max_nonfinite_steps`` such updates in a row."""
    progress, most = run.progress, run.config.training.max_nonfinite_steps
    if not max_over_ranks(int(not (math.isfinite(loss) and math.isfinite(grad_norm)))):
        progress.nonfinite_in_a_row = 0
        return False
    zero_gradients(run.policy, run.optimizer)
    statistics.skipped += 1
    progress.nonfinite_in_a_row += 1
    found = f"loss {loss}, gradient norm {grad_norm}"
    if run.topology.rank == 0:
        logger.warning("step %d: update skipped (%s), %d in a row", step, found, progress.nonfinite_in_a_row)
    if progress.nonfinite_in_a_row >= most:
        run.saver.wait()
        raise UserError(
            f"{most} updates in a row without a finite loss and gradient (training.max_nonfinite_steps), the last in step "
            f"{step}: {found}; continue from the last checkpoint with --resume auto and a lower optimizer.lr"
        )
    return True


def accumulate(run: Run, share: Share, scored: Scored, block: str | None = None) -> list[dict[str, float]]:
    """Add the gradient of the loss of ``scored`` (of its tokens in one ``block``) to the buffers; its statistics."""
    weights = run.objective.token_weights(scored, run.objective.counts(scored))
    loss = partial(_loss, run, partial(_token_batch, run, share, scored, weights), block)
    options = _forward_options(run)
    return accumulate_gradients(run.policy, share.samples, share.splits, loss, **options, with_alternatives=True)


def _loss(
    run: Run,
    fill: Callable[..., TokenBatch],
    block: str | None,
    batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    alternatives: Alternatives,
) -> tuple[Tensor, dict[str, float]]:
    """Sum of the weighted token losses of a micro-batch (of one ``block`` when the probe asks), and what it saw."""
    tokens = fill(batch, logprobs, entropy, alternatives)
    losses, stats = run.objective.token_loss(tokens)
    if block is not None:
        losses = losses * (tokens.block_ids == BLOCKS[block])
    loss = losses.sum()
    return loss, {"loss": float(loss.detach()), **{k: float(v) for k, v in stats.items()}, **_mismatch(tokens)}


def _token_batch(
    run: Run,
    share: Share,
    scored: Scored,
    weights: Sequence[np.ndarray],
    batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    alternatives: Alternatives,
) -> TokenBatch:
    """The per-token arrays of a micro-batch's members, in the order of its rows."""
    members = [share.mine[i] for i in batch.members]

    def tokens(arrays: Sequence[np.ndarray] | dict[int, np.ndarray], dtype: torch.dtype) -> Tensor:
        flat = np.concatenate([arrays[i] for i in members]) if members else np.zeros(0)
        return torch.as_tensor(flat, dtype=dtype, device=runtime.device())

    advantages = [a.advantages for a in scored.tokens]
    block_ids = [a.block_ids for a in scored.tokens]
    responses = share.rollout.responses
    old = share.old_logprobs
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=tokens(old, torch.float32) if old is not None else logprobs.detach(),
        advantages=tokens(advantages, torch.float32),
        block_ids=tokens(block_ids, torch.int64),
        weights=tokens(weights, torch.float32),
        sequence_ids=batch.sequence_ids,
        digits=_digit_batch(run, [scored.tokens[i] for i in members], alternatives),
        engine_logprobs=tokens([r.logprobs for r in responses], torch.float32),
        ref_logprobs=tokens(share.ref_logprobs, torch.float32) if share.ref_logprobs is not None else None,
        entropy=entropy,
        correct=torch.as_tensor([scored.R[i] for i in members], dtype=torch.float32, device=runtime.device()),
    )


def _digit_batch(run: Run, members: Sequence[TokenAdvantages], alternatives: Alternatives) -> DigitBatch | None:
    """The positions trained on all digits at once, padded to the widest token; None where there are none."""
    starts = np.cumsum([0, *(len(tokens.advantages) for tokens in members)])
    found = [(start, digits) for start, tokens in zip(starts, members, strict=False) for digits in tokens.digits]
    if not found:
        return None
    shape = (len(found), 10 ** max(digits.width for _, digits in found))
    ids, scores = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for row, (_, digits) in enumerate(found):
        ids[row, : len(digits.scores)] = run.digit_token_ids[digits.width]
        scores[row, : len(digits.scores)] = digits.scores
    rows = np.array([start + digits.position for start, digits in found], np.int64)
    on_device = [torch.as_tensor(array, device=runtime.device()) for array in (rows, ids, scores)]
    return DigitBatch(on_device[0], alternatives(*on_device[:2]), on_device[2])


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
            mine = tokens.block_ids == index
            counts = torch.bincount(bins[mine], minlength=len(MISMATCH_EDGES) + 1).tolist()
            result |= {f"engine/histogram/{block}/{number}": float(count) for number, count in enumerate(counts)}
            result[f"engine/tokens/{block}"] = float(mine.sum())
            result[f"engine/abs/{block}"] = float(magnitude[mine].sum())
            result[f"engine/logprob_diff_max_{block}"] = float(magnitude[mine].max()) if mine.any() else 0.0
        return result


def mismatch_histogram(sums: dict[str, float]) -> dict[str, list[int]]:
    """Tokens of each block below the first edge, between two edges, above the last."""
    bins = range(len(MISMATCH_EDGES) + 1)
    return {block: [int(sums.get(f"engine/histogram/{block}/{n}", 0)) for n in bins] for block in BLOCKS}


def _alarm(run: Run, collected: Sequence[dict[str, float]], step: int) -> None:
    """Compare the largest difference of this mini-batch, on any rank, with the threshold, before the policy moves."""
    rollout = run.config.rollout
    if not rollout.logprob_diff_alarm:
        return
    local = max((part.get("engine/logprob_diff_max", 0.0) for part in collected), default=0.0)
    largest = max(all_gather_objects(local))
    if largest <= rollout.logprob_diff_alarm:  # a NaN is no agreement either
        return
    text = (
        f"step {step}: engine and trainer differ by up to {largest:.3g} in the log-prob of a sampled token, more than "
        f"rollout.logprob_diff_alarm={rollout.logprob_diff_alarm:g}; see mismatch.jsonl"
    )
    if rollout.logprob_diff_action == "stop":
        raise UserError(f"{text}; nothing was updated in this step, the last checkpoint stands")
    if run.topology.rank == 0:
        logger.warning(text)


def _reduce(run: Run, collected: Sequence[dict[str, float]], statistics: UpdateStatistics) -> float:
    """Add up all micro-batches of all replicas, each counted once; returns the loss of the update."""
    once = run.topology.is_last_stage and run.topology.tp_rank == 0
    loss = 0.0
    for part in all_gather_objects(list(collected) if once else []):
        for stats in part:
            loss += stats.get("loss", 0.0)
            for key, value in stats.items():
                if "_max" in key:
                    statistics.maxima[key] = max(statistics.maxima.get(key, 0.0), value)
                elif key != "loss":
                    statistics.sums[key] = statistics.sums.get(key, 0.0) + value
    return loss


def _mini_batches(run: Run, rollout: Rollout) -> list[Rollout]:
    ids = list(rollout.prompts)
    updates = run.config.training.updates_per_rollout
    size = len(ids) // updates
    if updates == 1:
        return [rollout]
    return [rollout.subset(set(ids[number * size : (number + 1) * size])) for number in range(updates)]


def _probe_due(run: Run, step: int) -> bool:
    interval = run.config.training.gradient_probe_interval
    return interval > 0 and (step == 1 or step % interval == 0)


def _forward_options(run: Run) -> dict[str, Any]:
    return {"temperature": run.config.rollout.temperature, "packing": run.config.parallel.sequence_packing}
