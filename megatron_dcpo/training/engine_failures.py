"""An engine that fails on one rank fails on all: every rank raises the same error, and the loop
starts all engines again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.megatron_private import default_store
from megatron_dcpo.runtime.watchdog import LOST_AFTER_SECONDS, Watchdog


def raise_on_all_ranks(failure: str, collectives: Collectives, what: str) -> None:
    """Raise :class:`EngineError` on every rank if an engine failed on one of them. Collective.

    ``failure`` says why this rank's engine failed in ``what``; it is empty if it did not.
    """
    try:
        failures = {rank: text for rank, text in enumerate(collectives.gather(failure)) if text}
    except RuntimeError as error:
        if failure:  # it names the rank that is gone, which the lost connection does not
            raise RuntimeError(f"{failure} ({what})") from error
        raise
    if not failures:
        return
    # The rank whose engine failed says why; the others only that one did not take its bucket.
    rank, reason = min(
        failures.items(), key=lambda item: ("weight synchronization" in item[1], item[0])
    )
    raise EngineError(f"rank {rank}: {reason}")


def wait_for_all_ranks(name: str, rollouts: int, ranks: int) -> None:
    """Return when all ``ranks`` have finished so many ``rollouts``, however long they take: a
    collective would wait for parallel.distributed_timeout_minutes only, which is for one that hangs
    (a rank that is lost is missed by its heartbeat).
    """
    if ranks == 1:
        return
    store = default_store()
    key = f"engine/done/{name}"
    finished = store.add(key, 1)
    pause = 0.001
    while finished < rollouts * ranks:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        finished = store.add(key, 0)


def wait_for_engine_ranks(
    failure: str, rank: int, ranks_of_engine: Sequence[int], watch: Watchdog
) -> None:
    """Return when all ranks of a tensor-parallel engine have finished the rollout; if it failed on
    this ``rank`` alone, end the job.

    The other ranks then wait for this one in a collective of vLLM's, which nothing interrupts: the
    job ends on all ranks with a line that says so.
    """
    store = default_store()
    store.set(_rollout_done_key(rank), failure)
    deadline = time.monotonic() + LOST_AFTER_SECONDS
    while failure:
        waiting = [mate for mate in ranks_of_engine if not store.check([_rollout_done_key(mate)])]
        if not waiting:
            return
        if time.monotonic() > deadline:
            watch.abort(
                f"the engine of ranks {ranks_of_engine[0]}-{ranks_of_engine[-1]} failed on rank "
                f"{rank} alone: {failure}; rank(s) {', '.join(map(str, waiting))} cannot go on "
                "without it. --resume auto continues after the last checkpoint"
            )
        time.sleep(0.2)


def forget_rollout(rank: int) -> None:
    """Remove what :func:`wait_for_engine_ranks` noted, when every rank has read it."""
    default_store().delete_key(_rollout_done_key(rank))


def _rollout_done_key(rank: int) -> str:
    """Return the key under which a rank says that its engine's rollout has ended, well or not."""
    return f"engine/out/{rank}"
