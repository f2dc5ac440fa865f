"""Updating: score the rollout, fix the global denominators, run the mini-batches through Megatron's
schedule.

A response is one :class:`TrainingSample` all the way: ``with_old_logprobs`` and ``Method.score``
fill its fields, a micro-batch holds its tokens, the loss sums their contributions (docs/one_step.md
shows one with its numbers). Every rank scores the whole mini-batch, of which it needs judgements
and lengths only, so that groups are never cut by the split over data-parallel ranks and the
denominators are global. Tokens are on the ranks that compute them (training/dealing.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.method import Method, mean_logprob, rows_of_groups
from megatron_dcpo.objectives.shaping import adapted_entropy_coef
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.plugins import check_signature, load_object, raised
from megatron_dcpo.training.dealing import samples_to_train
from megatron_dcpo.training.mismatch import LARGEST, Apart, mismatch_statistics, tokens_apart
from megatron_dcpo.training.trainer import Trainer, UpdateStatistics
from megatron_dcpo.types import MicroBatch, ResponseKey, TokenOutputs, TrainingSample, replaced

logger = logging.getLogger(__name__)

Reference = Callable[[], AbstractContextManager[Policy]]
# trainer, samples -> the log-probs float32 [T_i] of this rank's samples by their index; collective
Reading = Callable[[Trainer, Sequence[TrainingSample]], dict[int, np.ndarray]]
Teacher = Callable[[], AbstractContextManager[Reading]]
# updater, scored mini-batch, step -> metrics
Callback = Callable[["Updater", Sequence[TrainingSample], int], Mapping[str, float]]


def load_callback(path: str) -> Callback | None:
    """Return the function that ``training.callback`` names, if any. Raises :class:`UserError`."""
    if not path:
        return None
    function: Callback = load_object(path, "training.callback")
    check_signature(function, path, "training.callback", "updater", "samples", "step")
    return function


class Updater:
    """Has the ``trainer`` take optimizer steps on samples that the ``method`` scored.

    ``reference`` opens the starting policy, which a KL loss needs, ``teacher`` the policy that is
    distilled. ``callback`` is called before every optimizer step with the updater, the scored
    mini-batch and the number of the step; it may use the gradient buffers, which are cleared after
    it, and its numbers are metrics.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: Method,
        reference: Reference | None,
        teacher: Teacher | None,
        callback: Callback | None,
        config: Config,
    ) -> None:
        self.trainer = trainer
        self.method = method
        self.reference = reference
        self.teacher = teacher
        self.callback = callback
        self.rollout = config.rollout
        self.updates_per_rollout = config.training.updates_per_rollout
        self.callback_name = config.training.callback
        self.params_dtype = config.model.params_dtype
        self.measures_mismatch = True
        # the responses of this step that are shown, and the tokens apart of those on this rank
        self.shown: frozenset[ResponseKey] = frozenset()
        self.apart: dict[ResponseKey, Apart] = {}
        coef = method.options.entropy_coef_reasoning
        # with entropy_target: the next coefficient, and the one that acts now
        self.entropy_coefs = (coef, coef)

    def update(
        self,
        samples: Sequence[TrainingSample],
        scores: np.ndarray | None,
        step: int,
        shown: int = 0,
    ) -> tuple[list[TrainingSample], UpdateStatistics]:
        """Take ``updates_per_rollout`` optimizer steps on the rollout's mini-batches; return the
        scored samples. Of the first ``shown`` of them the statistics have the tokens on which
        engine and trainer differ. Collective.

        ``scores`` are the samples' :meth:`Method.group_scores`, float64 [5, N]; None if the method
        reads log-probs of the policy that sampled. An update whose loss or gradient is not finite
        is skipped; raises :class:`UserError` after too many in a row.
        """
        statistics = UpdateStatistics()
        scored: list[list[TrainingSample]] = []
        trained: list[list[TrainingSample]] = []
        for rows in self._mini_batches(samples, scores):
            mini_batch = [samples[row] for row in rows]
            if scores is None:
                mini_batch = self._scored_by_logprobs(mini_batch)
                chosen = mini_batch
            else:
                mini_batch = self.method.score(mini_batch, scores[:, rows])
                megatron = self.trainer.parallel.megatron
                chosen = samples_to_train(mini_batch, self.method, megatron)
                chosen = self.trainer.fetch_share(chosen)
            scored.append(mini_batch)
            trained.append(chosen)
        statistics.trained = [sample for mini_batch in trained for sample in mini_batch]
        trained = self._with_logprobs(trained)
        in_order = [sample for mini_batch in scored for sample in mini_batch]
        self.shown = frozenset(sample.response.key for sample in in_order[:shown])
        self.apart = {}
        for number, mini_batch in enumerate(trained):
            is_first = number == 0
            # after the first update the policy is no longer the one that sampled
            self.measures_mismatch = is_first or not self._ratio_to_engine
            self.update_once(mini_batch, statistics, step)
        if self.shown:
            for of_rank in self.trainer.collectives.gather(self.apart):
                statistics.apart |= of_rank
        self.trainer.optimizer.gather_parameters()
        if self.method.options.entropy_target:
            self._adapt_entropy_coef(statistics)
        return in_order, statistics

    def update_once(
        self,
        samples: Sequence[TrainingSample],
        statistics: UpdateStatistics,
        step: int,
    ) -> None:
        """Take one optimizer step on a scored mini-batch. Collective."""
        self._call_back(samples, statistics, step)
        self.trainer.optimizer.zero_gradients()
        parts = self.accumulate(samples)
        self._check_logprob_diff(parts, step)
        self.trainer.take_step(parts, statistics, step)

    def accumulate(self, samples: Sequence[TrainingSample]) -> list[dict[str, float]]:
        """Add the gradient of a scored mini-batch's loss to the buffers; return the statistics of
        each micro-batch on the last pipeline stage. Collective.

        This rank must have the tokens of its share (:meth:`Trainer.fetch_share`).
        """
        return self.trainer.backward(samples, self._loss, separable=self.method.loss_is_separable)

    def _loss(
        self, batch: MicroBatch, outputs: TokenOutputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        contributions, statistics = self.method.loss(batch, outputs)
        if self.measures_mismatch and not batch.is_part:
            statistics = statistics | mismatch_statistics(batch, outputs)
            if self.shown:
                self.apart |= tokens_apart(batch, outputs, self.params_dtype, self.shown)
        return contributions, statistics

    def with_old_logprobs(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Fill ``old_logprobs`` of this rank's samples, by the policy as it is. Collective."""
        rows = self.trainer.logprobs(self.trainer.policy, samples)
        return filled(samples, "old_logprobs", rows)

    def _with_mean_logprobs(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Fill ``mean_old_logprob`` of every sample, on all ranks. Collective."""
        here = {
            index: mean_logprob(sample.response, sample.old_logprobs)
            for index, sample in enumerate(samples)
            if sample.old_logprobs is not None
        }
        means: dict[int, float] = {}
        for means_of_rank in self.trainer.collectives.gather(here):
            means |= means_of_rank
        return [
            replaced(sample, mean_old_logprob=means[index]) for index, sample in enumerate(samples)
        ]

    # ------------------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return what the next update needs of the earlier ones."""
        return {
            **self.trainer.state_dict(),
            "entropy_coefs": self.entropy_coefs,
        }

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``. Malformed state is a TypeError, ValueError or LookupError."""
        self.trainer.load_state_dict(saved, step)
        if self.method.options.entropy_target and "entropy_coefs" in saved:
            coef, acting = saved["entropy_coefs"]
            self._set_entropy_coefs((float(coef), float(acting)))

    # -------------------------------------------------------------------------------------- helpers
    @property
    def _ratio_to_engine(self) -> bool:
        """Return whether the policy's ratio is to the engine's log-probs, not to the trainer's."""
        return self.method.options.old_logprobs == "engine"

    def _mini_batches(
        self, samples: Sequence[TrainingSample], scores: np.ndarray | None
    ) -> list[list[int]]:
        """Return the rows of each mini-batch. If groups are filtered by the reasoning's signal, the
        informative ones are divided evenly.
        """

        def is_full(rows: Sequence[int]) -> bool:
            if self.rollout.filter_groups != "reasoning":
                return True
            group = [samples[row] for row in rows]
            return self.method.is_informative(group, None if scores is None else scores[:, rows])

        return split_groups(samples, self.updates_per_rollout, is_full)

    def _scored_by_logprobs(self, mini_batch: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return a mini-batch with its log-probs under the policy that sampled, and the scores that
        read them. Collective.
        """
        mini_batch = self.trainer.fetch_share(mini_batch)
        mini_batch = self.with_old_logprobs(mini_batch)
        mini_batch = self._with_mean_logprobs(mini_batch)
        return self.method.score(mini_batch)

    def _with_logprobs(
        self, mini_batches: list[list[TrainingSample]]
    ) -> list[list[TrainingSample]]:
        """Fill the log-probs that the loss reads, before the policy moves. Collective.

        Those of the policy that sampled are needed as soon as a second update leaves it. On the
        only update of a rollout the old policy is the current one, and the forward pass itself
        gives its log-probs.
        """
        several = len(mini_batches) > 1
        if several and not self.method.needs_old_logprobs and not self._ratio_to_engine:
            mini_batches = [self.with_old_logprobs(mini_batch) for mini_batch in mini_batches]
        if self.reference is not None:
            with self.reference() as reference:
                mini_batches = [
                    filled(each, "ref_logprobs", logprobs_of(reference, self.trainer, each))
                    for each in mini_batches
                ]
        if self.teacher is not None:
            with self.teacher() as reading:
                mini_batches = [
                    filled(each, "teacher_logprobs", reading(self.trainer, each))
                    for each in mini_batches
                ]
        return mini_batches

    def _call_back(
        self, samples: Sequence[TrainingSample], statistics: UpdateStatistics, step: int
    ) -> None:
        """Have the callback measure what it likes before an optimizer step. Raises
        :class:`UserError` if it fails.
        """
        if self.callback is None:
            return
        try:
            measured = self.callback(self, samples, step)
            for name, value in measured.items():
                statistics.callback.setdefault(name, []).append(float(value))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"training.callback={self.callback_name} failed in step {step} with {raised(error)}"
            ) from error

    def _set_entropy_coefs(self, coefs: tuple[float, float]) -> None:
        """Continue with the entropy coefficients of :func:`adapted_entropy_coef`."""
        self.entropy_coefs = coefs
        self.method = self.method.with_entropy_coef(coefs[1])

    def _adapt_entropy_coef(self, statistics: UpdateStatistics) -> None:
        coef, acting = self.entropy_coefs
        statistics.coefficients["loss/entropy_coef"] = acting
        tokens = statistics.sums.get("tokens/reasoning")
        if tokens:
            entropy = statistics.sums["entropy/reasoning"] / tokens
            self._set_entropy_coefs(adapted_entropy_coef(coef, entropy, self.method.options))

    def _check_logprob_diff(self, parts: Sequence[dict[str, float]], step: int) -> None:
        """Compare the largest difference of this mini-batch, on any rank, with the threshold."""
        threshold = self.rollout.logprob_diff_alarm
        if not threshold:
            return
        here = max((part.get(LARGEST, 0.0) for part in parts), default=0.0)
        largest = max(self.trainer.collectives.gather(here))
        if largest <= threshold:  # False for NaN
            return
        if self.trainer.topology.rank == 0:
            logger.warning(
                "step %d: engine and trainer differ by up to %.3g in the log-prob of a sampled "
                "token, more than rollout.logprob_diff_alarm=%g; see mismatch.jsonl",
                step,
                largest,
                threshold,
            )


def filled(
    samples: Sequence[TrainingSample], column: str, values: Mapping[int, object]
) -> list[TrainingSample]:
    """Return the samples with a column filled by their index, with None where there is no value."""
    return [replaced(sample, **{column: values.get(row)}) for row, sample in enumerate(samples)]


def logprobs_of(
    frozen: Policy, trainer: Trainer, samples: Sequence[TrainingSample]
) -> dict[int, np.ndarray]:
    """Return the log-probs of this rank's samples by another policy than the trainer's, which
    chooses experts by itself. Collective.
    """
    unrouted = [
        replaced(sample, response=replaced(sample.response, experts=None)) for sample in samples
    ]
    return trainer.logprobs(frozen, unrouted)


def split_groups(
    samples: Sequence[TrainingSample], parts: int, is_full: Callable[[Sequence[int]], bool]
) -> list[list[int]]:
    """Return the rows of ``parts`` mini-batches of whole groups, in the order in which the prompts
    first occur.

    The groups whose rows ``is_full`` says train every block, and the other ones, are each divided
    as evenly as they can be, so that no mini-batch lacks either kind.
    """
    in_order = list(rows_of_groups(samples).values())
    full: list[int] = []
    others: list[int] = []
    for number, rows in enumerate(in_order):
        (full if is_full(rows) else others).append(number)
    mini_batches = []
    for full_part, other_part in zip(
        np.array_split(full, parts), np.array_split(others, parts), strict=True
    ):
        groups = sorted([*full_part.astype(int), *other_part.astype(int)])
        mini_batches.append([row for number in groups for row in in_order[number]])
    return mini_batches
