"""Updating: score the rollout, fix the global denominators, run the mini-batches through Megatron's
schedule.

A response is one :class:`TrainingSample` all the way: ``with_old_logprobs`` and ``Method.score``
fill its fields, a micro-batch holds its tokens, the loss sums their contributions (docs/one_step.md
shows one with its numbers). Every rank scores the whole mini-batch, which costs nothing next to a
forward pass, so that groups are never cut by the split over data-parallel ranks and the
denominators are global.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypedDict

import numpy as np
import torch

from megatron_dcpo.config import ParallelConfig, RolloutConfig, TrainingConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.shaping import adapted_entropy_coef
from megatron_dcpo.policy.batching import assign_to_ranks, sequence_length, split_micro_batches
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.runtime.distributed import all_gather_objects, max_over_ranks
from megatron_dcpo.training.mismatch import LARGEST, REDUCED_BY_MAX, computed, mismatch_statistics
from megatron_dcpo.types import BLOCKS, MicroBatch, TokenOutputs, TrainingSample, replaced

logger = logging.getLogger(__name__)

Reference = Callable[[], AbstractContextManager[Policy]]
Accumulate = Callable[[], list[dict[str, float]]]
# backward passes of a part of the loss and of the loss -> what the latter returns, norms and cosine
# of part and rest
Probe = Callable[[Accumulate, Accumulate], tuple[list[dict[str, float]], Any]]


class Optimizer(Protocol):
    """What an update asks of an optimizer: policy/optimizer.py has Megatron's, policy/adapter.py an
    adapter's.
    """

    @property
    def learning_rate(self) -> float: ...
    def zero_gradients(self) -> None: ...
    def gradient_norm(self) -> float: ...
    def step(self) -> None: ...
    def gather_parameters(self) -> None: ...


class UpdateStatistics(TypedDict):
    """What the updates of one rollout measured. ``sums`` add up over tokens and ranks, ``maxima``
    do not. ``computed``: the samples that took part in forward and backward.
    """

    sums: dict[str, float]
    maxima: dict[str, float]
    losses: list[float]
    grad_norms: list[float]
    block_gradients: dict[str, float]
    coefficients: dict[str, float]
    learning_rate: float
    skipped: int
    computed: list[TrainingSample]


class Updater:
    """Takes optimizer steps on the ``policy``. ``reference`` opens the starting policy, where a KL
    loss asks for it; ``probe`` compares the gradients of the two blocks, where they can be had.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        method: Method,
        reference: Reference | None,
        probe: Probe | None,
        parallel: ParallelConfig,
        rollout: RolloutConfig,
        training: TrainingConfig,
    ) -> None:
        self.policy, self.optimizer, self.method = policy, optimizer, method
        self.reference, self.probe = reference, probe
        self.topology = policy.topology
        self.parallel, self.rollout, self.training = parallel, rollout, training
        self.forward_options: Any = {
            "temperature": rollout.temperature,
            "packing": parallel.sequence_packing,
        }
        self.nonfinite_in_a_row, self.measures_mismatch = 0, True
        coef = method.options.entropy_coef_reasoning
        self.entropy_coefs = coef, coef  # with entropy_target: the next one, what acts

    def update(
        self, samples: Sequence[TrainingSample], step: int
    ) -> tuple[list[TrainingSample], UpdateStatistics]:
        """Take ``updates_per_rollout`` optimizer steps on the rollout's mini-batches; return the
        scored samples. Collective.

        An update whose loss or gradient is not finite is skipped; raises :class:`UserError` after
        too many in a row.
        """
        statistics: UpdateStatistics = {
            "sums": {},
            "maxima": {},
            "losses": [],
            "grad_norms": [],
            "block_gradients": {},
            "coefficients": {},
            "learning_rate": 0.0,
            "skipped": 0,
            "computed": [],
        }
        mini_batches = split_groups(samples, self.training.updates_per_rollout)
        if self.method.needs_old_logprobs:  # by the score
            mini_batches = [self.with_old_logprobs(mini_batch) for mini_batch in mini_batches]
        mini_batches = [self.method.score(mini_batch) for mini_batch in mini_batches]
        scored_samples = [sample for mini_batch in mini_batches for sample in mini_batch]
        mini_batches = [
            computed(mini_batch, self.method, self.parallel.megatron) for mini_batch in mini_batches
        ]
        statistics["computed"] = [sample for mini_batch in mini_batches for sample in mini_batch]
        # Log-probs of the policy that sampled, needed as soon as a second update leaves it. On the
        # only update of a rollout the old policy is the current one, and its log-probs are those of
        # the forward pass itself.
        of_engine = self.method.options.old_logprobs == "engine"
        if len(mini_batches) > 1 and not self.method.needs_old_logprobs and not of_engine:
            mini_batches = [self.with_old_logprobs(mini_batch) for mini_batch in mini_batches]
        if self.reference is not None:
            with self.reference() as reference:
                mini_batches = [
                    self.with_ref_logprobs(mini_batch, reference) for mini_batch in mini_batches
                ]
        for number, mini_batch in enumerate(mini_batches):
            self.measures_mismatch = (
                number == 0 or not of_engine
            )  # later the policy is not the one that sampled
            self.update_once(
                mini_batch, statistics, probe=number == 0 and self._probe_is_due(step), step=step
            )
        self.optimizer.gather_parameters()
        if self.method.options.entropy_target:
            self._adapt_entropy_coef(statistics)
        return scored_samples, statistics

    def update_once(
        self,
        samples: Sequence[TrainingSample],
        statistics: UpdateStatistics,
        probe: bool,
        step: int,
    ) -> None:
        """Take one optimizer step on a scored mini-batch. Collective."""
        if probe:
            parts = self._accumulate_and_probe(samples, statistics)
        else:
            self.optimizer.zero_gradients()
            parts = self.accumulate(samples)
        self._check_logprob_diff(parts, step)
        loss = self._reduce(parts, statistics)
        grad_norm = self.optimizer.gradient_norm()
        statistics["learning_rate"] = self.optimizer.learning_rate
        if self._skip_nonfinite(loss, grad_norm, statistics, step):
            return
        self.optimizer.step()
        statistics["grad_norms"].append(grad_norm)
        statistics["losses"].append(loss)

    def accumulate(self, samples: Sequence[TrainingSample]) -> list[dict[str, float]]:
        """Add the gradient of a scored mini-batch's loss to the buffers; return the statistics of
        each micro-batch on the last pipeline stage. Collective.
        """
        local, micro_batches = self.deal(samples)
        return accumulate_gradients(
            self.policy,
            [samples[i] for i in local],
            micro_batches,
            self._loss,
            separable=self.method.loss_is_separable,
            **self.forward_options,
        )

    def _loss(
        self, batch: MicroBatch, outputs: TokenOutputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        contributions, statistics = self.method.loss(batch, outputs)
        measured = self.measures_mismatch and not batch.is_part
        return contributions, statistics | (mismatch_statistics(batch, outputs) if measured else {})

    def deal(self, samples: Sequence[TrainingSample]) -> tuple[list[int], list[list[int]]]:
        """Deal a mini-batch, equal on all ranks, over the data-parallel ranks: return the indices
        of this rank's samples, and its micro-batches as lists of indices into these.
        """
        lengths = [sequence_length(sample) for sample in samples]
        shares = assign_to_ranks(lengths, self.topology.dp_size)
        micro_batches = split_micro_batches(
            [[lengths[i] for i in share] for share in shares],
            self.topology.dp_rank,
            micro_batch_size=self.training.micro_batch_size,
            max_tokens=self.training.max_tokens_per_micro_batch,
            packing=self.parallel.sequence_packing,
            multiple_of=self.topology.pp_size
            if self.parallel.virtual_pipeline_model_parallel_size > 1
            else 1,
        )
        return shares[self.topology.dp_rank], micro_batches

    def with_old_logprobs(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Fill ``old_logprobs`` of every sample, by the policy as it is. Collective."""
        local, rows = self._logprobs(self.policy, samples)
        of_all = {
            i: row
            for part in all_gather_objects(dict(zip(local, rows, strict=True)))
            for i, row in part.items()
        }
        return [replaced(sample, old_logprobs=of_all[i]) for i, sample in enumerate(samples)]

    def with_ref_logprobs(
        self, samples: Sequence[TrainingSample], reference: Policy
    ) -> list[TrainingSample]:
        """Fill ``ref_logprobs`` of this rank's samples, by the frozen reference, which routes by
        itself. Collective.
        """
        unrouted = [
            replaced(sample, response=replaced(sample.response, experts=None)) for sample in samples
        ]
        local, rows = self._logprobs(reference, unrouted)
        own = dict(zip(local, rows, strict=True))
        return [replaced(sample, ref_logprobs=own.get(i)) for i, sample in enumerate(samples)]

    def _logprobs(
        self, policy: Policy, samples: Sequence[TrainingSample]
    ) -> tuple[list[int], list[np.ndarray]]:
        local, micro_batches = self.deal(samples)
        return local, compute_logprobs(
            policy, [samples[i] for i in local], micro_batches, **self.forward_options
        )

    # -------------------------------------------------------------------------------------- helpers
    def _probe_is_due(self, step: int) -> bool:
        interval = self.training.gradient_probe_interval
        return self.probe is not None and interval > 0 and (step == 1 or step % interval == 0)

    def _accumulate_and_probe(
        self, samples: Sequence[TrainingSample], statistics: UpdateStatistics
    ) -> list[dict[str, float]]:
        """Accumulate the gradient, and measure that of the reasoning tokens against that of the
        confidence tokens.
        """
        assert self.probe is not None
        block, part = self._block_with_fewer_gradients(samples)
        parts, comparison = self.probe(
            partial(self.accumulate, part), partial(self.accumulate, samples)
        )
        statistics["block_gradients"] = (
            comparison if block == "reasoning" else comparison.swapped()
        ).metrics()
        return parts

    def _block_with_fewer_gradients(
        self, samples: Sequence[TrainingSample]
    ) -> tuple[str, list[TrainingSample]]:
        """Return the block in which fewer responses have a gradient, and those, with no weight on
        the other block.
        """
        with_gradient = {
            block: [sample for sample in samples if self.method.has_gradient(sample, index)]
            for block, index in BLOCKS.items()
        }
        block = min(with_gradient, key=lambda name: len(with_gradient[name]))
        return block, [
            replaced(
                sample, weights=np.where(sample.block_ids == BLOCKS[block], sample.weights, 0.0)
            )
            for sample in with_gradient[block]
            if sample.weights is not None
        ]

    def set_entropy_coefs(self, coefs: tuple[float, float]) -> None:
        """Go on with the entropy coefficients of :func:`adapted_entropy_coef`."""
        self.entropy_coefs = coefs
        self.method = self.method.with_entropy_coef(coefs[1])

    def _adapt_entropy_coef(self, statistics: UpdateStatistics) -> None:
        sums = statistics["sums"]
        statistics["coefficients"]["loss/entropy_coef"] = self.entropy_coefs[1]
        if tokens := sums.get("tokens/reasoning"):
            entropy = sums["entropy/reasoning"] / tokens
            self.set_entropy_coefs(
                adapted_entropy_coef(self.entropy_coefs[0], entropy, self.method.options)
            )

    def _check_logprob_diff(self, parts: Sequence[dict[str, float]], step: int) -> None:
        """Compare the largest difference of this mini-batch, on any rank, with the threshold,
        before the policy moves.
        """
        threshold = self.rollout.logprob_diff_alarm
        if not threshold:
            return
        largest = max(
            all_gather_objects(max((part.get(LARGEST, 0.0) for part in parts), default=0.0))
        )
        if largest <= threshold:  # False for NaN
            return
        text = (
            f"step {step}: engine and trainer differ by up to {largest:.3g} in the log-prob of a "
            "sampled token, more than "
            f"rollout.logprob_diff_alarm={threshold:g}; see mismatch.jsonl"
        )
        if self.rollout.logprob_diff_action == "stop":
            raise UserError(f"{text}; nothing was updated in this step, the last checkpoint stands")
        if self.topology.rank == 0:
            logger.warning(text)

    def _reduce(self, parts: Sequence[dict[str, float]], statistics: UpdateStatistics) -> float:
        """Add up all micro-batches of all replicas, each counted once; return the loss of the
        update. Collective.
        """
        loss, sums, maxima = 0.0, statistics["sums"], statistics["maxima"]
        for rank_parts in all_gather_objects(list(parts) if self.topology.reports else []):
            for part in rank_parts:
                for key, value in part.items():
                    if key == "loss":
                        loss += value
                    elif key in REDUCED_BY_MAX:
                        maxima[key] = max(maxima.get(key, 0.0), value)
                    else:
                        sums[key] = sums.get(key, 0.0) + value
        return loss

    def _skip_nonfinite(
        self, loss: float, grad_norm: float, statistics: UpdateStatistics, step: int
    ) -> bool:
        """Return whether loss or gradient is infinite or not a number on any rank: then parameters,
        optimizer and schedule stay as they are. Collective. Raises :class:`UserError` after
        ``training.max_nonfinite_steps`` such updates in a row.
        """
        most = self.training.max_nonfinite_steps
        if not max_over_ranks(int(not (math.isfinite(loss) and math.isfinite(grad_norm)))):
            self.nonfinite_in_a_row = 0
            return False
        self.optimizer.zero_gradients()
        statistics["skipped"] += 1
        self.nonfinite_in_a_row += 1
        values = f"loss {loss}, gradient norm {grad_norm}"
        if self.topology.rank == 0:
            logger.warning(
                "step %d: update skipped (%s), %d in a row", step, values, self.nonfinite_in_a_row
            )
        if self.nonfinite_in_a_row >= most:
            raise UserError(
                f"{most} updates in a row without a finite loss and gradient "
                "(training.max_nonfinite_steps), the last in "
                f"step {step}: {values}; continue from the last checkpoint with --resume auto and "
                "a lower optimizer.lr"
            )
        return True


def split_groups(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """Return ``parts`` mini-batches of whole groups, in the order in which the prompts first occur."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.prompt_id, []).append(sample)
    prompts, size = list(groups), len(groups) // parts
    return [
        [s for p in prompts[n * size : (n + 1) * size] for s in groups[p]] for n in range(parts)
    ]
