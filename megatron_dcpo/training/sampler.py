"""Sampling: generate the responses of a step and judge them.

``sample(state, step, version) -> batch, state``. Every rank samples and judges its share of the
prompts. All ranks get all judgements; the tokens stay where they were sampled
(``training/dealing.py``).
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.judge import judging_threads
from megatron_dcpo.judging.verdicts import check_unjudged
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.rollout.engine import PartialRollout, SamplingConfig, SlotSteps
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.dealing import Summary
from megatron_dcpo.training.generation import Generation
from megatron_dcpo.types import Judgement, Prompt, Response, ResponseKey, TrainingSample

logger = logging.getLogger(__name__)

SMALLEST_GROUP = 2  # responses; of fewer none has an advantage
Draw = Callable[[int, int], list[Prompt]]  # position in the run, count -> the prompts there
Judge = Callable[[Sequence[Response], Mapping[str, Prompt]], Sequence[Judgement | None]]
JudgedResponse = tuple[Response, Judgement | None]  # None: it is not finished


@dataclass(frozen=True)
class PromptGroup:
    """A prompt and its ``size`` responses by sample index, each with its judgement, or with None
    while it is unfinished.

    ``position`` is the number of the prompt in the run, ``step`` the step that drew it. ``scores``
    are the :meth:`Method.group_scores` of a finished group, float64 [5, G]; None while it is
    unfinished, and if the method reads log-probs that only the trainer has. ``failed`` are the
    indices of responses that are left out, because the session of an agent failed or no judgement
    could be made.
    """

    prompt: Prompt
    position: int
    step: int
    size: int
    responses: Mapping[int, JudgedResponse] = field(default_factory=dict)
    scores: np.ndarray | None = None
    failed: frozenset[int] = frozenset()

    @property
    def unfinished(self) -> list[int]:
        """Return the indices of the responses that are not finished and judged."""
        finished = {
            index for index, (_, judgement) in self.responses.items() if judgement is not None
        }
        gone = finished | self.failed
        return [index for index in range(self.size) if index not in gone]

    @property
    def is_lost(self) -> bool:
        """Return whether too many responses are left out to compare the others with each other."""
        return self.size - len(self.failed) < SMALLEST_GROUP

    @property
    def begun(self) -> list[Response]:
        """Return the responses that an earlier step began and did not finish."""
        return [response for response, judgement in self.responses.values() if judgement is None]

    @property
    def samples(self) -> list[TrainingSample]:
        """Return the judged responses, in the order of their indices."""
        return [
            TrainingSample(prompt=self.prompt, response=response, judgement=judgement)
            for _, (response, judgement) in sorted(self.responses.items())
            if judgement is not None
        ]

    def with_responses(self, more: Mapping[int, JudgedResponse]) -> PromptGroup:
        """Return the group with ``more`` responses."""
        return replace(self, responses={**self.responses, **more})


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run: informative groups that were trained on
    (:meth:`Method.is_informative`), and responses that were sampled and judged, whether a step took
    them or not.
    """

    informative_groups: int = 0
    responses: int = 0


@dataclass(frozen=True)
class SamplerState:
    """What sampling passes from one step to the next; equal on all ranks.

    ``position`` is the number in the run of the next prompt to draw, ``carried`` the groups that a
    rollout has left for the next step (``Config.carries_over``), with their tokens. ``totals``
    count what the run has sampled and trained on.
    """

    position: int = 0
    carried: tuple[PromptGroup, ...] = ()
    totals: Totals = Totals()


