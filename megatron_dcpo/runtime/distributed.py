"""Process groups: Megatron's tensor, pipeline and data parallel grid over gloo or NCCL."""

from __future__ import annotations

import os
import pickle
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_dcpo.errors import UserError, check_world_size, one_line, port_in_use
from megatron_dcpo.runtime.device import backend, current_device, has_cuda, set_threads
from megatron_dcpo.runtime.megatron_on_cpu import ensure
from megatron_dcpo.runtime.megatron_private import default_store
from megatron_dcpo.runtime.parallel_sizes import ParallelSizes

ensure()
from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after ensure()

T = TypeVar("T")


@dataclass(frozen=True)
class Topology:
    """Where this rank stands in the grid.

    A replica is the set of ranks that hold the model once (``model_group``): ``width`` consecutive
    ranks of each pipeline stage, which are the tensor-parallel ranks, or the ranks of all experts
    when these are more. The context-parallel ranks of a data-parallel rank share its samples.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    width: int

    @property
    def part(self) -> int:
        """Return the number of this rank within its pipeline stage of its replica."""
        return self.rank % self.width

    @property
    def place(self) -> int:
        """Return the rank in ``model_group``."""
        return self.pp_rank * self.width + self.part

    @property
    def replica(self) -> int:
        """Return the number of the replica. Megatron numbers ranks by tensor, then context (or
        expert), then data, then pipeline rank.
        """
        return self.rank % (self.world_size // self.pp_size) // self.width

    @property
    def replicas(self) -> int:
        return self.world_size // self.pp_size // self.width

    @property
    def reports(self) -> bool:
        """Return whether this rank's statistics count: one rank of those with the same samples."""
        return self.is_last_stage and self.tp_rank == self.cp_rank == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same part of the model, but for experts."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def expert_replica_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same part of the same experts."""
        return parallel_state.get_expert_data_parallel_group()

    @property
    def model_group(self) -> dist.ProcessGroup:
        if self.width > self.tp_size:
            return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        return parallel_state.get_model_parallel_group()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def initialize(
    sizes: ParallelSizes | None = None, *, seed: int = 1, timeout_minutes: int = 30
) -> Topology:
    """Set up the default group and Megatron's groups, and return where this rank stands.

    One process that ``torchrun`` did not start is a world of one. Raises :class:`UserError` when
    the sizes do not divide the world size, or when the port of the job is in use.
    """
    sizes = sizes or ParallelSizes()
    _complete_environment()
    check_world_size(
        sizes.tensor_model_parallel_size,
        sizes.pipeline_model_parallel_size,
        sizes.context_parallel_size,
        int(os.environ.get("WORLD_SIZE", "1")),
        sizes.expert_ranks,
    )
    set_threads()
    if not dist.is_initialized():
        _initialize_default_group(timeout_minutes)
    if not parallel_state.model_parallel_is_initialized():
        virtual = sizes.virtual_pipeline_model_parallel_size
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=sizes.context_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout_minutes,
        )
    # RL trains without dropout, and sampling counts its own random numbers; Megatron still needs
    # its tracker.
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return topology()


def _initialize_default_group(timeout_minutes: int) -> None:
    if has_cuda():
        torch.cuda.set_device(current_device())
    # No device_id: with one, every new group is an ncclCommSplit of the whole world, and Megatron
    # makes several groups per rank. Barriers of this group run over gloo.
    try:
        dist.init_process_group(backend(), timeout=timedelta(minutes=timeout_minutes))
    except dist.DistNetworkError as error:
        if used := port_in_use(error, "MASTER_PORT"):
            raise UserError(used) from None
        raise


def _complete_environment() -> None:
    """Make a process that no launcher started a world of one. Raises :class:`UserError` if the
    environment describes a rank of a job that cannot be reached.
    """
    rank = os.environ.get("RANK")
    size = os.environ.get("WORLD_SIZE")
    if (rank or "0") == "0" and (size or "1") == "1":
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        return
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not os.environ.get(name)
    ]
    if missing:
        raise UserError(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, but not "
            f"{', '.join(missing)}; start the ranks with dcpo launch or torchrun, or unset RANK "
            "and WORLD_SIZE for one process"
        )
    for name, text in (("RANK", rank), ("WORLD_SIZE", size)):
        if not (text or "").isdecimal():
            raise UserError(f"{name}={text} in the environment must be a number")
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={address} cannot be resolved ({one_line(error)}); it must name the first "
            "node of the job"
        ) from None


def topology() -> Topology:
    """Return the grid as initialized."""
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        width=max(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_tensor_and_model_parallel_world_size(),
        ),
    )


