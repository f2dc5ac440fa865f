"""One rank that watches and is watched: killed, frozen or slow, as the scenario says. Started
without a launcher.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dcpo.rollout.engine import SamplingConfig
from megatron_dcpo.runtime import signals, watchdog
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.watchdog import Watchdog
from megatron_dcpo.training.generation import Generation


def run(options: dict[str, Any]) -> None:
    scenario, directory = options["scenario"], Path(options["out"])
    watchdog.LOST_AFTER_SECONDS = 5.0
    signals.install_handlers()
    signals.begin_saving()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with Watchdog(directory, rank, dist.get_world_size(), budget=5).start() as watching:
        watching.enter("train", 7)
        time.sleep(2.5)  # every rank has said where it is
        if rank == 1:
            if scenario == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            if scenario == "slow":
                dawdle()
            if scenario == "broken":
                raise RuntimeError("a mistake in the program")
            if scenario == "signalled":
                os.kill(os.getpid(), signal.SIGUSR1)
        if scenario == "engine":
            fail_alone(watching, rank)
        if scenario == "uneven":
            sample_unevenly(watching, rank)
        if scenario == "signalled":
            while not signals.stop_requested():
                time.sleep(0.1)
        dist.barrier()
        if scenario == "late" and rank == 0:
            time.sleep(8)  # the others have ended long before, and nobody misses them
    print("ended well", flush=True)
    dist.destroy_process_group()


class Slow:
    """An engine that takes longer than a collective waits."""

    tensor_model_parallel_size = 1

    def stream(self, *_: object) -> Any:
        time.sleep(6)
        yield []


def sample_unevenly(watching: Watchdog, rank: int) -> None:
    """One rank samples, twice; the others have nothing to do."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    generation = Generation(Slow(), Collectives(group), watching)  # type: ignore[arg-type]
    for step in (1, 2):
        samples: Any = [("prompt", 0)] if rank == 1 else []
        for _ in generation.stream(samples, SamplingConfig(max_tokens=1), step):
            pass


def fail_alone(watching: Watchdog, rank: int) -> None:
    """The engine of both ranks fails on one; the other waits where no signal and no exception
    reaches it.
    """
    from megatron_dcpo.training import engine_failures

    engine_failures.LOST_AFTER_SECONDS = 3.0
    if rank == 0:
        time.sleep(600)
    engine_failures.wait_for_engine_ranks("out of memory", rank, range(2), watching)


def dawdle() -> None:
    time.sleep(6)