@dataclass(frozen=True)
class Batch:
    """The judged responses of a step: equal on all ranks, but for tokens that other ranks hold.

    ``scores`` are the :meth:`Method.group_scores` of the samples, float64 [5, N]; None if the
    method reads log-probs that only the trainer has.
    """

    samples: list[TrainingSample]
    scores: np.ndarray | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """What a step has drawn so far.

    ``wanted`` and ``other`` groups are finished: those that the step draws for, and those that came
    with them. ``waiting`` groups go into the next round or, when there is none, to the next step.
    ``position`` is the number of the next prompt to draw. ``lost`` are groups of which too many
    responses are left out.
    """

    wanted: list[PromptGroup]
    other: list[PromptGroup]
    waiting: list[PromptGroup]
    position: int
    lost: list[PromptGroup] = field(default_factory=list)

    @property
    def finished(self) -> list[PromptGroup]:
        """Return all groups whose responses are judged."""
        return [*self.wanted, *self.other]


class Sampler:
    """Generates and judges the responses of a step.

    ``draw`` gives the prompts at a position of the run, ``judge`` runs alongside the engine, in
    threads that wait for worker processes. ``method`` says which groups train the policy.
    """

    def __init__(
        self,
        draw: Draw,
        generation: Generation,
        judge: Judge,
        method: Method,
        timers: Timers,
        config: Config,
    ) -> None:
        self.draw = draw
        self.generation = generation
        self.engine = generation.engine
        self.collectives = generation.collectives
        self.judge = judge
        self.method = method
        self.timers = timers
        self.rollout = config.rollout
        self.prompts_per_step = config.data.prompts_per_step
        self.max_error_rate = config.judging.max_error_rate
        self.rollouts_behind = config.rollouts_behind
        self.carries_over = config.carries_over
        self.updates_per_rollout = config.training.updates_per_rollout
        self.sampling = SamplingConfig(
            n=config.rollout.group_size,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_tokens=config.rollout.max_response_length,
            seed=config.seed,
        )
        self.closed = threading.Event()

    def sample(self, state: SamplerState, step: int, versions: range) -> tuple[Batch, SamplerState]:
        """Return the judged responses of ``step``, and the state for the next one. Collective.

        The last token of each is sampled by one of the weights ``versions``. With
        ``rollout.filter_groups``, prompts are drawn in rounds until ``prompts_per_step`` groups are
        of the kind that the step wants, and the next step begins after the last of these. With
        ``reasoning`` these groups are informative, and the batch has the other groups drawn as
        well, which train the confidence alone; with ``any`` it has them only to fill up what is
        missing after the last round. If responses are carried over (``Config.carries_over``), a
        round ends when as many groups are finished as are missing; the others, and wanted groups in
        excess, are carried to the next step, which draws as many fewer.

        Raises :class:`RolloutAbandoned` on all ranks when a signal cut the rollout short, and
        :class:`TooManyUnjudged` when too many responses have no judgement.
        """
        slots_before = copy.copy(self.engine.slot_steps)
        drawn = self._draw_rounds(state, step, versions)
        batch = self._choose(drawn, step)
        samples = [sample for group in batch for sample in group.samples]
        counts = Totals(
            informative_groups=self._informative(drawn, batch),
            responses=_judged([*drawn.finished, *drawn.waiting]) - _judged(state.carried),
        )
        state = self._next_state(drawn, state.totals, counts)
        metrics = self._slot_metrics(slots_before) | _count_metrics(counts, state.totals)
        metrics |= _unjudged_metrics(drawn)
        if self.rollout.runs_agents:
            metrics |= _session_metrics(drawn)
        if self.rollout.filter_groups != "none":
            metrics |= _filter_metrics(drawn, batch)
        if self.rollouts_behind:
            metrics |= _staleness_metrics(samples, step, self.updates_per_rollout)
        if self.carries_over:
            metrics["rollout/carried"] = sum(len(group.unfinished) for group in state.carried)
        return Batch(samples=samples, scores=_scores_of(batch), metrics=metrics), state

    def close(self) -> None:
        """End a rollout in another thread when its next response comes: nobody waits for it."""
        self.closed.set()

    # ------------------------------------------------------------------------------ which groups
    def _draw_rounds(self, state: SamplerState, step: int, versions: range) -> Drawn:
        """Draw prompts until there are enough groups of the wanted kind, or for as many rounds as
        allowed.
        """
        drawn = Drawn(wanted=[], other=[], waiting=list(state.carried), position=state.position)
        for _ in range(self.rollout.max_refills + 1):
            missing = self.prompts_per_step - len(drawn.wanted)
            count = math.ceil(missing * self.rollout.oversample) - len(drawn.waiting)
            count = max(0, count)
            groups = [
                PromptGroup(
                    prompt=prompt, position=position, step=step, size=self.rollout.group_size
                )
                for position, prompt in enumerate(
                    self.draw(drawn.position, count), start=drawn.position
                )
            ]
            groups = self._generate_and_judge([*drawn.waiting, *groups], missing, step, versions)
            drawn.lost.extend(group for group in groups if group.is_lost)
            groups = [group for group in groups if not group.is_lost]
            finished = [self._scored(group) for group in groups if not group.unfinished]
            for group in finished:
                is_wanted = self._is_wanted(group)
                (drawn.wanted if is_wanted else drawn.other).append(group)
            drawn = replace(
                drawn,
                waiting=[group for group in groups if group.unfinished],
                position=drawn.position + count,
            )
            unjudged, responses = _unjudged(drawn)
            check_unjudged(unjudged, responses, self.max_error_rate, f"step {step}")
            if len(drawn.wanted) >= self.prompts_per_step:
                break
        return drawn

    def _scored(self, group: PromptGroup) -> PromptGroup:
        """Return a finished group with its scores: nothing scores it again."""
        if self.method.needs_old_logprobs or group.scores is not None:
            return group
        return replace(group, scores=self.method.group_scores(group.samples))

    def _is_wanted(self, group: PromptGroup) -> bool:
        """Return whether a finished group is of the kind that the step draws for."""
        if self.rollout.filter_groups == "reasoning":
            return self.method.is_informative(group.samples, group.scores)
        if self.rollout.filter_groups == "any":
            assert group.scores is not None, "config/rules.py: a method that scores without them"
            return self.method.trains(group.samples, group.scores)
        return True

    def _informative(self, drawn: Drawn, batch: Sequence[PromptGroup]) -> int:
        """Return how many groups of the batch are informative."""
        if self.rollout.filter_groups == "reasoning":  # known since they were drawn
            return min(len(drawn.wanted), self.prompts_per_step)
        return sum(self.method.is_informative(group.samples, group.scores) for group in batch)

    def _choose(self, drawn: Drawn, step: int) -> list[PromptGroup]:
        """Return the groups of the batch in the order of the run: the first of the wanted kind, and
        those of the others that go with them.
        """
        wanted = sorted(drawn.wanted, key=_position)[: self.prompts_per_step]
        missing = self.prompts_per_step - len(wanted)
        if missing and self.collectives.rank == 0:
            logger.warning(
                "step %d: of %d groups drawn only %d have a signal (rollout.filter_groups=%s, "
                "rollout.max_refills=%d), %d fewer than data.prompts_per_step",
                step,
                len(drawn.finished),
                len(wanted),
                self.rollout.filter_groups,
                self.rollout.max_refills,
                missing,
            )
        others = sorted(drawn.other, key=_position)
        if self.rollout.filter_groups != "reasoning":
            others = others[:missing]
        elif not missing and not self.carries_over:
            # those after the last wanted group are drawn again by the next step
            last = wanted[-1].position
            others = [group for group in others if group.position < last]
        return sorted([*wanted, *others], key=_position)

    def _next_state(self, drawn: Drawn, before: Totals, counts: Totals) -> SamplerState:
        """Return the next step's starting state."""
        totals = Totals(
            informative_groups=before.informative_groups + counts.informative_groups,
            responses=before.responses + counts.responses,
        )
        in_order = sorted(drawn.wanted, key=_position)
        if self.carries_over:
            excess = in_order[self.prompts_per_step :]
            carried = sorted([*drawn.waiting, *excess], key=_position)
            return SamplerState(drawn.position, tuple(carried), totals)
        if len(in_order) < self.prompts_per_step:
            return SamplerState(drawn.position, totals=totals)
        # Prompts that were drawn in excess and not taken are drawn again.
        last = in_order[self.prompts_per_step - 1]
        return SamplerState(last.position + 1, totals=totals)

    # ------------------------------------------------------------------------------ one round
    def _generate_and_judge(
        self, groups: Sequence[PromptGroup], wanted: int, step: int, versions: range
    ) -> list[PromptGroup]:
        """Return the groups with the responses collected once ``wanted`` groups are complete, or
        all of them. Collective.
        """
        share = self.generation.share
        ours = groups[share.engine :: share.engines]
        prompts = {group.prompt.prompt_id: group.prompt for group in ours}
        with judging_threads() as threads:
            judging: list[Future[Judged]] = []
            responses: dict[ResponseKey, Response] = {}
            with self.timers("rollout"):
                for mine in self._finished_responses(ours, wanted, step, versions, responses):
                    judging.append(threads.submit(_judged_and_timed, self.judge, mine, prompts))
                    if judging[0].done():
                        judging[0].result()  # a judge that cannot work at all ends the run now
            if self.collectives.max(signals.stop_requested() or 0):
                raise RolloutAbandoned
            with self.timers("judge"):
                judged = [future.result() for future in judging]
                busy = union_length([(one.began, one.ended) for one in judged])
                self.timers.add("judge_busy", busy)
                return self._gather(groups, judged, responses)

    def _finished_responses(
        self,
        groups: Sequence[PromptGroup],
        wanted: int,
        step: int,
        versions: range,
        responses: dict[ResponseKey, Response],
    ) -> Iterator[list[Response]]:
        """Sample what is unfinished of the ``groups`` of this rank's engine; yield the finished
        responses that this rank judges, and collect all that the engine returns in ``responses``.

        If responses are carried over, an engine ends when its part of the ``wanted`` groups is
        finished, and all groups at the staleness limit. Collective. Raises :class:`EngineError` on
        all ranks if an engine failed, and :class:`UserError` if a response was sampled by other
        weights than ``versions``, or by too old ones.
        """
        share = self.generation.share
        oldest_allowed = step - 1 - self.rollouts_behind
        samples = [(group.prompt, index) for group in groups for index in group.unfinished]
        # the ranks of an engine have the same responses, and each judges a part of them
        to_judge = {
            (prompt.prompt_id, index)
            for prompt, index in samples[share.rank_in_engine :: share.ranks]
        }
        partial = None
        if self.carries_over:
            quota = len(range(share.engine, wanted, share.engines))
            partial = self._partial_rollout(groups, quota, step, responses)
        for together in self.generation.stream(samples, self.sampling, step, partial):
            if self.closed.is_set():
                raise CancelledError
            _check_versions(together, versions, oldest_allowed)
            responses.update({response.key: response for response in together})
            finished = [response for response in together if _is_finished(response)]
            mine = [response for response in finished if response.key in to_judge]
            if mine:
                yield mine

    def _partial_rollout(
        self,
        groups: Sequence[PromptGroup],
        quota: int,
        step: int,
        responses: Mapping[ResponseKey, Response],
    ) -> PartialRollout:
        """Return a rollout that continues what was begun, and stops when ``responses`` complete
        ``quota`` groups and those at the staleness limit.
        """
        urgent_step = step - self.rollouts_behind
        needs = [
            GroupNeed(
                prompt_id=group.prompt.prompt_id,
                missing=len(group.unfinished),
                urgent=group.step <= urgent_step,
            )
            for group in groups
        ]
        return PartialRollout(
            should_stop=lambda: batch_is_complete(needs, quota, responses),
            unfinished={response.key: response for group in groups for response in group.begun},
        )

    def _gather(
        self,
        groups: Sequence[PromptGroup],
        judged: Sequence[Judged],
        responses: Mapping[ResponseKey, Response],
    ) -> list[PromptGroup]:
        """Return the groups with the ``judged`` responses of all ranks, and with the ``responses``
        that were cut short. Collective.

        Judgements and lengths go to every rank. Tokens stay here, unless responses are carried
        over: any engine may continue them, or hand them over in a later step.
        """
        here: dict[ResponseKey, JudgedResponse] = {
            response.key: (response, judgement)
            for one in judged
            for response, judgement in zip(one.responses, one.judgements, strict=True)
        }
        for response in responses.values():
            if not _is_finished(response):
                here[response.key] = response, None
        everyone: list[list[tuple[ResponseKey, Response | Summary, Judgement | None]]]
        everyone = self.collectives.gather(
            [
                (key, response if self.carries_over else Summary.of(response), judgement)
                for key, (response, judgement) in here.items()
            ]
        )
        by_prompt: dict[str, dict[int, JudgedResponse]] = {
            group.prompt.prompt_id: {} for group in groups
        }
        for rank, gathered_there in enumerate(everyone):
            for (prompt_id, index), gathered, judgement in gathered_there:
                if rank == self.collectives.rank:
                    by_prompt[prompt_id][index] = here[prompt_id, index]
                elif isinstance(gathered, Summary):
                    by_prompt[prompt_id][index] = gathered.restored(rank), judgement
                else:
                    by_prompt[prompt_id][index] = gathered, judgement
        return [_with_sampled(group, by_prompt[group.prompt.prompt_id]) for group in groups]

    def _slot_metrics(self, before: SlotSteps | None) -> dict[str, float]:
        """Return the share of the engines' decoding positions since ``before`` that gave a token,
        and the preemptions caused by a full KV cache, if the engines know. Collective.
        """
        now = self.engine.slot_steps
        here = (0, 0, 0)
        if now is not None and before is not None:
            here = (
                now.used - before.used,
                now.total - before.total,
                now.preemptions - before.preemptions,
            )
        used, total, preemptions = np.sum(self.collectives.gather(here), axis=0).tolist()
        if not total:
            return {}
        return {"rollout/utilization": used / total, "rollout/preemptions": preemptions}


