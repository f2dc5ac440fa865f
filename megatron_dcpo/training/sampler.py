"""Sampling: generate the responses of a step and judge them.

Every rank samples and judges its share of the prompts; all ranks end up with everything.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from megatron_dcpo.config import RolloutConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.function_verifier import check_error_rate
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
    SlotSteps,
)
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import Topology, all_gather_objects, max_over_ranks
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.types import Judgement, Prompt, Response, ResponseKey, TrainingSample

logger = logging.getLogger(__name__)

Draw = Callable[[int, int], list[Prompt]]  # position in the run, count -> the prompts there
Judge = Callable[[Sequence[Response], Mapping[str, Prompt]], list[Judgement]]
Recover = Callable[..., bool]  # see weight_sync.WeightSync.recover
# responses with their judgements, and when the judge began and ended
Judged = tuple[list[tuple[Response, Judgement]], tuple[float, float]]


@dataclass(frozen=True)
class PromptGroup:
    """The prompt at ``position`` of the run, drawn in ``step``, and its ``size`` responses by
    sample index: with their judgements, or with none while they are unfinished.
    """

    prompt: Prompt
    position: int
    step: int
    size: int
    responses: Mapping[int, tuple[Response, Judgement | None]] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[int]:
        """Return the indices of the responses that are not finished and judged."""
        return [
            index
            for index in range(self.size)
            if self.responses.get(index, (None, None))[1] is None
        ]

    def with_responses(self, more: Mapping[int, tuple[Response, Judgement | None]]) -> PromptGroup:
        """Return the group with ``more`` responses."""
        return replace(self, responses={**self.responses, **more})


class Sampler:
    """Generates and judges the responses of each step. ``metrics``: of the last one. ``behind``:
    updates (``ahead.py``).

    ``draw`` gives the prompts at a position of the run; ``executor`` runs ``judge`` beside the
    engine; ``recover`` starts engines anew that failed. ``extra_prompts``: consumed so far beyond
    ``prompts_per_step`` a step, by ``rollout.filter_groups`` and ``max_staleness``; ``carried``:
    groups that the latter left for the next step.
    """

    def __init__(
        self,
        draw: Draw,
        engine: Engine,
        judge: Judge,
        executor: Executor,
        method: Method,
        recover: Recover,
        topology: Topology,
        timers: Timers,
        rollout: RolloutConfig,
        prompts_per_step: int,
        seed: int,
        max_error_rate: float = 1.0,
    ) -> None:
        self.draw, self.engine, self.judge, self.executor = draw, engine, judge, executor
        self.method, self.recover, self.topology, self.timers = method, recover, topology, timers
        self.rollout, self.prompts_per_step, self.seed = rollout, prompts_per_step, seed
        self.max_error_rate = max_error_rate
        self.extra_prompts, self.behind = 0, range(1)
        self.carried: list[PromptGroup] = []
        self.metrics: dict[str, float] = {}

    def sample(self, step: int) -> list[TrainingSample]:
        """Return the judged responses of ``step``, equal on all ranks. Collective.

        With ``rollout.filter_groups`` groups that train neither block are replaced by the prompts
        that follow, in rounds; what is missing after the last one is filled up with such groups, in
        the order in which they were drawn. The next step goes on behind the last group taken. With
        ``rollout.max_staleness`` a round ends when as many groups are finished as are missing; the
        others, and what is finished in excess, are carried to the next step, which draws as many
        fewer. Raises :class:`RolloutAbandoned` on all ranks when a signal cut the rollout short,
        and :class:`VerifierFailed` when a user's verifier did not judge enough; both leave the
        state as it was.
        """
        wanted, slots = self.prompts_per_step, copy.copy(self.engine.slot_steps)
        first = at = (step - 1) * wanted + self.extra_prompts
        pool = list(self.carried)
        trainable: list[PromptGroup] = []
        untrainable: list[PromptGroup] = []
        for _ in range(self.rollout.max_refills + 1):
            count = max(
                0, math.ceil((wanted - len(trainable)) * self.rollout.oversample) - len(pool)
            )
            prompts = self.draw(at, count)
            pool += [
                PromptGroup(prompt, at + n, step, self.rollout.group_size)
                for n, prompt in enumerate(prompts)
            ]
            at += count
            pool = self._generate_and_judge(pool, wanted - len(trainable), step)
            for group in (group for group in pool if not group.unfinished):
                trains = not self.rollout.filter_groups or self.method.trains(_samples(group))
                (trainable if trains else untrainable).append(group)
            pool = [group for group in pool if group.unfinished]
            if len(trainable) >= wanted:
                break
        judged = [
            sample.judgement for group in (*trainable, *untrainable) for sample in _samples(group)
        ]
        check_error_rate(judged, self.max_error_rate, f"step {step}")
        by_position = attrgetter("position")
        trainable.sort(key=by_position)
        chosen = trainable[:wanted]
        if missing := wanted - len(chosen):
            chosen = sorted(
                [*chosen, *sorted(untrainable, key=by_position)[:missing]], key=by_position
            )
            self._warn_of_filling(step, len(trainable), len(untrainable), missing)
        if self.rollout.max_staleness:
            self.carried = sorted([*pool, *trainable[wanted:]], key=by_position)
        elif not missing:
            at = chosen[-1].position + 1  # what was drawn ahead and not taken is drawn again
        self.extra_prompts += at - first - wanted
        samples = [sample for group in chosen for sample in _samples(group)]
        self.metrics = self._slot_metrics(slots)
        if self.rollout.filter_groups:
            self.metrics |= _filter_metrics(trainable, untrainable)
        if self.rollout.most_versions_behind:
            self.metrics |= _staleness_metrics(samples, step)
        if self.rollout.max_staleness:
            self.metrics["rollout/carried"] = sum(len(group.unfinished) for group in self.carried)
        return samples

    def consumed_prompts(self, step: int) -> int:
        """Return how many prompts the run has consumed after ``step``."""
        return step * self.prompts_per_step + self.extra_prompts

    def restore(self, step: int, consumed_prompts: int, carried: list[PromptGroup]) -> None:
        """Continue after ``step``. Raises :class:`UserError` where the options no longer allow what
        is carried.
        """
        self.extra_prompts = consumed_prompts - step * self.prompts_per_step
        if self.extra_prompts < 0:
            raise UserError(
                f"the checkpoint of step {step} contradicts itself: {consumed_prompts} prompts "
                "consumed"
            )
        responses = [response for group in carried for response, _ in group.responses.values()]
        oldest = max((step - response.oldest_version for response in responses), default=0)
        longest = max(
            (len(r.token_ids) for r in responses if r.finish_reason == "abort"), default=0
        )
        if oldest > self.rollout.most_versions_behind:
            raise UserError(
                f"the checkpoint of step {step} carries responses that the next step continues; "
                "set "
                f"rollout.max_staleness={oldest - self.rollout.async_steps} or more to resume"
            )
        if longest >= self.rollout.max_response_length:
            raise UserError(
                f"the checkpoint of step {step} carries an unfinished response of {longest} "
                "tokens; set "
                "rollout.max_response_length above that to resume"
            )
        self.carried = carried

    # ------------------------------------------------------------------------------------ one round
    def _generate_and_judge(
        self, groups: Sequence[PromptGroup], wanted: int, step: int
    ) -> list[PromptGroup]:
        """Return the groups with what there is of each when ``wanted`` are finished, or all of
        them. Collective.
        """
        responses: dict[ResponseKey, Response] = {}
        pending: list[Future[Judged]] = []
        try:
            with self.timers("rollout"):
                self._generate(groups, wanted, step, responses, pending)
            if max_over_ranks(signals.stop_requested() or 0):
                raise RolloutAbandoned
            with self.timers("judge"):
                return self._gather_judged(groups, responses, pending)
        finally:
            for future in pending:  # where the run ends here: nobody waits for them
                future.cancel()

    def _generate(
        self,
        groups: Sequence[PromptGroup],
        wanted: int,
        step: int,
        responses: dict[ResponseKey, Response],
        pending: list[Future[Judged]],
    ) -> None:
        """Sample what is unfinished of this rank's share of the groups, and hand each response to
        the judge as soon as it is finished: threads that wait for worker processes judge it while
        the rest is generated.

        With ``rollout.max_staleness`` each engine ends when its part of the ``wanted`` groups is
        finished, and what may not get any older. Collective. Raises :class:`UserError` when a
        response was sampled by other weights than the policy's, or by too old ones, and what a
        judge raises that cannot work at all.
        """
        config, versions = self.rollout, [step - 1 - behind for behind in self.behind]
        size, engine, engines = engine_of_rank(self.engine, self.topology)
        mine = groups[engine::engines]
        by_id = {group.prompt.prompt_id: group.prompt for group in mine}
        samples = [(group.prompt, index) for group in mine for index in group.unfinished]
        share = {
            (prompt.prompt_id, index)
            for prompt, index in samples[self.topology.rank % size :: size]
        }
        partial = None
        if config.max_staleness:
            quota, oldest = len(range(engine, wanted, engines)), step - config.max_staleness
            needs = [
                (group.prompt.prompt_id, len(group.unfinished), group.step <= oldest)
                for group in mine
            ]
            partial = PartialRollout(
                lambda: batch_is_complete(needs, quota, responses), _unfinished(mine)
            )

        def judge(finished: Sequence[Response]) -> None:
            _check_versions(finished, versions, step - 1 - config.most_versions_behind)
            own = [r for r in finished if r.key in share and r.finish_reason != "abort"]
            if own:
                pending.append(self.executor.submit(self._judge, own, by_id))
            if pending and pending[0].done():
                pending[0].result()  # a judge that cannot work at all ends the run now

        sampling = SamplingConfig(
            n=config.group_size,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_response_length,
            seed=self.seed,
        )
        self.generate(samples, sampling, step, step - 1, responses, judge, partial)

    def generate(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
        version: int,
        responses: dict[ResponseKey, Response],
        finished: Callable[[Sequence[Response]], None],
        partial: PartialRollout | None = None,
    ) -> None:
        """Sample every one of ``samples`` by this rank's engine into ``responses``, each handed to
        ``finished`` as well, unless a signal cuts it short.

        An engine that fails is started anew, gets the weights ``version`` again, and generates what
        is missing: the random numbers are counted, so it is the same. Collective.
        """
        options = {"partial": partial} if partial else {}
        for restarts in itertools.count():
            failure = ""
            missing = [
                (prompt, i) for prompt, i in samples if (prompt.prompt_id, i) not in responses
            ]
            try:
                if missing and not (partial and partial.should_stop()):
                    with closing(self.engine.stream(missing, sampling, step, **options)) as stream:
                        for together in stream:
                            responses.update((response.key, response) for response in together)
                            finished(together)
            except RolloutAbandoned:
                pass
            except EngineError as error:
                failure = str(error)
            if not self.recover(failure, version=version, restarts=restarts):
                return
            common = self._common_to_all_ranks(responses)
            for key in responses.keys() - common:
                del responses[key]

    def _common_to_all_ranks(self, responses: Mapping[ResponseKey, Response]) -> set[ResponseKey]:
        """Return what all ranks of a failed engine have, with the same tokens, of the ``responses``
        that it handed over before: its ranks have to ask for the same again. Collective where an
        engine has several ranks.
        """
        size = self.engine.tensor_model_parallel_size
        if size == 1:
            return set(responses)
        own = {
            key: hashlib.sha256(response.token_ids.tobytes()).digest()
            for key, response in responses.items()
        }
        first = self.topology.rank // size * size
        mates = all_gather_objects(own)[first : first + size]
        return {
            key for key, digest in own.items() if all(mate.get(key) == digest for mate in mates)
        }

    def _judge(self, responses: Sequence[Response], by_id: Mapping[str, Prompt]) -> Judged:
        began = time.perf_counter()
        judgements = self.judge(responses, by_id)
        return list(zip(responses, judgements, strict=True)), (began, time.perf_counter())

    def _gather_judged(
        self,
        groups: Sequence[PromptGroup],
        responses: Mapping[ResponseKey, Response],
        pending: Sequence[Future[Judged]],
    ) -> list[PromptGroup]:
        """Wait for the judge and gather all ranks' responses (collective): equal on every rank.

        ``time/judge`` is what is left to wait for here, ``time/judge_busy`` for how long there was
        something in the judge.
        """
        judged = [future.result() for future in pending]
        self.timers.add("judge_busy", union_length(interval for _, interval in judged))
        own: list[tuple[Response, Judgement | None]] = [
            pair for pairs, _ in judged for pair in pairs if responses.get(pair[0].key) is pair[0]
        ]
        own += [
            (response, None) for response in responses.values() if response.finish_reason == "abort"
        ]
        by_prompt: dict[str, dict[int, tuple[Response, Judgement | None]]] = defaultdict(dict)
        for part in all_gather_objects(own):
            for pair in part:
                by_prompt[pair[0].prompt_id][pair[0].sample_index] = pair
        return [group.with_responses(by_prompt[group.prompt.prompt_id]) for group in groups]

    # -------------------------------------------------------------------------------------- metrics
    def _slot_metrics(self, before: SlotSteps | None) -> dict[str, float]:
        """Return the share of the engines' decoding positions since ``before`` that gave a token,
        and how often a full cache cost a response its place; where they know. Collective.
        """
        now, own = self.engine.slot_steps, (0, 0, 0)
        if now is not None and before is not None:
            own = (
                now.used - before.used,
                now.total - before.total,
                now.preemptions - before.preemptions,
            )
        used, total, preemptions = np.sum(all_gather_objects(own), axis=0).tolist()
        return (
            {"rollout/utilization": used / total, "rollout/preemptions": preemptions}
            if total
            else {}
        )

    def _warn_of_filling(self, step: int, trainable: int, untrainable: int, missing: int) -> None:
        if self.topology.rank == 0:
            logger.warning(
                "step %d: %d of %d groups drawn train the policy (rollout.max_refills=%d); %d "
                "others fill up the batch",
                *(step, trainable, trainable + untrainable, self.rollout.max_refills, missing),
            )


def engine_of_rank(engine: Engine, topology: Topology) -> tuple[int, int, int]:
    """Return the ranks of an engine, which are neighbors and sample the same; which engine is this
    rank's; how many there are.
    """
    size = engine.tensor_model_parallel_size
    return size, topology.rank // size, topology.world_size // size


def batch_is_complete(
    needs: Sequence[tuple[str, int, bool]], quota: int, responses: Mapping[ResponseKey, Response]
) -> bool:
    """Return whether ``quota`` groups are finished, and all that may not wait. ``needs``: prompt
    id, how many responses it lacks, whether it may not wait.
    """
    finished = Counter(prompt_id for prompt_id, _ in responses)
    left = [(lack - finished[prompt_id], urgent) for prompt_id, lack, urgent in needs]
    return sum(not n for n, _ in left) >= quota and not any(n and urgent for n, urgent in left)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals``."""
    total, end = 0.0, -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def _samples(group: PromptGroup) -> list[TrainingSample]:
    return [
        TrainingSample(group.prompt, response, judgement)
        for _, (response, judgement) in sorted(group.responses.items())
        if judgement is not None
    ]


