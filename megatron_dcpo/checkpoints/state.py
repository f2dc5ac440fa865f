"""What a checkpoint holds, and putting it back. Megatron's layout: ``iter_0000120/`` in its
``torch_dist`` format.

Model, optimizer and schedule are Megatron's own state, resumable at another parallel layout. Beside
them stands ``run``: seed, random generators, data cursor, reward state and engine version. The
order of the data is a function of the seed, sampling one of seed and step: the cursor says where to
go on, the generators continue what else draws from them.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_dcpo.checkpoints import optimizer_shards
from megatron_dcpo.checkpoints.manifest import (
    damage,
    iteration_dir,
    iterations,
    latest_iteration,
    listed_files,
)
from megatron_dcpo.checkpoints.reader import CHECKED, SharedRead, cause, describe_error, metadata_of
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.adapter import AdapterOptimizer
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.runtime.device import rng_state, set_rng_state
from megatron_dcpo.runtime.distributed import Topology, all_gather_objects, broadcast_object

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingException

logger = logging.getLogger(__name__)

# What a damaged or hostile checkpoint makes its readers raise. No RuntimeError in general: a lost
# rank raises that.
_UNREADABLE = (
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    MemoryError,
    RecursionError,
    pickle.UnpicklingError,
    CheckpointingException,
    CheckpointException,
)
_WRITER = re.compile(r"__([0-9]{1,9})_")  # the rank in the name of a file
PARTS = ("optimizer", "opt_param_scheduler", "run")
Optimizer = PolicyOptimizer | AdapterOptimizer
RUN_PARTS = ("iteration", "distributed_optimizer", "seed", "rng_state", "data", "engine")


def checkpoint_state(
    policy: Policy, optimizer: Optimizer, iteration: int, run: dict[str, Any]
) -> dict[str, Any]:
    """Return the sharded state to save. ``run``: all of :data:`RUN_PARTS` but iteration and
    generators. Collective.
    """
    state = _sharded_state(policy, optimizer, is_loading=False)
    parts = {
        "iteration": iteration,
        "rng_state": gather_rng_states(policy.topology),
        "distributed_optimizer": optimizer_shards.is_distributed(optimizer.megatron),
    } | run
    assert set(RUN_PARTS) <= set(parts)
    # what dist_checkpointing.save(content_metadata=...) adds
    return state | {"run": parts, "content_metadata": optimizer_shards.METADATA}


def newest_intact(directory: Path, topology: Topology) -> tuple[int | None, dict[int, str]]:
    """Return the newest checkpoint, of those up to the announced one, whose files are as they were
    written, and what is wrong with the newer ones. Every rank reads its share of the files.
    Collective.

    Raises :class:`UserError` when there are checkpoints, but no intact one: training anew would not
    be a resumption.
    """
    announced, present = broadcast_object((latest_iteration(directory), iterations(directory)))
    if announced is None:
        return None, {}
    wrong: dict[int, str] = {}
    if announced not in present:
        wrong[announced] = "the directory is missing"
    for iteration in reversed([i for i in present if i <= announced]):
        problem = _check(iteration_dir(directory, iteration), iteration, topology)
        if problem is None:
            return iteration, wrong
        wrong[iteration] = problem
    listed = "; ".join(f"{iteration_dir(directory, i)}: {why}" for i, why in wrong.items())
    raise UserError(
        f"no intact checkpoint to resume from ({listed}); restore one, or start in another run_dir"
    )


def load_checkpoint(
    directory: Path, iteration: int, policy: Policy, optimizer: Optimizer
) -> dict[str, Any]:
    """Restore policy, optimizer, schedule and random generators in place; returns the ``run`` part.
    Collective.

    Raises :class:`UserError` naming the checkpoint when a part is missing or unreadable.
    """
    path = iteration_dir(directory, iteration)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
    try:
        _check_parts(path, optimizer)
        try:
            wanted = _sharded_state(policy, optimizer, is_loading=True)
            with warnings.catch_warnings():  # of torch, about the type of Megatron's shards
                warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
                loaded = dist_checkpointing.load(
                    wanted, str(path), SharedRead(policy.topology.replica_group)
                )
        finally:
            metadata_of.cache_clear()
            CHECKED.clear()
        for index, gpt in enumerate(policy.gpt):
            result = gpt.load_state_dict(loaded[_model_key(policy, index)], strict=False)
            missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
            if missing:
                raise CheckpointingException(f"parameter {missing[0]} missing")
        optimizer_shards.restore(optimizer.megatron, loaded["optimizer"])
        if isinstance(optimizer, AdapterOptimizer):
            optimizer.restore(loaded["adapter"])
        try:
            _restore_schedule(optimizer, loaded["opt_param_scheduler"])
            _restore_rng_states(policy.topology, loaded["run"]["rng_state"])
        except (
            RuntimeError
        ) as error:  # of torch, for a tensor of another size, or in the place of a number
            raise CheckpointingException(f"opt_param_scheduler or rng_state: {error}") from None
        return dict(loaded["run"])
    except _UNREADABLE as error:
        met = cause(error)
        if isinstance(met, UserError):
            raise met from None
        raise UserError(f"checkpoint {path} cannot be read ({describe_error(met)})") from None


def _restore_schedule(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Take the count of steps from the checkpoint, everything else from the configuration."""
    for group in optimizer.param_groups:
        group["max_lr"] = optimizer.scheduler.max_lr
        group["min_lr"] = optimizer.scheduler.min_lr
    optimizer.scheduler.load_state_dict(loaded)


