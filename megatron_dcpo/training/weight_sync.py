"""Handing the policy's weights to the engines, and starting engines anew that failed. Collective over all ranks.

The end of a run: the policy as a Hugging Face directory that any tool can load.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

import torch.distributed as dist

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import EngineError
from megatron_dcpo.runtime.device import device_failed
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.watchdog import LOST_AFTER_SECONDS
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.weights.hf_checkpoint import write_checkpoint
from megatron_dcpo.weights.peft_adapter import DIRECTORY, write_adapter
from megatron_dcpo.weights.reshard import (
    SynchronisationError,
    Traffic,
    export_buckets,
    gather_full,
    not_finite,
    plan_for,
)
from megatron_dcpo.weights.reshard_plan import ReshardPlan

logger = logging.getLogger(__name__)

MAX_RESTARTS = 2  # of the engines, within one rollout or one synchronisation


def synchronise_engine(run: TrainingRun, version: int) -> dict[str, float]:
    """Push the policy's weights into the engines; from then on their responses carry ``version``.

    Returns ``reshard/bytes``, ``reshard/bytes_min`` (received by the rank that receives most, and the least possible)
    and ``reshard/peak_bucket_bytes``: counted in the transport, and equal to the plan or RuntimeError. Raises
    :class:`UserError` when a weight is not finite, and when an engine fails repeatedly; the run's checkpoints stay.
    """
    _check_finite(run, version)
    plan = _plan(run)
    for restarts in range(MAX_RESTARTS + 1):
        traffic, failure = Traffic(), ""
        try:
            with closing(export_buckets(run.exported, plan, traffic)) as buckets:
                run.engine.update_weights(buckets, version)
        except (EngineError, SynchronisationError) as error:
            if device_failed(error):
                raise
            failure = str(error)
        failures = _gather_failures(run, failure, restarts, f"the weights of step {version}")
        if not failures:
            return _checked(run, plan, traffic)
        run.engine.restart()  # every engine has an update half done
    raise AssertionError("unreachable: the last failure raises")


def recover_engines(run: TrainingRun, failure: str, version: int, restarts: int) -> bool:
    """Did an engine fail in generation (``failure`` on its ranks)? Then start all engines anew and synchronise them.

    All together: where vLLM measures the memory that is left, it waits for every rank of the job. Returns whether one
    failed. Raises :class:`UserError` after ``MAX_RESTARTS``.
    """
    size = run.engine.tensor_model_parallel_size
    if size > 1:
        _wait_for_the_engine(run, failure)
    failures = _gather_failures(run, failure, restarts, "a rollout")
    if size > 1:
        _store().delete_key(_came_out(run.topology.rank))  # all have read it; the next rollout starts anew
    if not failures:
        return False
    run.engine.restart()
    synchronise_engine(run, version)
    return True


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _came_out(rank: int) -> str:
    """The key under which a rank says that its engine's rollout has ended, well or not."""
    return f"engine/out/{rank}"


def _wait_for_the_engine(run: TrainingRun, failure: str) -> None:
    """Every rank of a tensor-parallel engine says in the job's store that it came out of the rollout.

    Where it failed on this rank and others do not come, they wait for this one in a collective of vLLM's, which nothing
    interrupts: the job ends on all ranks with a line that says so.
    """
    rank, size = run.topology.rank, run.engine.tensor_model_parallel_size
    store = _store()
    store.set(_came_out(rank), failure)
    mates = range(rank - rank % size, rank - rank % size + size)
    deadline = time.monotonic() + LOST_AFTER_SECONDS
    while failure:
        waiting = [mate for mate in mates if not store.check([_came_out(mate)])]
        if not waiting:
            return
        if time.monotonic() > deadline:
            run.watch.abort(
                f"the engine of ranks {mates[0]}-{mates[-1]} failed on rank {rank} alone: {failure}; rank(s) "
                f"{', '.join(map(str, waiting))} cannot go on without it. --resume auto continues after the last checkpoint"
            )
        time.sleep(0.2)


def check_plan(run: TrainingRun) -> None:
    """Raise :class:`UserError` when the ranks of a replica would move different bytes. Collective; once per run."""
    sums = all_gather_objects((run.topology.replica, _plan(run).checksum))
    for replica in sorted({replica for replica, _ in sums}):
        found = {checksum for owner, checksum in sums if owner == replica}
        if len(found) > 1:
            raise UserError(
                f"the ranks of replica {replica} planned different weight synchronisations ({', '.join(sorted(found))}); "
                "start all of them from the same release, model directory and configuration"
            )


def _plan(run: TrainingRun) -> ReshardPlan:
    return plan_for(run.exported, run.engine.tensor_model_parallel_size, run.config.rollout.bucket_bytes)


def _check_finite(run: TrainingRun, version: int) -> None:
    broken = not_finite(run.policy) + (run.adapter.adapter.not_finite() if run.adapter is not None else [])
    bad = {rank: names for rank, names in enumerate(all_gather_objects(broken)) if names}
    if bad:
        rank, names = next(iter(bad.items()))
        raise UserError(
            f"after step {version} {names[0]} on rank {rank} is not finite (NaN or infinity; {len(names)} tensors there, "
            f"{len(bad)} ranks): nothing was handed to the engine; go back to the last checkpoint (--resume auto)"
        )


def _gather_failures(run: TrainingRun, failure: str, restarts: int, what: str) -> dict[int, str]:
    """Every failing rank with its reason; logged, and an error once ``restarts`` is used up."""
    try:
        failures = {rank: text for rank, text in enumerate(all_gather_objects(failure)) if text}
    except RuntimeError as error:
        if failure:  # it names the rank that is gone, which the lost connection does not
            raise SynchronisationError(f"{failure} ({what})") from error
        raise
    if not failures:
        return failures
    # The rank whose engine failed says why; the others only that one did not take its bucket.
    reason = min(failures.items(), key=lambda item: ("weight synchronisation" in item[1], item[0]))
    if restarts == MAX_RESTARTS:
        raise UserError(f"the engine of rank {reason[0]} failed {restarts + 1} times with {what}: {reason[1]}")
    if run.topology.rank == 0:
        logger.warning("rank %d: %s; every engine starts anew and %s is repeated", *reason, what)
    return failures


def _checked(run: TrainingRun, plan: ReshardPlan, traffic: Traffic) -> dict[str, float]:
    counted, planned = (traffic.received, traffic.buckets), (plan.received[run.topology.place], len(plan.buckets))
    if counted != planned or traffic.peak > plan.peak_bytes:
        raise RuntimeError(f"weight synchronisation moved {counted} (bytes, buckets), the plan says {planned}")
    return {
        "reshard/bytes": max(plan.received),
        "reshard/bytes_min": max(plan.least),
        "reshard/peak_bucket_bytes": plan.peak_bytes,
    }


def export_policy(run: TrainingRun) -> Path:
    """Write ``run_dir/policy``: weights of the policy, everything else from ``model.path``. An adapter is merged into the
    weights, and stands in ``run_dir/adapter`` as well. Collective."""
    out = run.directory / "policy"
    write_checkpoint(
        out,
        Path(run.config.model.path),
        run.policy.arch,
        torch_dtype(run.config.model.params_dtype),
        lambda shapes: gather_full(run.exported, shapes),
        writer=run.topology.rank == 0,
    )
    if run.adapter is not None:
        tensors, lora = run.adapter.adapter.whole(), run.adapter.adapter.config
        if run.topology.rank == 0:
            where = run.directory / DIRECTORY
            write_adapter(where, tensors, lora.rank, lora.alpha, lora.targets, run.config.model.path)
    return out
