"""Decide whether a mathematical answer is right. Most pairs need no algebra (``quick_verdict``);
the others go to worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_dcpo.judging.answers import Attempt, Outcome
from megatron_dcpo.judging.math.equivalence import quick_verdict
from megatron_dcpo.judging.worker_pool import PoolWork, WorkerPool

CPU_SECONDS = 1.5
WALL_SECONDS = 6.0
MEMORY_BYTES = 1 << 30


class VerifierPool(WorkerPool):
    """A pool whose ``verify(pairs)`` returns one bool per (answer, key). An answer whose judging
    takes too long, raises, or ends its process is wrong.
    """

    def __init__(
        self,
        workers: int | None = None,
        cpu_seconds: float = CPU_SECONDS,
        wall_seconds: float = WALL_SECONDS,
    ) -> None:
        load = "megatron_dcpo.judging.math.pool:load"
        work = PoolWork(
            load,
            lambda why: False,
            cpu_seconds=cpu_seconds,
            wall_seconds=wall_seconds,
            memory_bytes=MEMORY_BYTES,
            quick=lambda pair: quick_verdict(*pair),
        )
        super().__init__(work, workers)


def load() -> Callable[[str, str], bool]:
    """Return the function that a worker calls for each pair. Its grammar is loaded here, so that
    the first pair does not pay for it.
    """
    from megatron_dcpo.judging.math.equivalence import equivalent

    equivalent(r"\frac{x+1}{2}", r"0.5x+0.5")
    return equivalent


_POOL = VerifierPool()


def shared_pool() -> VerifierPool:
    """Return the pool of this process."""
    return _POOL


def verify_answers(attempts: Sequence[Attempt]) -> list[Outcome]:
    """Return the outcome of each answer against its key, judged in parallel.

    Nothing raises: no answer, and an answer that cannot be parsed in time, is wrong.
    """
    answers = [attempt.answer for attempt in attempts]
    pairs = [(a.answer, a.truth) for a in attempts if a.answer is not None]
    verdicts = iter(equivalent_many(pairs))
    return [Outcome(answer is not None and next(verdicts)) for answer in answers]


def equivalent_many(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return whether answer and key of each pair are the same number, set, expression and so on.
    The answers come without their boxes.
    """
    stripped = [(answer.strip(), key.strip()) for answer, key in pairs]
    return shared_pool().verify(stripped)


def equivalent_math(a: str, b: str) -> bool:
    """Return whether two boxed answers are the same number, set, expression and so on."""
    return equivalent_many([(a, b)])[0]