def _check_parts(path: Path, optimizer: Optimizer) -> None:
    """Check, before anything is loaded, that everything which is not a tensor is there and
    readable.
    """
    metadata_of(path)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"checkpoint {path} cannot be read (common.pt: {describe_error(error)})"
        ) from None
    absent = [part for part in PARTS if not isinstance(common.get(part), dict)]
    absent += [part for part in RUN_PARTS if "run" not in absent and part not in common["run"]]
    if absent:
        raise CheckpointingException(f"it has no {', '.join(absent)}")
    if isinstance(optimizer, AdapterOptimizer):
        adapter = optimizer.adapter
    else:
        adapter = None
    if ("adapter" in common) != (adapter is not None):
        how = "with" if "adapter" in common else "without"
        raise UserError(
            f"checkpoint {path} was saved {how} model.adapter; keep it so to resume, or start "
            "another run_dir"
        )
    if adapter is not None and (then := common["adapter"].get("config")) is not None:
        for key, value in dataclasses.asdict(adapter.config).items():
            if then.get(key) != value:
                raise UserError(
                    f"checkpoint {path} was saved with model.adapter.{key}={then.get(key)}, not "
                    f"{value}; keep it to "
                    "resume, or start another run_dir"
                )
    saved = common["run"]["distributed_optimizer"]
    now = optimizer_shards.is_distributed(optimizer.megatron)
    if not isinstance(saved, bool):
        raise CheckpointingException("run.distributed_optimizer is neither true nor false")
    if saved != now:
        raise UserError(
            f"checkpoint {path} was saved with "
            f"parallel.use_distributed_optimizer={str(saved).lower()}, whose state "
            "Megatron stores in another form; keep the option to resume (TP, PP and DP may change)"
        )


def gather_rng_states(topology: Topology) -> dict[str, Any]:
    """Return the generators of each tensor- and pipeline-parallel rank; data-parallel replicas have
    the same. Collective.
    """
    _, keys, *rest = np.random.get_state(legacy=True)
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": rng_state(),
        "rng_tracker_states": {
            name: state.cpu() if isinstance(state, torch.Tensor) else state
            for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }
    states = [(_place(topology), own)] * (topology.tp_size * topology.pp_size)
    if len(states) > 1:
        dist.all_gather_object(states, states[0], group=parallel_state.get_model_parallel_group())
    return dict(states)


def _restore_rng_states(topology: Topology, states: dict[str, Any]) -> None:
    own = states.get(_place(topology))
    if own is None:
        if topology.rank == 0:
            logger.info("saved at another parallel layout: random generators start from the seed")
        return
    version, internal, gauss = own["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))
    keys, *rest = own["np_rng_state"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(own["torch_rng_state"])
    set_rng_state(own["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(own["rng_tracker_states"])


def _place(topology: Topology) -> str:
    """Return the tensor- and pipeline-parallel rank in its layout."""
    return f"tp{topology.tp_rank}of{topology.tp_size}_pp{topology.pp_rank}of{topology.pp_size}"


def _check(path: Path, iteration: int, topology: Topology) -> str | None:
    """Return what is wrong with a checkpoint, found by all ranks together. At the same layout, a
    rank reads what it wrote.
    """
    problem: str | None = None
    CHECKED.clear()
    try:
        files = listed_files(path, iteration)
        writers = {name: int(match[1]) for name in files if (match := _WRITER.match(name))}
        count = max(writers.values(), default=0) + 1
        world = topology.world_size
        mine = [
            item
            for item in files.items()
            if writers.get(item[0], 0) * world // count == topology.rank
        ]
        problem = damage(path, mine, CHECKED)
    except ValueError as error:
        problem = str(error)
    return next(filter(None, all_gather_objects(problem)), None)


def _model_key(policy: Policy, index: int) -> str:
    return "model" if len(policy.gpt) == 1 else f"model{index}"


@torch.no_grad()
def _sharded_state(policy: Policy, optimizer: Optimizer, is_loading: bool) -> dict[str, Any]:
    model = {
        _model_key(policy, index): gpt.sharded_state_dict() for index, gpt in enumerate(policy.gpt)
    }
    return {
        **model,
        "optimizer": optimizer_shards.optimizer_state(optimizer.megatron, model, is_loading),
        "opt_param_scheduler": optimizer.scheduler.state_dict(),
        **(
            {"adapter": optimizer.sharded_state()}
            if isinstance(optimizer, AdapterOptimizer)
            else {}
        ),
    }
