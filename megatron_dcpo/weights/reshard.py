"""Export direction: the policy's shards, on whichever rank of the TP x PP grid, handed on as
Hugging Face slices.

The transport of :mod:`megatron_dcpo.weights.reshard_plan`. Every rank of a replica walks the same
buckets: it puts together what it holds, receives the rest in flat messages, hands the bucket on,
and acknowledges it to all others before the buffers are used again. The plan is computed on every
rank alike, so no metadata is sent.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.distributed import BucketBarrier, Topology
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import Copy, WeightSlice
from megatron_dcpo.weights.reshard_plan import (
    BUCKET_BYTES,
    BucketEntry,
    Message,
    ReshardPlan,
    reshard_plan,
)
from megatron_dcpo.weights.table import hf_shapes


class Shards(Protocol):
    """What is exported: one rank's op of a model, as ``policy.model.Policy`` has it."""

    @property
    def arch(self) -> Architecture: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def copies(self) -> tuple[tuple[Copy, ...], ...]: ...
    @property
    def merged(
        self,
    ) -> tuple[str, ...]: ...  # tensors that are exported with an addition, on any rank
    def addition(
        self, name: str, dim: int, start: int, stop: int
    ) -> Tensor: ...  # fp32, of a tensor this rank holds
    def parameters(self, chunk: int) -> dict[str, Tensor]: ...


class SynchronizationError(RuntimeError):
    """A rank did not take a bucket: it ended, or its engine refused. Every rank of the replica
    raises it.
    """


@dataclass
class Traffic:
    """What the transport counted on this rank, in bytes. ``peak``: of its buffers."""

    received: int = 0
    peak: int = 0
    buckets: int = 0


def plan_for(
    policy: Shards,
    engine_tensor_model_parallel_size: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    names: tuple[str, ...] | None = None,
) -> ReshardPlan:
    """Return the plan of this rank's replica."""
    topology = policy.topology
    itemsize = next(iter(policy.parameters(0).values())).element_size()
    return reshard_plan(
        arch=policy.arch,
        layout=policy.layout,
        engine_tensor_model_parallel_size=engine_tensor_model_parallel_size,
        replicas=topology.replicas,
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        only=names,
        replica=topology.replica,
        merged=policy.merged,
    )