@dataclass(frozen=True)
class Judged:
    """Responses with their judgements, None for those that failed, and when the judge began and
    ended (seconds of a clock).
    """

    responses: Sequence[Response]
    judgements: Sequence[Judgement | None]
    began: float
    ended: float


def _judged_and_timed(
    judge: Judge, responses: Sequence[Response], prompts: Mapping[str, Prompt]
) -> Judged:
    began = time.perf_counter()
    judgements = judge(responses, prompts)
    ended = time.perf_counter()
    known = [
        replace(response, failure="it was not judged") if judgement is None else response
        for response, judgement in zip(responses, judgements, strict=True)
    ]
    return Judged(responses=known, judgements=judgements, began=began, ended=ended)


@dataclass(frozen=True)
class GroupNeed:
    """How many responses a group lacks, and whether it may not wait for a later step."""

    prompt_id: str
    missing: int
    urgent: bool


def batch_is_complete(
    needs: Sequence[GroupNeed], quota: int, responses: Mapping[ResponseKey, Response]
) -> bool:
    """Return whether ``quota`` groups are finished, and all groups that may not wait."""
    new = Counter(prompt_id for prompt_id, _ in responses)
    unfinished = [need for need in needs if need.missing > new[need.prompt_id]]
    if len(needs) - len(unfinished) < quota:
        return False
    return not any(need.urgent for need in unfinished)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals``."""
    total = 0.0
    end = -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def _is_finished(response: Response) -> bool:
    """Return whether a response can be judged: it was not cut short, and its session did not
    fail.
    """
    return response.finish_reason != "abort" and response.failure is None


def _with_sampled(group: PromptGroup, sampled: Mapping[int, JudgedResponse]) -> PromptGroup:
    """Return a group with what was sampled of it, and with the responses that are left out."""
    failed = {index for index, (response, _) in sampled.items() if response.failure is not None}
    kept = {index: judged for index, judged in sampled.items() if index not in failed}
    return replace(group.with_responses(kept), failed=group.failed | failed)


_position = attrgetter("position")


def _check_versions(responses: Sequence[Response], versions: range, oldest: int) -> None:
    """Raise :class:`UserError` unless the last token of each response is of one of ``versions``,
    and none is of an older one than ``oldest``.
    """
    for response in responses:
        if response.weights_version not in versions:
            sampled_by = response.weights_version
        elif not oldest <= response.oldest_version <= response.weights_version:
            sampled_by = response.oldest_version
        else:
            continue
        allowed = " or ".join(map(str, versions))
        raise UserError(
            f"response to {response.prompt_id} was sampled by weights version {sampled_by}, the "
            f"engine should have {allowed}, and the oldest version allowed is {oldest}: it was "
            "not synchronized"
        )


def _scores_of(groups: Sequence[PromptGroup]) -> np.ndarray | None:
    """Return the scores of all samples of ``groups``, float64 [5, N], if every group has them."""
    scores = [group.scores for group in groups if group.scores is not None]
    if len(scores) < len(groups):
        return None
    return np.concatenate(scores, axis=1)


def _judged(groups: Sequence[PromptGroup]) -> int:
    """Return the number of judged responses of ``groups``."""
    return sum(len(group.samples) for group in groups)


def _count_metrics(counts: Totals, totals: Totals) -> dict[str, float]:
    """Return what a step sampled and trained on, and the sums of the run so far."""
    return {
        "rollout/informative_groups": counts.informative_groups,
        "rollout/informative_groups_total": totals.informative_groups,
        "rollout/responses": counts.responses,
        "rollout/responses_total": totals.responses,
    }


def _unjudged(drawn: Drawn) -> tuple[int, int]:
    """Return how many responses of a step are left out, and how many there were."""
    groups = [*drawn.finished, *drawn.lost]
    return sum(len(group.failed) for group in groups), sum(group.size for group in groups)


def _unjudged_metrics(drawn: Drawn) -> dict[str, float]:
    """Return the share of responses without a judgement, if users' agents or verifiers judge."""
    unjudged, responses = _unjudged(drawn)
    samples = [sample for group in drawn.finished for sample in group.samples]
    is_users = any(sample.judgement.logged is not None for sample in samples)
    return {"rollout/unjudged": unjudged / responses} if unjudged or is_users else {}


