"""Batches for the training loop: sampled one after the other, or each alongside the training of the
one before (``rollout.max_staleness`` with a server).

Both make the same call, ``Sampler.sample(state, step, versions) -> batch, state``, and keep the
state of the last batch that was taken. A checkpoint therefore knows nothing of a batch on its way:
a resumed run generates it again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from megatron_dcpo import codec
from megatron_dcpo.errors import Stopped, UserError
from megatron_dcpo.judging.verdicts import TooManyUnjudged
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.sampler import (
    Batch,
    Draw,
    PromptGroup,
    Sampler,
    SamplerState,
    Totals,
)
from megatron_dcpo.types import Judgement, Prompt, Response

T = TypeVar("T")
Sampled = tuple[Batch, SamplerState]

_ON_ALL_RANKS = (EngineError, RolloutAbandoned, TooManyUnjudged)  # a rollout ends so everywhere


class Rollouts(Protocol):
    """Gives the training loop its batches. All methods are collective."""

    sampler: Sampler
    state: SamplerState

    def take(self, step: int) -> Batch:
        """Return the batch of ``step``; raises what :meth:`Sampler.sample` raises. After an
        :class:`EngineError` it may be called again, with new weights in the engines.
        """
        ...

    def start(self, step: int) -> None:
        """Begin to sample the batch of ``step``, if batches are sampled ahead."""
        ...

    def wait_for_engine(self) -> None:
        """Wait until the engine samples nothing, so that it may sample for others."""
        ...

    def close(self, *raised: object) -> None:
        """Give up what is on its way, because the run ends with the exception ``raised``."""
        ...


class RolloutsInTurn:
    """Samples a batch when it is taken, by the weights of the step before."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.state = SamplerState()

    def take(self, step: int) -> Batch:
        """Sample the batch of ``step`` and return it."""
        batch, self.state = self.sampler.sample(self.state, step, range(step - 1, step))
        return batch

    def start(self, step: int) -> None:
        """Do nothing: no batch is sampled ahead."""

    def wait_for_engine(self) -> None:
        """Return: nothing is sampled between two calls."""

    def close(self, *raised: object) -> None:
        """Do nothing: no batch is on its way."""