def _unfinished(groups: Sequence[PromptGroup]) -> dict[ResponseKey, Response]:
    """Return what an earlier step left unfinished of ``groups``."""
    pairs = (pair for group in groups for pair in group.responses.values())
    return {response.key: response for response, judgement in pairs if judgement is None}


def _check_versions(responses: Sequence[Response], versions: Sequence[int], oldest: int) -> None:
    for response in responses:
        sampled_by = (
            response.oldest_version
            if response.weights_version in versions
            else response.weights_version
        )
        if not (
            response.weights_version in versions
            and oldest <= sampled_by <= response.weights_version
        ):
            raise UserError(
                f"response to {response.prompt_id} was sampled by weights version {sampled_by}, "
                f"the policy is at {versions[0]}: the engine was not synchronized"
            )


def _filter_metrics(
    trainable: Sequence[PromptGroup], untrainable: Sequence[PromptGroup]
) -> dict[str, float]:
    correct = [
        sample.judgement.correct
        for group in (*trainable, *untrainable)
        for sample in _samples(group)
    ]
    return {
        "rollout/prompts_drawn": len(trainable) + len(untrainable),
        "rollout/groups_filtered": len(untrainable),
        "rollout/accuracy": float(np.mean(correct)),
    }


def _staleness_metrics(samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
    staleness = [step - 1 - sample.response.oldest_version for sample in samples]
    return {
        "rollout/staleness_mean": float(np.mean(staleness)),
        "rollout/staleness_max": max(staleness),
    }