def destroy() -> None:
    """Leave the groups; harmless when there are none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Collectives:
    """Collectives of small Python values over all ranks, through one process group.

    Two threads may not share a group: their collectives would meet in any order. A thread that
    samples while the main one trains has a second group (:func:`second_group`).
    """

    group: dist.ProcessGroup | None = None  # None: the default group

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return dist.get_rank()

    @property
    def ranks(self) -> range:
        """Return the numbers of all ranks."""
        return range(dist.get_world_size())

    def barrier(self) -> None:
        """Wait for all ranks."""
        if dist.get_world_size() > 1:
            dist.barrier(group=self.group)

    def max(self, value: int) -> int:
        """Return the largest ``value`` of all ranks."""
        if dist.get_world_size() == 1:
            return value
        device = "cpu" if self.group else current_device()
        box = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return int(box.item())

    def gather(self, value: T) -> list[T]:
        """Return ``value`` of every rank, in rank order, on every rank."""
        if dist.get_world_size() == 1:
            return [value]
        gathered: list[T] = [value] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return ``value`` of rank ``src``, on every rank."""
        if dist.get_world_size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=src, group=self.group)
        return box[0]

    def exchange(self, outgoing: Sequence[T]) -> list[T]:
        """Send ``outgoing[r]`` to every rank r; return what each rank sent to this one."""
        if dist.get_world_size() == 1:
            return list(outgoing)
        payloads = [pickle.dumps(value, protocol=5) for value in outgoing]
        sent = [len(payload) for payload in payloads]
        received = [sizes[dist.get_rank()] for sizes in self.gather(sent)]
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(
            incoming,
            torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8),
            output_split_sizes=received,
            input_split_sizes=sent,
            group=self.group,
        )
        return [pickle.loads(part.numpy().data) for part in incoming.split(received)]


def second_group(timeout_minutes: int) -> dist.ProcessGroup | None:
    """Return a second group of all ranks, over gloo on the host; None for a single rank.
    Collective.
    """
    if dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))


def barrier() -> None:
    """Wait for all ranks, through the default group."""
    Collectives().barrier()


def max_over_ranks(value: int) -> int:
    """Return the largest ``value`` of all ranks, through the default group."""
    return Collectives().max(value)


def all_gather_objects(value: T) -> list[T]:
    """Return ``value`` of every rank, in rank order, through the default group."""
    return Collectives().gather(value)


def broadcast_object(value: T, src: int = 0) -> T:
    """Return ``value`` of rank ``src`` on every rank, through the default group."""
    return Collectives().broadcast(value, src)


class BucketBarrier:
    """How far every rank of ``group`` has come in a sequence of numbered steps, and which did not.

    :meth:`acknowledge` waits for all ranks. Each also leaves its number in the store of the process
    groups, which outlives a rank (torchrun's agent keeps it), so that the others can name the one
    that has ended.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.group = name, group
        self.ranks = dist.get_process_group_ranks(group)
        self._store = default_store()
        self._say(0)

    def acknowledge(self, number: int, accepted: bool) -> str:
        """Tell the group that this rank is done with step ``number``; returns which ranks refused
        it, empty if none did.

        A rank that does not answer is refused by name, too.
        """
        if len(self.ranks) == 1:
            return "" if accepted else "this rank's engine did not take it"
        self._say(number)
        own_answer = torch.tensor(
            [number, int(accepted)], dtype=torch.int64, device=current_device()
        )
        answers = [torch.zeros_like(own_answer) for _ in self.ranks]
        try:
            dist.all_gather(answers, own_answer, group=self.group)
        except RuntimeError as error:
            return f"{self.who_is_behind(number)} ({one_line(error, 200)})"
        refused = [
            r
            for r, answer in zip(self.ranks, answers, strict=True)
            if answer.tolist() != [number, 1]
        ]
        return (
            f"the engine of rank(s) {', '.join(map(str, refused))} did not take it"
            if refused
            else ""
        )

    def who_is_behind(self, number: int) -> str:
        """Return the ranks that have not reached ``number``, by what they left in the store."""
        late = []
        for rank in self.ranks:
            try:
                key = f"{self.name}/{rank}"
                done = int(self._store.get(key)) if self._store.check([key]) else 0
            except (RuntimeError, ValueError):
                return "a rank did not answer, and neither did the store of the process groups"
            if done < number and rank != dist.get_rank():
                late.append(f"rank {rank} stopped after step {done}")
        return "; ".join(late) or "a rank did not answer"

    def _say(self, number: int) -> None:
        self._store.set(f"{self.name}/{dist.get_rank()}", str(number))