def export_buckets(
    policy: Shards, plan: ReshardPlan, traffic: Traffic | None = None
) -> Generator[list[WeightSlice], None, None]:
    """Yield the slices this rank's engine keeps, bucket by bucket; large ones come in several
    parts, one after the other. Collective over the replica.

    A bucket's values are valid until the next one is asked for. Close the generator when a bucket
    cannot be taken (as ``contextlib.closing`` does): the other ranks then stop as well. Raises
    :class:`SynchronizationError` when another rank did, or does not answer.
    """
    local = _Local(policy)
    traffic = traffic if traffic is not None else Traffic()
    dtype = local.dtype
    device = current_device()
    assembly_buffer = torch.empty(plan.assembled // plan.itemsize, dtype=dtype, device=device)
    recv_buffer = torch.empty(plan.message // plan.itemsize, dtype=dtype, device=device)
    traffic.peak = max(traffic.peak, assembly_buffer.nbytes + recv_buffer.nbytes)
    with ledger.holding("buckets", assembly_buffer.nbytes + recv_buffer.nbytes):
        yield from _export(
            policy=policy,
            plan=plan,
            traffic=traffic,
            local=local,
            assembly_buffer=assembly_buffer,
            recv_buffer=recv_buffer,
        )


def _export(
    policy: Shards,
    plan: ReshardPlan,
    traffic: Traffic,
    local: _Local,
    assembly_buffer: Tensor,
    recv_buffer: Tensor,
) -> Generator[list[WeightSlice], None, None]:
    progress = BucketBarrier("reshard", policy.topology.model_group)
    # NCCL makes a group's communicator at its first call, which has to be one of all its ranks; a
    # message is of some.
    if refused := progress.acknowledge(0, True):
        raise SynchronizationError(f"weight synchronization: {refused}")
    for number, bucket in enumerate(plan.buckets, 1):
        where = f"weight synchronization, bucket {number} of {len(plan.buckets)}"
        try:
            targets = local.targets(bucket.entries, assembly_buffer)
            for message in bucket.messages:
                traffic.received += _exchange(
                    policy=policy,
                    local=local,
                    message=message,
                    targets=targets,
                    recv_buffer=recv_buffer,
                )
        except RuntimeError as error:
            raise SynchronizationError(
                f"{where}: {progress.who_is_behind(number)} ({one_line(error, 200)})"
            ) from error
        accepted = False
        try:
            yield [targets[entry.hf] for entry in bucket.entries]
            accepted = True
        finally:
            refused = progress.acknowledge(number, accepted)
        if refused:
            raise SynchronizationError(f"{where}: {refused}")
        traffic.buckets += 1


def export_slices(
    policy: Shards, names: tuple[str, ...] | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightSlice]:
    """Yield the whole tensors named in ``names`` (default: all), large ones in several parts, on
    every rank of the replica. Collective over the replica.
    """
    for bucket in export_buckets(
        policy,
        plan_for(
            policy=policy,
            engine_tensor_model_parallel_size=1,
            bucket_bytes=bucket_bytes,
            names=names,
        ),
    ):
        yield from bucket


def gather_full(policy: Shards, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the full tensors named in ``shapes``, on every rank of the replica, on the CPU.
    Collective.
    """
    dtype = next(iter(policy.parameters(0).values())).dtype
    full = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for slice_ in export_slices(policy, tuple(full)):
        slice_.write_into(full[slice_.name])
    return full


def not_finite(policy: Shards) -> list[str]:
    """Return the names of this rank's tensors that hold a NaN or an infinity. Reads every parameter
    once, copies nothing.
    """
    broken = []
    for chunk, copies in enumerate(policy.copies):
        for name, parameter in policy.parameters(chunk).items():
            # A sum is finite when all its terms are, unless it overflows; only then is every number
            # looked at.
            if (
                not torch.isfinite(parameter.sum(dtype=torch.float32))
                and not torch.isfinite(parameter).all()
            ):
                broken += [
                    c.hf for c in copies if c.megatron == name and not _finite_slice(parameter, c)
                ]
    return sorted(set(broken))


def _finite_slice(parameter: Tensor, copy: Copy) -> bool:
    return bool(torch.isfinite(parameter.narrow(copy.dim, copy.start, copy.length)).all())


class _Local:
    """What this rank holds, by Hugging Face tensor."""

    def __init__(self, policy: Shards) -> None:
        self.policy = policy
        topology = policy.topology
        self.rank = topology.place
        self.shapes = hf_shapes(policy.arch)
        self._held: dict[str, list[tuple[Copy, Tensor]]] = {}
        for chunk, copies in enumerate(policy.copies):
            parameters = policy.parameters(chunk)
            for copy in copies:
                self._held.setdefault(copy.hf, []).append((copy, parameters[copy.megatron]))
        self.dtype = next(iter(policy.parameters(0).values())).dtype

    def targets(
        self, entries: Sequence[BucketEntry], assembly_buffer: Tensor
    ) -> dict[str, WeightSlice]:
        """Return where the slices of a bucket are or will be: the parameter itself where it has all
        of one, else a part of ``assembly_buffer``, filled with what this rank holds.
        """
        targets = {}
        used = 0
        for entry in entries:
            name = entry.hf
            (dim, start, stop) = entry.slices[self.rank]
            values = self._in_place(
                name=name,
                dim=dim,
                start=start,
                stop=stop,
            )
            if values is None:
                shape = _sliced(self.shapes[name], dim, stop - start)
                values = assembly_buffer[used : used + math.prod(shape)].view(shape)
                used += values.numel()
                self.fill(values, name, start)
            targets[name] = WeightSlice(
                name=name,
                dim=dim,
                start=start,
                values=values,
            )
        return targets

    def fill(self, values: Tensor, name: str, start: int) -> None:
        """Copy what is held of ``name`` into ``values``, which begins at index ``start`` of its cut
        dimension.
        """
        for copy, parameter in self._held.get(name, ()):
            first = max(start, copy.hf_start)
            last = min(start + values.shape[copy.dim], copy.hf_stop)
            if first < last:
                source = parameter.narrow(
                    copy.dim, copy.start + first - copy.hf_start, last - first
                )
                if name in self.policy.merged:
                    source = self.policy.addition(name, copy.dim, first, last).add_(source)
                values.narrow(copy.dim, first - start, last - first).copy_(source)

    def _in_place(self, name: str, dim: int, start: int, stop: int) -> Tensor | None:
        if name in self.policy.merged:
            return None
        for copy, parameter in self._held.get(name, ()):
            if copy.hf_start <= start and stop <= copy.hf_stop:
                return parameter.narrow(dim, copy.start + start - copy.hf_start, stop - start)
        return None


def _sliced(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return tuple(length if d == dim else n for d, n in enumerate(shape))


def _exchange(
    policy: Shards,
    local: _Local,
    message: Message,
    targets: dict[str, WeightSlice],
    recv_buffer: Tensor,
) -> int:
    """Send or receive one message; returns the bytes this rank received."""
    if local.rank != message.owner and local.rank not in message.readers:
        return 0
    group = policy.topology.model_group
    flat = recv_buffer[: message.numel]
    shapes = [_sliced(local.shapes[op.hf], op.dim, op.stop - op.start) for op in message.ops]
    views = [
        v.view(s) for v, s in zip(flat.split([op.numel for op in message.ops]), shapes, strict=True)
    ]
    sends = local.rank == message.owner
    if sends:
        for op, view in zip(message.ops, views, strict=True):
            local.fill(view, op.hf, op.start)
    if len(message.readers) == dist.get_world_size(group) - 1:
        dist.broadcast(flat, group=group, group_src=message.owner)
    else:  # as a batch, in the group's own communicator: NCCL would make one more for every pair
        if sends:
            way = dist.isend
            others = message.readers
        else:
            way = dist.irecv
            others = (message.owner,)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(way, flat, group=group, group_peer=rank) for rank in others]
        ):
            work.wait()
    if sends:
        return 0
    for op, view in zip(message.ops, views, strict=True):
        target = targets[op.hf]
        target.values.narrow(op.dim, op.start - target.start, op.stop - op.start).copy_(view)
    return flat.nbytes
