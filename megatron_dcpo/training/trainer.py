"""Optimizer steps on samples, whatever the loss is: the samples of a mini-batch are dealt over the
data-parallel ranks, their gradients are accumulated through Megatron's schedule, and an update that
is not finite is skipped.

``training/updater.py`` builds the steps of reinforcement learning on it, ``training/supervised.py``
those of supervised training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dcpo.config import LoopConfig, ParallelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.batching import assign_to_ranks, sequence_length, split_micro_batches
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import Optimizer
from megatron_dcpo.policy.schedule import Loss, accumulate_gradients, compute_logprobs
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.training.dealing import fetch
from megatron_dcpo.training.mismatch import REDUCED_BY_MAX, Apart
from megatron_dcpo.types import ResponseKey, TrainingSample

logger = logging.getLogger(__name__)

MOST_NONFINITE = 3  # updates in a row whose loss or gradient is not finite end the run


@dataclass
class UpdateStatistics:
    """What the updates of one rollout measured.

    ``sums`` add up over tokens and ranks, ``maxima`` do not. ``trained`` are the samples that took
    part in forward and backward, ``skipped`` counts updates that were not finite. ``callback`` has
    what ``training.callback`` measured before each update. ``apart`` are the tokens of responses on
    which engine and trainer differ, where they were looked for.
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    callback: dict[str, list[float]] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)
    learning_rate: float = 0.0
    skipped: int = 0
    trained: list[TrainingSample] = field(default_factory=list)
    apart: dict[ResponseKey, Apart] = field(default_factory=dict)


class Trainer:
    """Takes optimizer steps on the ``policy``. Logits are divided by ``temperature``."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        parallel: ParallelConfig,
        training: LoopConfig,
        temperature: float = 1.0,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.parallel = parallel
        self.training = training
        self.temperature = temperature
        self.topology = policy.topology
        self.collectives = Collectives()
        self.nonfinite_in_a_row = 0

    def backward(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        *,
        separable: bool,
    ) -> list[dict[str, float]]:
        """Add the gradient of a mini-batch's ``loss`` to the buffers; return the statistics of each
        micro-batch on the last pipeline stage. Collective.

        This rank must have the tokens of its share (:meth:`fetch_share`). ``separable``:
        :func:`megatron_dcpo.policy.schedule.accumulate_gradients`.
        """
        indices, micro_batches = self.deal(samples)
        return accumulate_gradients(
            self.policy,
            [samples[index] for index in indices],
            micro_batches,
            loss,
            separable=separable,
            temperature=self.temperature,
            packing=self.parallel.sequence_packing,
        )

    def take_step(
        self, parts: Sequence[dict[str, float]], statistics: UpdateStatistics, step: int
    ) -> None:
        """Update the policy with the gradients in the buffers, if they are finite. ``parts`` are
        the statistics of :meth:`backward`, which are added to ``statistics``. Collective.
        """
        loss = self._reduce(parts, statistics)
        grad_norm = self.optimizer.gradient_norm()
        statistics.learning_rate = self.optimizer.learning_rate
        if self._skip_nonfinite(loss, grad_norm, statistics, step):
            return
        self.optimizer.step()
        statistics.grad_norms.append(grad_norm)
        statistics.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next update needs of the earlier ones."""
        return {"nonfinite_in_a_row": self.nonfinite_in_a_row}

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``. Malformed state is a TypeError, ValueError or LookupError."""
        self.nonfinite_in_a_row = int(saved["nonfinite_in_a_row"])

    def deal(self, samples: Sequence[TrainingSample]) -> tuple[list[int], list[list[int]]]:
        """Deal a mini-batch, equal on all ranks, over the data-parallel ranks: return the indices
        of this rank's samples, and its micro-batches as lists of positions in the list of these.
        """
        lengths = [sequence_length(sample) for sample in samples]
        shares = assign_to_ranks(lengths, self.topology.dp_size)
        virtual = self.parallel.virtual_pipeline_model_parallel_size > 1
        micro_batches = split_micro_batches(
            [[lengths[index] for index in share] for share in shares],
            self.topology.dp_rank,
            micro_batch_size=self.training.micro_batch_size,
            max_tokens=self.training.max_tokens_per_micro_batch,
            packing=self.parallel.sequence_packing,
            multiple_of=self.topology.pp_size if virtual else 1,
        )
        return shares[self.topology.dp_rank], micro_batches

    def fetch_share(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return a mini-batch with the tokens of the samples that this rank computes.
        Collective.
        """
        indices, _ = self.deal(samples)
        return fetch(samples, indices, self.collectives)

    def logprobs(self, policy: Policy, samples: Sequence[TrainingSample]) -> dict[int, np.ndarray]:
        """Return the log-probs float32 [T_i] of this rank's samples, by their index. Collective."""
        indices, micro_batches = self.deal(samples)
        rows = compute_logprobs(
            policy,
            [samples[index] for index in indices],
            micro_batches,
            temperature=self.temperature,
            packing=self.parallel.sequence_packing,
        )
        return dict(zip(indices, rows, strict=True))

    def _reduce(self, parts: Sequence[dict[str, float]], statistics: UpdateStatistics) -> float:
        """Add up all micro-batches of all replicas, each counted once; return the loss of the
        update. Collective.
        """
        loss = 0.0
        sums = statistics.sums
        maxima = statistics.maxima
        reported = list(parts) if self.topology.reports else []
        for parts_of_rank in self.collectives.gather(reported):
            for part in parts_of_rank:
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
        :data:`MOST_NONFINITE` such updates in a row.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not self.collectives.max(int(not is_finite)):
            self.nonfinite_in_a_row = 0
            return False
        self.optimizer.zero_gradients()
        statistics.skipped += 1
        self.nonfinite_in_a_row += 1
        values = f"loss {loss}, gradient norm {grad_norm}"
        if self.topology.rank == 0:
            logger.warning(
                "step %d: update skipped (%s), %d in a row", step, values, self.nonfinite_in_a_row
            )
        if self.nonfinite_in_a_row >= MOST_NONFINITE:
            raise UserError(
                f"{MOST_NONFINITE} updates in a row without a finite loss and gradient, the last "
                f"in step {step}: {values}; continue from the last checkpoint with --resume auto "
                "and a lower optimizer.lr"
            )
        return True
