"""Export: the shards of a policy, spread over the TP x PP grid, handed on as slices of Hugging Face
tensors.

This is the transport for :mod:`megatron_dcpo.weights.reshard_plan`. Every rank of a replica goes
through the same buckets: it assembles what it holds, receives the rest in flat messages, hands the
bucket on, and acknowledges it to all others before the buffers are used again. Every rank computes
the same plan, so no metadata is sent.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.distributed import BucketBarrier, Topology
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import Copy, WeightSlice
from megatron_dcpo.weights.reshard_plan import (
    BUCKET_BYTES,
    BucketEntry,
    EngineRanks,
    Message,
    ReshardPlan,
    reshard_plan,
)
from megatron_dcpo.weights.table import hf_shapes


class Shards(Protocol):
    """One rank's shard of the model to export, as ``policy.model.Policy`` has it.

    ``merged`` names the tensors to which the export adds something, on any rank; ``addition``
    returns, in fp32, what is added to a slice of a tensor that this rank holds. ``constants`` are
    tensors of the whole model that training does not change, on every rank, in their own type.
    """

    @property
    def arch(self) -> Architecture: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def copies(self) -> tuple[tuple[Copy, ...], ...]: ...
    @property
    def constants(self) -> Mapping[str, Tensor]: ...
    @property
    def merged(self) -> tuple[str, ...]: ...
    def addition(self, name: str, dim: int, start: int, stop: int) -> Tensor: ...
    def parameters(self, chunk: int) -> dict[str, Tensor]: ...


class SynchronizationError(RuntimeError):
    """A rank did not take a bucket, because it ended or its engine refused. Every rank of the
    replica raises this error.
    """


@dataclass
class Traffic:
    """The bytes that the transport counted on this rank. ``peak`` is the size of its buffers."""

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
        engines=EngineRanks(
            tensor_model_parallel_size=engine_tensor_model_parallel_size,
            replicas=topology.replicas,
            replica=topology.replica,
        ),
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        only=names,
        merged=policy.merged,
    )


def export_buckets(
    policy: Shards, plan: ReshardPlan, traffic: Traffic | None = None
) -> Generator[list[WeightSlice], None, None]:
    """Yield the slices that this rank's engine keeps, bucket by bucket; large ones come in several
    consecutive parts. The model's constants come last, together. Collective over the replica.

    A bucket's values are valid until the next one is requested. If a bucket cannot be taken, close
    the generator (as ``contextlib.closing`` does), so that the other ranks stop as well. Raises
    :class:`SynchronizationError` if another rank stopped or does not answer.
    """
    local = _Local(policy)
    if traffic is None:
        traffic = Traffic()
    new = partial(torch.empty, dtype=local.dtype, device=current_device())
    assembly_buffer = new(plan.assembled // plan.itemsize)
    recv_buffer = new(plan.message // plan.itemsize)
    nbytes = assembly_buffer.nbytes + recv_buffer.nbytes
    traffic.peak = max(traffic.peak, nbytes)
    with ledger.holding("buckets", nbytes):
        yield from _export(
            policy=policy,
            plan=plan,
            traffic=traffic,
            local=local,
            assembly_buffer=assembly_buffer,
            recv_buffer=recv_buffer,
        )
    if plan.constants:
        yield [_whole(name, policy.constants[name]) for name in plan.constants]


def _whole(name: str, values: Tensor) -> WeightSlice:
    return WeightSlice(name=name, dim=0, start=0, values=values)


def _export(
    policy: Shards,
    plan: ReshardPlan,
    traffic: Traffic,
    local: _Local,
    assembly_buffer: Tensor,
    recv_buffer: Tensor,
) -> Generator[list[WeightSlice], None, None]:
    progress = BucketBarrier("reshard", policy.topology.model_group)
    # NCCL creates a group's communicator at the first call, in which all ranks have to take part. A
    # message involves only some of them.
    refused = progress.acknowledge(0, True)
    if refused:
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
    """Yield the whole tensors in ``names`` (by default all), large ones in several parts, on every
    rank of the replica. Collective over the replica.
    """
    plan = plan_for(
        policy=policy, engine_tensor_model_parallel_size=1, bucket_bytes=bucket_bytes, names=names
    )
    for bucket in export_buckets(policy, plan):
        yield from bucket


def gather_full(policy: Shards, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the whole tensors of ``shapes``, on the CPU of every rank of the replica.
    Collective.
    """
    parameter_dtype = next(iter(policy.parameters(0).values())).dtype
    full = {}
    for name, shape in shapes.items():
        dtype = parameter_dtype
        if name in policy.constants:
            dtype = policy.constants[name].dtype
        full[name] = torch.empty(shape, dtype=dtype)
    for slice_ in export_slices(policy, tuple(full)):
        slice_.write_into(full[slice_.name])
    return full


