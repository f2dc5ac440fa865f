"""What an engine is: it samples responses, and it takes new weights piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.arrivals import Arrivals
from megatron_dcpo.rollout.sampling import Samples, SamplingConfig
from megatron_dcpo.types import Prompt, Response, ResponseKey
from megatron_dcpo.weights.planner import WeightSlice


@dataclass(frozen=True)
class PartialRollout:
    """A rollout that ends before its last response. ``should_stop``: asked between two steps of the
    engine whether it does now. ``unfinished``: what an earlier one left, by prompt id and index:
    continued after its tokens.
    """

    should_stop: Callable[[], bool]
    unfinished: Mapping[ResponseKey, Response]

    def so_far(self, prompt: Prompt, index: int) -> Response | None:
        return self.unfinished.get((prompt.prompt_id, index))


@dataclass
class SlotSteps:
    """Decoding positions of an engine, added up over its steps: those there were, and those that
    gave a token. ``preemptions``: how often a response lost its place in the cache to another and
    was computed again.
    """

    total: int = 0
    used: int = 0
    preemptions: int = 0


class EngineError(RuntimeError):
    """An engine failed, and a restart may help; what it was doing has to be done again."""


class Engine(Protocol):
    """A rollout engine. ``weights_version`` counts the updates received and is stamped on every
    response.

    An engine of several ranks (``tensor_model_parallel_size``) is called alike on each of them and
    answers alike.
    """

    weights_version: int
    eos_token_ids: tuple[int, ...]
    tensor_model_parallel_size: int
    slot_steps: SlotSteps | None = None  # if the engine knows them

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield the response of every (prompt, sample index), handed over when it is finished, with
        those that finish together.

        A response depends on its prompt, the weights, the seed, the step and its index only, not on
        what else is sampled. How many run at once is up to the engine. With ``partial``, as soon
        as that is full, everything else comes as it is, with ``finish_reason`` ``abort`` and
        perhaps no token; what is continued keeps the random numbers of the step it began in, so
        that with the same weights it is what it would have been.

        Raises :class:`megatron_dcpo.runtime.signals.RolloutAbandoned` soon after
        ``signals.stop_requested()`` turns true, and :class:`EngineError`; what was handed over
        before stands.
        """
        ...

    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Sample the calls that arrive until ``arrivals`` is closed. Yield after every step of the
        engine, and now and then while it waits, the responses that are finished: often none.

        A response depends on its call, the weights, the seed and the step only, as in
        :meth:`stream`. A call that is cancelled gets none. Raises what :meth:`stream` raises.
        """
        raise UserError(
            f"{type(self).__name__} takes no calls that arrive while it runs, which "
            "rollout.agent and rollout.command need; choose another rollout.engine"
        )

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int = 0
    ) -> list[Response]:
        """Run :meth:`stream` to its end: ``sampling.n`` responses per prompt, prompt-major."""
        samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        finished = {
            (response.prompt_id, response.sample_index): response
            for responses in self.stream(samples, sampling, step)
            for response in responses
        }
        return [finished[prompt.prompt_id, index] for prompt, index in samples]

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Overwrite the engine's weights, bucket by bucket; complete when it returns. Wakes a
        sleeping engine.

        The values of a bucket are the caller's and valid until the next one is asked for.
        """
        ...

    def forget_prompts(self) -> None:
        """Drop what is kept of earlier prompts, so that what comes next is computed as if they had
        not been.
        """
        return

    def sleep(self) -> None:
        """Give back the memory that the next weights and prompts will fill again, if the engine
        can.
        """
        ...

    def restart(self) -> None:
        """Restart after an :class:`EngineError`. The weights have to be updated before the next
        ``generate``.
        """
        ...


def append_segment(begun: Response | None, new: Response) -> Response:
    """Return ``new`` appended to the tokens that were there before."""
    if begun is None:
        return new
    return replace(
        new,
        token_ids=np.concatenate([begun.token_ids, new.token_ids]),
        logprobs=np.concatenate([begun.logprobs, new.logprobs]),
        experts=earlier_first(begun.experts, new.experts),
        step=begun.step,
        segments=tuple(
            part for part in (*begun.versions, (new.weights_version, len(new.token_ids))) if part[1]
        ),
    )


def earlier_first(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Return the choices [tokens, layers, k] of two passes that begin with the same tokens: the
    earlier pass's where it has any, because log-probs of tokens that were sampled then follow from
    these, and else the later one's. None if neither has any.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    rows = max(len(earlier), len(later))
    joined = np.full((rows, *later.shape[1:]), -1, np.int16)
    joined[: len(later)] = later
    known = (earlier != -1).any(axis=(1, 2))
    joined[: len(earlier)][known] = earlier[known]
    return joined
