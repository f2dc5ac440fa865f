"""One rank that saves or loads a checkpoint, with our shards of the optimizer's state and with
Megatron's own code.

What moves meanwhile is counted: floating-point tensors in collectives, state written, state read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron_dcpo.checkpoints import optimizer_shards
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.checkpoints.state import checkpoint_state, load_checkpoint, newest_intact
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer, optimizer_parts
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config

COLLECTIVES = (
    "all_gather",
    "gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "scatter",
    "send",
    "recv",
)
STATE = "optimizer.state."


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config({"use_distributed_optimizer": True, **options["parallel"]})
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], options["dtype"], parallel)

    def build():
        policy = build_policy(config.model, parallel, topology)
        return policy, PolicyOptimizer(policy, config)

    policy, optimizer = build()
    (part,) = optimizer_parts(optimizer.megatron)
    out = Path(options["out"])
    if options["mode"] == "save":
        fill(policy, part)
        result = {"digest": digest(policy, part), "own": own_numel(part)}
        with counted_collectives() as moved:
            save(out / "ours", policy, optimizer, topology)
        result["moved"] = moved
        with megatrons_code(), counted_collectives() as moved:
            save(out / "megatron", policy, optimizer, topology)
        result["moved by Megatron"] = len(moved)
        result["written"] = written(out / "ours" / "iter_0000001", topology.rank)
        return result
    assert newest_intact(out / "ours", topology) == (1, {})
    with counted_reads() as read, opened_files() as opened:
        load_checkpoint(out / "ours", 1, policy, optimizer)
    result = {
        "digest": digest(policy, part),
        "own": own_numel(part),
        "read": sum(read.values()),
        "opened": opened,
    }
    for directory, how in (("megatron", contextlib.nullcontext()), ("ours", megatrons_code())):
        policy, optimizer = build()
        with how:
            load_checkpoint(out / directory, 1, policy, optimizer)
        result[f"{directory} read by the other code"] = digest(
            policy, *optimizer_parts(optimizer.megatron)
        )
    return result


def save(directory, policy, optimizer, topology):
    state = checkpoint_state(
        policy, optimizer, 1, dict.fromkeys(("seed", "data", "reward", "engine"), 0)
    )
    saver = Saver(directory, topology.rank, 1, background=False, replicas=topology.replica_group)
    saver.begin(1, state)
    saver.wait()


@torch.no_grad()
def fill(policy, part) -> None:
    """Random values, equal where ranks hold the same, as if the run had gone on for a while."""
    part._init_optimizer_states_with_dummy_values()
    names = {
        p: f"{i}.{name}" for i, gpt in enumerate(policy.gpt) for name, p in gpt.named_parameters()
    }
    at = policy.topology
    for parameter, start, stop in optimizer_shards._owned_ranges(part):
        tp = at.tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
        key = f"{names[parameter]} {start} {stop} {tp} {at.pp_rank}".encode()
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(key).digest()[:6], "little")
        )
        for name, tensor in part._get_main_param_and_optimizer_states(parameter).items():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + (name == "exp_avg"))
    for group in part.optimizer.param_groups:
        group["step"] = 7
    part._copy_main_params_to_model_params()
    for chunk in policy.chunks:
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def digest(policy, part) -> str:
    hashed = hashlib.sha256()
    for gpt in policy.gpt:
        for parameter in gpt.parameters():
            hashed.update(parameter.float().numpy().tobytes())
    for parameter, _, _ in optimizer_shards._owned_ranges(part):
        for name, tensor in sorted(part._get_main_param_and_optimizer_states(parameter).items()):
            hashed.update(name.encode() + tensor.numpy().tobytes())
    hashed.update(str([group["step"] for group in part.optimizer.param_groups]).encode())
    return hashed.hexdigest()


def own_numel(part) -> int:
    return 3 * sum(stop - start for _, start, stop in optimizer_shards._owned_ranges(part))


@contextlib.contextmanager
def megatrons_code():
    ours = optimizer_shards.optimizer_state, optimizer_shards.restore
    optimizer_shards.optimizer_state = lambda optimizer, model, is_loading: (
        optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=optimizer_shards.METADATA
        )
    )
    optimizer_shards.restore = lambda optimizer, loaded: optimizer.load_state_dict(loaded)
    try:
        yield
    finally:
        optimizer_shards.optimizer_state, optimizer_shards.restore = ours


@contextlib.contextmanager
def counted_collectives():
    """[(function, bytes)] of the floating-point tensors that ranks exchange. Objects travel as
    bytes and do not count.
    """
    found, kept = [], {name: getattr(dist, name) for name in COLLECTIVES}

    def watch(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            for item in (*args, *kwargs.values()):
                for tensor in item if isinstance(item, list | tuple) else [item]:
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        found.append((name, tensor.nbytes))
            return function(*args, **kwargs)

        return call

    for name, function in kept.items():
        setattr(dist, name, watch(name, function))
    try:
        yield found
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


@contextlib.contextmanager
def counted_reads():
    """{chunk: numbers} of the optimizer's state that this rank read from the disk, each chunk
    whole.
    """
    found: dict[Any, int] = {}
    read_data, read_metadata = (FileSystemReader.read_data, FileSystemReader.read_metadata)

    def counting(reader, plan, planner):
        metadata = reader.read_metadata()
        for item in plan.items:
            index = item.storage_index
            if index.fqn.startswith(STATE):
                chunks = metadata.state_dict_metadata[index.fqn].chunks
                size = next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset)
                found[index.fqn, tuple(index.offset)] = size.numel()
        return read_data(reader, plan, planner)

    FileSystemReader.read_data = counting
    try:
        yield found
    finally:
        FileSystemReader.read_data, FileSystemReader.read_metadata = (read_data, read_metadata)


@contextlib.contextmanager
def opened_files():
    """Names of the files from which this rank loads without having them in memory."""
    opened: list[str] = []
    create_stream = FileSystem.create_stream

    def listing(system, path, mode):
        opened.append(Path(path).name)
        return create_stream(system, path, mode)

    FileSystem.create_stream = listing
    try:
        yield opened
    finally:
        FileSystem.create_stream = create_stream


def written(directory: Path, rank: int) -> dict[str, int]:
    """Numbers of the optimizer's state and of the weights in this rank's files, and their bytes."""
    metadata = FileSystemReader(directory).read_metadata()
    result = {"optimizer": 0, "weights": 0}
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if place.relative_path.startswith(f"__{rank}_") and hasattr(entry, "chunks"):
            size = next(
                chunk.sizes.numel() for chunk in entry.chunks if chunk.offsets == index.offset
            )
            result["optimizer" if index.fqn.startswith(STATE) else "weights"] += size
    files = json.loads((directory / "integrity.json").read_text())["files"]
    result["bytes"] = sum(
        file["bytes"] for name, file in files.items() if name.startswith(f"__{rank}_")
    )
    return result