def not_finite(policy: Shards) -> list[str]:
    """Return the names of this rank's tensors that hold a NaN or an infinity. Reads every parameter
    once and copies nothing.
    """
    broken = set()
    for chunk, copies in enumerate(policy.copies):
        for name, parameter in policy.parameters(chunk).items():
            # The sum of finite terms is finite unless it overflows, so that every number is only
            # examined if the sum is not finite.
            if torch.isfinite(parameter.sum(dtype=torch.float32)):
                continue
            if torch.isfinite(parameter).all():
                continue
            for copy in copies:
                if copy.megatron == name and not _finite_slice(parameter, copy):
                    broken.add(copy.hf)
    return sorted(broken)


def _finite_slice(parameter: Tensor, copy: Copy) -> bool:
    return bool(torch.isfinite(parameter.narrow(copy.dim, copy.start, copy.length)).all())


class _Local:
    """The parameters of this rank, by Hugging Face tensor."""

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
        """Return the slices of a bucket: a view of the parameter if it has the whole slice, else a
        part of ``assembly_buffer``, filled with the values that this rank holds.
        """
        targets = {}
        used = 0
        for entry in entries:
            name = entry.hf
            dim, start, stop = entry.slices[self.rank]
            values = self._in_place(name, dim, start, stop)
            if values is None:
                shape = _sliced(self.shapes[name], dim, stop - start)
                values = assembly_buffer[used : used + math.prod(shape)].view(shape)
                used += values.numel()
                self.fill(values, name, start)
            targets[name] = WeightSlice(name=name, dim=dim, start=start, values=values)
        return targets

    def fill(self, values: Tensor, name: str, start: int) -> None:
        """Copy this rank's part of ``name`` into ``values``, which begins at index ``start`` of the
        dimension that is cut.
        """
        for copy, parameter in self._held.get(name, ()):
            dim = copy.dim
            first = max(start, copy.hf_start)
            last = min(start + values.shape[dim], copy.hf_stop)
            if first >= last:
                continue
            source = parameter.narrow(dim, copy.start + first - copy.hf_start, last - first)
            if name in self.policy.merged:
                source = self.policy.addition(name, dim, first, last).add_(source)
            values.narrow(dim, first - start, last - first).copy_(source)

    def _in_place(self, name: str, dim: int, start: int, stop: int) -> Tensor | None:
        if name in self.policy.merged:
            return None
        for copy, parameter in self._held.get(name, ()):
            if copy.hf_start <= start and stop <= copy.hf_stop:
                return parameter.narrow(dim, copy.start + start - copy.hf_start, stop - start)
        return None


def _sliced(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    sliced = list(shape)
    sliced[dim] = length
    return tuple(sliced)


def _exchange(
    policy: Shards,
    local: _Local,
    message: Message,
    targets: dict[str, WeightSlice],
    recv_buffer: Tensor,
) -> int:
    """Send or receive one message; return the bytes that this rank received."""
    sends = local.rank == message.owner
    if not sends and local.rank not in message.readers:
        return 0
    flat = recv_buffer[: message.numel]
    views = []
    for op, values in zip(message.ops, flat.split([op.numel for op in message.ops]), strict=True):
        views.append(values.view(_sliced(local.shapes[op.hf], op.dim, op.stop - op.start)))
    if sends:
        for op, view in zip(message.ops, views, strict=True):
            local.fill(view, op.hf, op.start)
    _communicate(flat, message, sends, policy.topology.model_group)
    if sends:
        return 0
    for op, view in zip(message.ops, views, strict=True):
        target = targets[op.hf]
        start = op.start - target.start
        target.values.narrow(op.dim, start, op.stop - op.start).copy_(view)
    return flat.nbytes


def _communicate(flat: Tensor, message: Message, sends: bool, group: dist.ProcessGroup) -> None:
    if len(message.readers) == dist.get_world_size(group) - 1:
        dist.broadcast(flat, group=group, group_src=message.owner)
        return
    # A batch uses the group's communicator; for single calls NCCL would create one for every pair.
    if sends:
        operations = [
            dist.P2POp(dist.isend, flat, group=group, group_peer=rank) for rank in message.readers
        ]
    else:
        operations = [dist.P2POp(dist.irecv, flat, group=group, group_peer=message.owner)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
