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

from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
)
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import Response, ResponseKey

# A user's rollout, ready to be called: samples, sampling, step -> responses as they are finished.
Stream = Callable[[Samples, SamplingConfig, int], Generator[list[Response], None, None]]


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
    ``function`` replaces the engine's own stream (``rollout.function``).
    """

    def __init__(
        self,
        engine: Engine,
        recover: Recover,
        collectives: Collectives,
        function: Stream | None = None,
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
            stream = self.function(samples, sampling, step)
        elif partial is not None:
            stream = self.engine.stream(samples, sampling, step, partial=partial)
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
