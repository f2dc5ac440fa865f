"""Generation: this rank's engine samples responses, or agents do with it (``rollout.agent``), which
yield theirs as :meth:`megatron_dcpo.rollout.Engine.stream` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
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
from megatron_dcpo.runtime.watchdog import Watchdog
from megatron_dcpo.training.engine_failures import (
    forget_rollout,
    raise_on_all_ranks,
    wait_for_all_ranks,
    wait_for_engine_ranks,
)
from megatron_dcpo.types import Response

# samples, sampling, step -> responses as they are finished
Stream = Callable[[Samples, SamplingConfig, int], Generator[list[Response], None, None]]


_NUMBERS = itertools.count()


class Agents(Protocol):
    """What makes the responses where a run has ``rollout.agent``, with this rank's engine."""

    stream: Stream

    def close(self) -> None:
        """End the processes of the agents."""
        ...


@dataclass(frozen=True)
class EngineShare:
    """Which part of a rollout is this rank's.

    The ranks of an engine are neighbors and sample the same. ``ranks`` is their number, ``engine``
    the number of this rank's engine, ``engines`` how many there are, ``rank_in_engine`` the number
    of this rank in its engine.
    """

    ranks: int
    engine: int
    engines: int
    rank_in_engine: int

    @classmethod
    def of(cls, engine: Engine, collectives: Collectives) -> EngineShare:
        """Return the share of this rank, whose engine is ``engine``."""
        size = engine.tensor_model_parallel_size
        return cls(
            ranks=size,
            engine=collectives.rank // size,
            engines=len(collectives.ranks) // size,
            rank_in_engine=collectives.rank % size,
        )


class Generation:
    """Samples with this rank's ``engine``.

    ``agents`` replace the engine's stream. ``watch`` ends the job if an engine of several ranks
    failed on one of them alone.
    """

    def __init__(
        self,
        engine: Engine,
        collectives: Collectives,
        watch: Watchdog,
        agents: Stream | None = None,
    ) -> None:
        self.engine = engine
        self.collectives = collectives
        self.watch = watch
        self.agents = agents
        self.share = EngineShare.of(engine, collectives)
        self.name = str(next(_NUMBERS))  # the same on all ranks
        self.rollouts = 0

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
        partial: PartialRollout | None = None,
    ) -> Iterator[list[Response]]:
        """Yield the responses to every (prompt, index) of ``samples`` as they are finished, unless
        a signal or ``partial`` cuts generation short. Collective: read it to its end.

        Raises :class:`EngineError` on all ranks, at the end, if an engine failed on one of them.
        """
        failure = ""
        if samples and not (partial is not None and partial.should_stop()):
            try:
                with closing(self._own_stream(samples, sampling, step, partial)) as responses:
                    yield from responses
            except RolloutAbandoned:
                pass
            except EngineError as error:
                failure = str(error)
        self._raise_on_all_ranks(failure)

    def _own_stream(
        self, samples: Samples, sampling: SamplingConfig, step: int, partial: PartialRollout | None
    ) -> Generator[list[Response], None, None]:
        if self.agents is not None:
            return self.agents(samples, sampling, step)
        if partial is not None:
            return self.engine.stream(samples, sampling, step, partial=partial)
        return self.engine.stream(samples, sampling, step)

    def _raise_on_all_ranks(self, failure: str) -> None:
        rank = self.collectives.rank
        ranks = len(self.collectives.ranks)
        share = self.share
        self.rollouts += 1
        if share.ranks == 1:
            wait_for_all_ranks(self.name, self.rollouts, ranks)
            raise_on_all_ranks(failure, self.collectives, "a rollout")
            return
        first = rank - share.rank_in_engine
        wait_for_engine_ranks(failure, rank, range(first, first + share.ranks), self.watch)
        try:
            wait_for_all_ranks(self.name, self.rollouts, ranks)
            raise_on_all_ranks(failure, self.collectives, "a rollout")
        finally:
            forget_rollout(rank)