class AsyncRollouts:
    """Samples the batch of the next step in a thread while this step trains.

    The batch on its way is one future. ``sampler`` communicates through a second process group
    and has timers that only count seconds; ``timers`` are the run's. What ends the thread is raised
    by :meth:`take`, in the main thread.
    """

    def __init__(self, sampler: Sampler, timers: Timers, last_step: int) -> None:
        self.sampler = sampler
        self.timers = timers
        self.last_step = last_step
        self.state = SamplerState()
        self.future: Future[Sampled] | None = None

    def take(self, step: int) -> Batch:
        """Return the batch of ``step``, which the weights before the last step began and the newest
        have completed. The first batch, and one whose engine failed, are sampled now.
        """
        if self.future is None:
            self.future = self._sample(step, range(step - 1, step))
        self.wait_for_engine()
        future, self.future = self.future, None
        batch, self.state = future.result()
        return batch

    def start(self, step: int) -> None:
        """Begin to sample the batch of ``step`` with the weights that the engine has now, which
        miss the updates of the step before; those arrive while it is sampled.
        """
        if step <= self.last_step:
            self.future = self._sample(step, range(step - 2, step))

    def wait_for_engine(self) -> None:
        """Wait for the batch on its way, which counts as ``time/rollout``.

        ``time/rollout_busy`` is how long it took. Raises what ended it on this rank alone; what
        ended it on all ranks is left for :meth:`take`.
        """
        if self.future is None:
            return
        with self.timers("rollout"):
            error = self.future.exception()
        seconds = self.sampler.timers.seconds
        self.timers.add("rollout_busy", seconds.get("rollout", 0.0) + seconds.get("judge", 0.0))
        self.timers.add("judge_busy", seconds.get("judge_busy", 0.0))
        self.sampler.timers.clear()
        if error is not None and not isinstance(error, _ON_ALL_RANKS):
            raise error

    def close(self, *raised: object) -> None:
        """Give up the batch on its way. A signal ends it as well, on all ranks: wait for that."""
        if Stopped in raised and self.future is not None:
            self.future.exception()
        self.sampler.close()

    def _sample(self, step: int, versions: range) -> Future[Sampled]:
        state = self.state
        return in_thread(lambda: self.sampler.sample(state, step, versions), name="rollout")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Return the future result of ``call``, in a daemon thread: a run that fails does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SavedRollouts:
    """What a checkpoint holds of the rollouts: where the run draws its next prompts, and the groups
    that it carries.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.sampler = rollouts.sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken."""
        state = self.rollouts.state
        return {
            "consumed_prompts": state.position,
            "carried": saved_groups(state.carried),
            "group_size": self.sampler.rollout.group_size,
            "totals": dataclasses.asdict(state.totals),
        }

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``. Raises :class:`UserError` when the options no longer allow what
        is carried, and TypeError, ValueError or LookupError for malformed state.
        """
        position = int(saved["consumed_prompts"])
        if position < step * self.sampler.prompts_per_step:
            raise UserError(
                f"the checkpoint of step {step} contradicts itself: {position} prompts consumed"
            )
        rollout = self.sampler.rollout
        if saved["carried"] and saved["group_size"] != rollout.group_size:
            raise UserError(
                f"the checkpoint of step {step} carries unfinished groups of "
                f"rollout.group_size={saved['group_size']}, not {rollout.group_size}; "
                "keep it to resume"
            )
        carried = restored_groups(saved["carried"], self.sampler.draw, rollout.group_size)
        responses = [response for group in carried for response, _ in group.responses.values()]
        staleness = [step - response.oldest_version for response in responses]
        oldest = max(staleness, default=0)
        if oldest > self.sampler.rollouts_behind:
            raise UserError(
                f"the checkpoint of step {step} carries responses that the next step continues; "
                f"set rollout.max_staleness={oldest * self.sampler.updates_per_rollout} or more to "
                "resume"
            )
        unfinished = [len(r.token_ids) for r in responses if r.finish_reason == "abort"]
        longest = max(unfinished, default=0)
        if longest >= rollout.max_response_length:
            raise UserError(
                f"the checkpoint of step {step} carries an unfinished response of {longest} "
                "tokens; set rollout.max_response_length above that to resume"
            )
        totals = saved["totals"]
        self.rollouts.state = SamplerState(
            position=position,
            carried=tuple(carried),
            totals=Totals(
                informative_groups=int(totals["informative_groups"]),
                responses=int(totals["responses"]),
            ),
        )


# -------------------------------------------------------------------------------- carried groups
def saved_groups(groups: Sequence[PromptGroup]) -> list[codec.Row]:
    """Return groups as tensors and plain values, which is all that a checkpoint's reader takes.

    The prompt of a group is not saved but its position in the data, from which it is drawn again.
    """
    return [
        {
            "version": codec.VERSION,
            "position": group.position,
            "step": group.step,
            "responses": {
                index: (_saved(response), None if judgement is None else _saved(judgement))
                for index, (response, judgement) in group.responses.items()
            },
        }
        for group in groups
    ]


def _saved(record: Response | Judgement) -> codec.Row:
    return codec.to_values(record, array=torch.tensor)


def restored_groups(
    saved: Sequence[Mapping[str, object]], draw: Draw, size: int
) -> list[PromptGroup]:
    """Return the groups that :func:`saved_groups` made.

    Raises ValueError, TypeError or LookupError for a malformed group.
    """
    groups = []
    for entry in saved:
        codec.check_version(entry)
        position = int(entry["position"])  # type: ignore[call-overload]
        step = int(entry["step"])  # type: ignore[call-overload]
        (prompt,) = draw(position, 1)
        responses = {}
        for index, (response, judgement) in entry["responses"].items():  # type: ignore[attr-defined]
            responses[index] = (
                _restored_response(response, prompt, index),
                None if judgement is None else codec.from_row(Judgement, judgement),
            )
        groups.append(PromptGroup(prompt, position, step, size, responses))
    return groups


def _restored_response(saved: Mapping[str, object], prompt: Prompt, sample_index: int) -> Response:
    values: codec.Row = {"prompt_id": prompt.prompt_id, "sample_index": sample_index}
    for name, value in saved.items():
        values[name] = value.numpy() if isinstance(value, torch.Tensor) else value
    response = codec.from_row(Response, values)
    tokens = response.token_ids.shape
    if len(tokens) != 1 or tokens != response.logprobs.shape:
        raise ValueError(
            f"{prompt.prompt_id}: tokens {tokens} with log-probs {response.logprobs.shape}"
        )
    return response
