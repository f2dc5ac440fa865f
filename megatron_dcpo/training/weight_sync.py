"""Handing the policy's weights to the engines. Collective over all ranks.

The end of a run: the policy as a Hugging Face directory that any tool can load.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from megatron_dcpo.config import ModelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import Optimizer
from megatron_dcpo.rollout.engine import Engine, EngineError
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.device import device_failed
from megatron_dcpo.runtime.distributed import Collectives, Topology, all_gather_objects
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.run_records import ADAPTER
from megatron_dcpo.training.engine_failures import raise_on_all_ranks
from megatron_dcpo.weights.hf_checkpoint import Writers, write_checkpoint
from megatron_dcpo.weights.reshard import (
    SynchronizationError,
    Traffic,
    export_buckets,
    gather_full,
    not_finite,
)
from megatron_dcpo.weights.reshard_plan import ReshardPlan


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
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.engine = engine
        self.plan = plan
        self.topology = topology
        self.collectives = Collectives()

    def push(self, version: int) -> dict[str, float]:
        """Push the policy's weights into the engines; from then on their responses carry
        ``version``. Collective.

        Returns ``reshard/bytes``, ``reshard/bytes_min`` (received by the rank that receives most,
        and the least possible) and ``reshard/peak_bucket_bytes``: counted in the transport, and
        equal to the plan or RuntimeError. Raises :class:`UserError` when a weight is not finite,
        and :class:`EngineError` on all ranks when an engine failed: then every engine has half an
        update and must restart before the next push.
        """
        self._check_finite(version)
        traffic, failure = Traffic(), ""
        try:
            with closing(export_buckets(self.optimizer.exported, self.plan, traffic)) as buckets:
                self.engine.update_weights(buckets, version)
        except (EngineError, SynchronizationError) as error:
            if device_failed(error):
                raise
            failure = str(error)
        raise_on_all_ranks(failure, self.collectives, f"the weights of step {version}")
        return self._check_traffic(traffic)

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


def writers_of(topology: Topology) -> Writers:
    """Return the ranks of a training as the writers of its policy: the first of each replica."""
    return Writers(
        replica=topology.replica,
        replicas=topology.replicas,
        writes=topology.place == 0,
        leads=topology.rank == 0,
        gather=all_gather_objects,
    )


def export_policy(directory: Path, model: ModelConfig, optimizer: Optimizer) -> Path:
    """Write ``directory/policy``: weights of the policy, everything else from ``model.path``. An
    adapter is merged into the weights, and stands in ``directory/adapter`` as well. The replicas
    divide the files. Collective.
    """
    policy = optimizer.exported
    out = directory / "policy"
    write_checkpoint(
        out,
        Path(model.path),
        policy.arch,
        torch_dtype(model.params_dtype),
        lambda shapes: gather_full(policy, shapes),
        writers=writers_of(policy.topology),
    )
    optimizer.write_adapter(directory / ADAPTER, hub.repository_of(model.path) or model.path)
    return out