def _session_metrics(drawn: Drawn) -> dict[str, float]:
    """Return the means of what was counted in the sessions (``Response.counted``)."""
    counted: dict[str, list[float]] = {}
    for group in drawn.finished:
        for sample in group.samples:
            for name, value in (sample.response.counted or {}).items():
                counted.setdefault(f"rollout/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in counted.items()}


def _filter_metrics(drawn: Drawn, batch: Sequence[PromptGroup]) -> dict[str, float]:
    """Return how many groups were drawn and left out of the batch, and the accuracy of all."""
    correct = [sample.judgement.correct for group in drawn.finished for sample in group.samples]
    taken = {group.position for group in batch}
    left_out = [group for group in drawn.finished if group.position not in taken]
    return {
        "rollout/prompts_drawn": len(drawn.finished),
        "rollout/groups_filtered": len(left_out),
        "rollout/accuracy": float(np.mean(correct)),
    }


def _staleness_metrics(
    samples: Sequence[TrainingSample], step: int, updates_per_rollout: int
) -> dict[str, float]:
    """Return how many optimizer updates the weights of the oldest token of a response miss when the
    training of ``step`` begins, mean and maximum, and the share of responses that more than one
    version of the weights has sampled.
    """
    staleness = [step - 1 - sample.response.oldest_version for sample in samples]
    return {
        "rollout/staleness_mean": float(np.mean(staleness)) * updates_per_rollout,
        "rollout/staleness_max": max(staleness) * updates_per_rollout,
        "rollout/continued": float(np.mean([bool(s.response.segments) for s in samples])),
    }
