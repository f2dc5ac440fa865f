"""Handing the policy's weights to the engines, and restarting engines that failed. Collective
over all ranks.

The end of a run: the policy as a Hugging Face directory that any tool can load.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

from megatron_dcpo.checkpoints.state import Optimizer
from megatron_dcpo.config import ModelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.adapter import Adapter, AdapterOptimizer
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.rollout import Engine, EngineError
from megatron_dcpo.runtime.device import device_failed
from megatron_dcpo.runtime.distributed import Topology, all_gather_objects
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.megatron_private import default_store
from megatron_dcpo.runtime.watchdog import LOST_AFTER_SECONDS, Watchdog
from megatron_dcpo.weights.hf_checkpoint import write_checkpoint
from megatron_dcpo.weights.peft_adapter import DIRECTORY, write_adapter
from megatron_dcpo.weights.reshard import (
    SynchronizationError,
    Traffic,
    export_buckets,
    gather_full,
    not_finite,
)
from megatron_dcpo.weights.reshard_plan import ReshardPlan

logger = logging.getLogger(__name__)

MAX_RESTARTS = 2  # of the engines, within one rollout or one synchronization


class WeightSync:
    """Hands the weights of ``policy`` to this rank's ``engine``, bucket by bucket as the ``plan``
    says.

    ``optimizer`` exports the policy, with its adapter merged if it trains one. All methods are
    collective.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        engine: Engine,
        plan: ReshardPlan,
        topology: Topology,
        watch: Watchdog,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.engine = engine
        self.plan = plan
        self.topology = topology
        self.watch = watch

    def push(self, version: int) -> dict[str, float]:
        """Push the policy's weights into the engines; from then on their responses carry
        ``version``. Collective.

        Returns ``reshard/bytes``, ``reshard/bytes_min`` (received by the rank that receives most,
        and the least possible) and ``reshard/peak_bucket_bytes``: counted in the transport, and
        equal to the plan or RuntimeError. Raises :class:`UserError` when a weight is not finite,
        and when an engine fails repeatedly; the run's checkpoints stay.
        """
        self._check_finite(version)
        for restarts in range(MAX_RESTARTS + 1):
            traffic, failure = Traffic(), ""
            try:
                with closing(
                    export_buckets(self.optimizer.exported, self.plan, traffic)
                ) as buckets:
                    self.engine.update_weights(buckets, version)
            except (EngineError, SynchronizationError) as error:
                if device_failed(error):
                    raise
                failure = str(error)
            if not self._gather_failures(failure, restarts, f"the weights of step {version}"):
                return self._check_traffic(traffic)
            self.engine.restart()  # every engine has an update half done
        raise AssertionError("unreachable: the last failure raises")

    def recover(self, failure: str, version: int, restarts: int) -> bool:
        """Restart all engines and synchronize them, if one failed in generation (``failure`` on
        its ranks). Collective.

        All together: when vLLM measures the memory that is left, it waits for every rank of the
        job. Returns whether one failed. Raises :class:`UserError` after ``MAX_RESTARTS``.
        """
        size = self.engine.tensor_model_parallel_size
        if size > 1:
            self._join_engine_ranks(failure)
        failures = self._gather_failures(failure, restarts, "a rollout")
        if size > 1:
            default_store().delete_key(_rollout_done_key(self.topology.rank))  # all have read it
        if not failures:
            return False
        self.engine.restart()
        self.push(version)
        return True

    def check_plan(self) -> None:
        """Raise :class:`UserError` when the ranks of a replica would move different bytes.
        Collective; once per run.
        """
        sums = all_gather_objects((self.topology.replica, self.plan.checksum))
        for replica in sorted({replica for replica, _ in sums}):
            checksums = {checksum for owner, checksum in sums if owner == replica}
            if len(checksums) > 1:
                raise UserError(
                    f"the ranks of replica {replica} planned different weight synchronizations "
                    f"({', '.join(sorted(checksums))}); start all of them from the same release, "
                    "model directory and "
                    "configuration"
                )

    def _join_engine_ranks(self, failure: str) -> None:
        """Say in the job's store that this rank of a tensor-parallel engine came out of the
        rollout.

        Where it failed on this rank and others do not come, they wait for this one in a collective
        of vLLM's, which nothing interrupts: the job ends on all ranks with a line that says so.
        """
        rank, size = self.topology.rank, self.engine.tensor_model_parallel_size
        store = default_store()
        store.set(_rollout_done_key(rank), failure)
        mates = range(rank - rank % size, rank - rank % size + size)
        deadline = time.monotonic() + LOST_AFTER_SECONDS
        while failure:
            waiting = [mate for mate in mates if not store.check([_rollout_done_key(mate)])]
            if not waiting:
                return
            if time.monotonic() > deadline:
                self.watch.abort(
                    f"the engine of ranks {mates[0]}-{mates[-1]} failed on rank {rank} alone: "
                    f"{failure}; rank(s) "
                    f"{', '.join(map(str, waiting))} cannot go on without it. --resume auto "
                    "continues after the last "
                    "checkpoint"
                )
            time.sleep(0.2)

    def _check_finite(self, version: int) -> None:
        broken = not_finite(self.policy) + self.optimizer.not_finite()
        bad = {rank: names for rank, names in enumerate(all_gather_objects(broken)) if names}
        if bad:
            rank, names = next(iter(bad.items()))
            raise UserError(
                f"after step {version} {names[0]} on rank {rank} is not finite (NaN or infinity; "
                f"{len(names)} tensors "
                f"there, {len(bad)} ranks): nothing was handed to the engine; go back to the last "
                "checkpoint (--resume auto)"
            )

    def _gather_failures(self, failure: str, restarts: int, what: str) -> dict[int, str]:
        """Return every failing rank with its reason; logged, and an error once ``restarts`` is used
        up. Collective.
        """
        try:
            failures = {rank: text for rank, text in enumerate(all_gather_objects(failure)) if text}
        except RuntimeError as error:
            if failure:  # it names the rank that is gone, which the lost connection does not
                raise SynchronizationError(f"{failure} ({what})") from error
            raise
        if not failures:
            return failures
        # The rank whose engine failed says why; the others only that one did not take its bucket.
        reason = min(
            failures.items(), key=lambda item: ("weight synchronization" in item[1], item[0])
        )
        if restarts == MAX_RESTARTS:
            raise UserError(
                f"the engine of rank {reason[0]} failed {restarts + 1} times with {what}: "
                f"{reason[1]}"
            )
        if self.topology.rank == 0:
            logger.warning(
                "rank %d: %s; every engine is restarted and %s is repeated", *reason, what
            )
        return failures

    def _check_traffic(self, traffic: Traffic) -> dict[str, float]:
        plan = self.plan
        counted, planned = (
            (traffic.received, traffic.buckets),
            (plan.received[self.topology.place], len(plan.buckets)),
        )
        if counted != planned or traffic.peak > plan.peak_bytes:
            raise RuntimeError(
                f"weight synchronization moved {counted} (bytes, buckets), the plan says {planned}"
            )
        return {
            "reshard/bytes": max(plan.received),
            "reshard/bytes_min": max(plan.least),
            "reshard/peak_bucket_bytes": plan.peak_bytes,
        }


def _rollout_done_key(rank: int) -> str:
    """Return the key under which a rank says that its engine's rollout has ended, well or not."""
    return f"engine/out/{rank}"


def export_policy(directory: Path, model: ModelConfig, optimizer: Optimizer) -> Path:
    """Write ``directory/policy``: weights of the policy, everything else from ``model.path``. An
    adapter is merged into the weights, and stands in ``directory/adapter`` as well. Collective.
    """
    policy = optimizer.exported
    writer = policy.topology.rank == 0
    out = directory / "policy"
    write_checkpoint(
        out,
        Path(model.path),
        policy.arch,
        torch_dtype(model.params_dtype),
        lambda shapes: gather_full(policy, shapes),
        writer=writer,
    )
    if isinstance(optimizer, AdapterOptimizer):
        export_adapter(directory, model, optimizer.adapter)
    return out


def export_adapter(directory: Path, model: ModelConfig, adapter: Adapter) -> Path:
    """Write ``directory/adapter`` in PEFT's format. Collective."""
    tensors = adapter.whole()
    out = directory / DIRECTORY
    if adapter.policy.topology.rank == 0:
        write_adapter(out, tensors, shape=adapter.shape, base=model.path)
    return out
