"""A process for every kind of rank: process groups, and a device that Python registers, are a
process's for good.

``python -m megatron_dcpo.rehearsal.ranks RANK WORLD_SIZE CONFIG [OVERRIDE ...]`` rehearses one rank
and writes what it did, or what stopped it, as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dcpo.config import Config, ParallelConfig, load_config
from megatron_dcpo.errors import UserError, check_world_size, one_line
from megatron_dcpo.planning.plan import architecture_of, directory_of
from megatron_dcpo.rehearsal import TENSOR_PARALLEL
from megatron_dcpo.rehearsal.kept import keep
from megatron_dcpo.runtime.rehearsed_world import Rank

STAND_IN = Path(__file__).with_name("stand_in")


class RehearsalError(UserError):
    """The code of the job does not fit: a rank stopped at an operation."""


def least_gpus(parallel: ParallelConfig) -> int:
    """Return the number of ranks of the smallest job with this layout."""
    of_stage = math.lcm(
        parallel.tensor_model_parallel_size * parallel.context_parallel_size,
        parallel.sizes.expert_ranks,
    )
    return of_stage * parallel.pipeline_model_parallel_size


def rehearse_job(
    file: str, overrides: Sequence[str], config: Config, gpus: int
) -> list[dict[str, Any]]:
    """Rehearse the first and the last tensor-parallel rank of every pipeline stage of ``config``,
    which is ``file`` with ``overrides``, in a job of ``gpus``: the last one has the vocabulary's
    padding. Raises :class:`RehearsalError`, also if the two would call different collectives, which
    are left out of what is returned.
    """
    sizes = config.parallel.sizes
    stages = sizes.pipeline_model_parallel_size
    tensor = sizes.tensor_model_parallel_size
    check_world_size(tensor, stages, sizes.context_parallel_size, gpus, sizes.expert_ranks)
    firsts = [stage * gpus // stages for stage in range(stages)]
    ranks = sorted({rank for first in firsts for rank in (first, first + tensor - 1)})
    one = partial(_rehearse_in_process, file=file, overrides=overrides, gpus=gpus)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        done = list(pool.map(one, ranks))
    for rank, other in itertools.pairwise(done):
        if rank["stage"] == other["stage"]:
            check_same_collectives(rank, other)
    for phase in (phase for rank in done for phase in rank["phases"]):
        del phase["calls"]
    keep(config, gpus, done)
    return done


def check_same_collectives(rank: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise :class:`RehearsalError` if two tensor-parallel ranks of a stage call different
    collectives: on a device they would wait for each other, or read each other's memory.
    """
    for phase, of_other in zip(rank["phases"], other["phases"], strict=True):
        calls = phase["calls"].get(TENSOR_PARALLEL, [])
        calls_of_other = of_other["calls"].get(TENSOR_PARALLEL, [])
        for number, (call, its) in enumerate(itertools.zip_longest(calls, calls_of_other), 1):
            if call != its:
                raise RehearsalError(
                    f"{phase['name']}: the tensor-parallel ranks {rank['rank']} and "
                    f"{other['rank']} call different collectives, the {number}th: {call}, and {its}"
                )


def _rehearse_in_process(
    rank: int, file: str, overrides: Sequence[str], gpus: int
) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(rank), str(gpus), file, *overrides]
    path = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RehearsalError(
            f"the rehearsal of rank {rank} ended with status {done.returncode}: "
            f"{one_line(done.stderr[-2000:], 1500)}"
        ) from None
    if "stopped" in said:
        raise RehearsalError(f"the rehearsal of rank {rank} of {gpus} stopped: {said['stopped']}")
    return said


def _main(rank: str, gpus: str, file: str, *overrides: str) -> None:
    from megatron_dcpo.rehearsal.job import rehearse
    from megatron_dcpo.rehearsal.ledger import line_of

    config = load_config(file, overrides)
    arch = architecture_of(config.model.path)
    model = dataclasses.replace(config.model, path=str(directory_of(config.model.path)))
    objective = config.objective
    if objective.teacher_directory:
        objective = objective.changed(teacher=str(directory_of(objective.teacher_directory)))
    config = dataclasses.replace(config, model=model, objective=objective)
    try:
        done = rehearse(config, arch, Rank(rank=int(rank), world_size=int(gpus)))
    except UserError as error:
        print(json.dumps({"stopped": str(error)}))
        return
    except Exception as error:
        where = line_of(frame for frame, _ in traceback.walk_tb(error.__traceback__))
        traceback.print_exception(error)
        what = one_line(f"{type(error).__name__}: {error}", 300)
        phase = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        print(json.dumps({"stopped": f"{what}, at {where}{phase}"}))
        return
    print(json.dumps(done.as_dict()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
