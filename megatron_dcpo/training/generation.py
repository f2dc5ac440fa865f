"""Generation: this rank's engine samples responses, and engines that fail start again.

A user may replace how responses come about (``rollout.function``): several turns, tools, an
environment. Whatever does it yields responses as :meth:`megatron_dcpo.rollout.Engine.stream` does.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
)
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.plugins import check_signature, load_object
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import Response, ResponseKey

RolloutFunction = Callable[
    [Engine, Samples, SamplingConfig, int], Generator[list[Response], None, None]
]


class Recover(Protocol):
    """Starts engines again that failed; see :meth:`WeightSync.recover`. Collective."""

    def __call__(self, failure: str, *, version: int, restarts: int) -> bool: ...


@dataclass(frozen=True)
class EngineShare:
    """Which part of a rollout is this rank's.

    The ranks of an engine are neighbors and sample the same. ``ranks`` is their number, ``engine``
    the number of this rank's engine, ``engines`` how many there are, ``place`` the number of this
    rank in its engine.
    """

    ranks: int
    engine: int
    engines: int
    place: int

    @classmethod
    def of(cls, engine: Engine, collectives: Collectives) -> EngineShare:
        """Return the share of this rank, whose engine is ``engine``."""
        size = engine.tensor_model_parallel_size
        return cls(
            ranks=size,
            engine=collectives.rank // size,
            engines=len(collectives.ranks) // size,
            place=collectives.rank % size,
        )


class Generation:
    """Samples with this rank's ``engine``, and has engines that failed start again.

    ``recover`` is called on all ranks after every attempt (collective). It returns whether an
    engine failed and was started again, in which case the missing responses are generated again.
    ``function`` replaces the engine's own stream.
    """

    def __init__(
        self,
        engine: Engine,
        recover: Recover,
        collectives: Collectives,
        function: RolloutFunction | None = None,
    ) -> None:
        self.engine = engine
        self.recover = recover
        self.collectives = collectives
        self.function = function
        self.share = EngineShare.of(engine, collectives)

    def generate(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        *,
        step: int,
        version: int,
        responses: dict[ResponseKey, Response],
        finished: Callable[[Sequence[Response]], None],
        partial: PartialRollout | None = None,
    ) -> None:
        """Fill ``responses`` with a response to every (prompt, index) of ``samples``, unless a
        signal or ``partial`` cuts generation short. Collective.

        ``finished`` is told of responses as soon as they are there. An engine that has to be
        started again gets the weights ``version`` and generates what is missing; random numbers are
        counted, so the result is the same as without the failure.
        """
        for restarts in itertools.count():
            missing = [
                (prompt, index)
                for prompt, index in samples
                if (prompt.prompt_id, index) not in responses
            ]
            failure = ""
            if missing and not (partial and partial.should_stop()):
                failure = self._attempt(missing, sampling, step, responses, finished, partial)
            if not self.recover(failure, version=version, restarts=restarts):
                return
            common = self._common_to_all_ranks(responses)
            for key in responses.keys() - common:
                del responses[key]

    def _attempt(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
        responses: dict[ResponseKey, Response],
        finished: Callable[[Sequence[Response]], None],
        partial: PartialRollout | None,
    ) -> str:
        """Sample until the end, a signal, or a failure of the engine, and return what failed."""
        if self.function is not None:
            stream = self.function(self.engine, samples, sampling, step)
        elif partial is not None:
            stream = self.engine.stream(samples, sampling, step, partial)
        else:
            stream = self.engine.stream(samples, sampling, step)
        try:
            with closing(stream):
                for together in stream:
                    responses.update({response.key: response for response in together})
                    finished(together)
        except RolloutAbandoned:
            return ""
        except EngineError as error:
            return str(error)
        return ""

    def _common_to_all_ranks(self, responses: Mapping[ResponseKey, Response]) -> set[ResponseKey]:
        """Return the keys of those ``responses`` that every rank of this engine has, with the same
        tokens. Collective when an engine has several ranks.

        The ranks of an engine that failed have to ask it for the same responses again.
        """
        size = self.share.ranks
        if size == 1:
            return set(responses)
        digests = {
            key: hashlib.sha256(response.token_ids.tobytes()).digest()
            for key, response in responses.items()
        }
        first = self.share.engine * size
        ranks = self.collectives.gather(digests)[first : first + size]
        return {
            key
            for key, digest in digests.items()
            if all(of_rank.get(key) == digest for of_rank in ranks)
        }


def load_rollout_function(path: str) -> RolloutFunction:
    """Return the function that ``rollout.function`` names, whose responses are checked.

    Raises :class:`UserError` when there is none, when it cannot be called with (engine, samples,
    sampling, step), and, when it is called, for responses that cannot be trained on.
    """
    option = "rollout.function"
    function = load_object(path, option)
    check_signature(function, path, option, "engine", "samples", "sampling", "step")

    def checked(
        engine: Engine, samples: Samples, sampling: SamplingConfig, step: int
    ) -> Generator[list[Response], None, None]:
        missing = {(prompt.prompt_id, index) for prompt, index in samples}
        stream = function(engine, samples, sampling, step)
        while True:
            try:
                together = list(next(stream))
            except StopIteration:
                break
            except (EngineError, RolloutAbandoned, UserError):
                raise
            except Exception as error:
                what = f"{type(error).__name__}: {one_line(error, 300)}"
                raise UserError(f"{option}={path}: {what}") from error
            for response in together:
                problem = _problem_of(response, missing, sampling.max_tokens)
                if problem:
                    raise UserError(f"{option}={path}: {problem}")
                missing.discard(response.key)
            yield together
        if missing:
            prompt_id, index = min(missing)
            raise UserError(
                f"{option}={path}: {len(missing)} responses are missing, among them response "
                f"{index} to {prompt_id}; yield one for every (prompt, index) of samples"
            )

    return checked


def _problem_of(response: Response, missing: set[ResponseKey], max_tokens: int) -> str:
    """Return why a response of a user's rollout cannot be trained on; empty when it can."""
    if not isinstance(response, Response):
        return f"it yielded a list with a {type(response).__name__}; yield lists of Response"
    name = f"response {response.sample_index} to {response.prompt_id}"
    if response.key not in missing:
        return f"{name} was not asked for, or came twice"
    length = len(response.token_ids)
    if not 0 < length <= max_tokens:
        return (
            f"{name} has {length} tokens; rollout.max_response_length={max_tokens} counts all turns"
        )
    if len(response.logprobs) != length:
        return f"{name} has {length} tokens and {len(response.logprobs)} log-probs"
    if response.loss_mask is None:
        return ""
    if response.loss_mask.dtype != np.bool_ or len(response.loss_mask) != length:
        return f"{name}: loss_mask must be bool [{length}], one value a token"
    if not response.loss_mask.any():
        return f"{name}: loss_mask says that the policy sampled no token"
    return ""
