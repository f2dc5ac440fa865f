"""The state that a checkpoint holds, and how it is restored. The layout is Megatron's,
``iter_0000120/`` in its ``torch_dist`` format.

Model, optimizer and schedule are Megatron's own state, which can be resumed at another parallel
layout. In addition there is ``run``: seed, random generators, data cursor, reward state and engine
version. The order of the data is a function of the seed, and sampling a function of seed and step,
so the cursor says where to continue, and the generators serve everything else that draws from them.
"""

from __future__ import annotations

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
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import Optimizer
from megatron_dcpo.runtime.device import rng_state, set_rng_state
from megatron_dcpo.runtime.distributed import Topology, all_gather_objects, broadcast_object

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingException

logger = logging.getLogger(__name__)

# The errors that a damaged or hostile checkpoint causes in its readers. RuntimeError is not among
# them, because a lost rank raises it.
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
RUN_PARTS = ("iteration", "distributed_optimizer", "seed", "rng_state", "data", "engine")


def checkpoint_state(
    policy: Policy, optimizer: Optimizer, iteration: int, run: dict[str, Any]
) -> dict[str, Any]:
    """Return the sharded state to save. ``run`` has all of :data:`RUN_PARTS` except iteration,
    generators and ``distributed_optimizer``. Collective.
    """
    state = _sharded_state(policy, optimizer, is_loading=False)
    parts = {
        "iteration": iteration,
        "rng_state": gather_rng_states(policy.topology),
        "distributed_optimizer": optimizer_shards.is_distributed(optimizer.megatron),
        **run,
    }
    assert set(RUN_PARTS) <= set(parts)
    state["run"] = parts
    # dist_checkpointing.save adds this for its argument content_metadata
    state["content_metadata"] = optimizer_shards.METADATA
    return state


def newest_intact(directory: Path, topology: Topology) -> tuple[int | None, dict[int, str]]:
    """Return the newest checkpoint, up to the announced one, whose files are as they were written,
    and what is wrong with the newer ones. Every rank reads a share of the files. Collective.

    Raises :class:`UserError` if there are checkpoints but none is intact: starting from the
    beginning would not be a resumption.
    """
    announced, present = broadcast_object((latest_iteration(directory), iterations(directory)))
    if announced is None:
        return None, {}
    problems: dict[int, str] = {}
    if announced not in present:
        problems[announced] = "the directory is missing"
    for iteration in reversed(present):
        if iteration > announced:
            continue
        problem = _check(iteration_dir(directory, iteration), iteration, topology)
        if problem is None:
            return iteration, problems
        problems[iteration] = problem
    listed = "; ".join(
        f"{iteration_dir(directory, iteration)}: {problem}"
        for iteration, problem in problems.items()
    )
    raise UserError(
        f"no intact checkpoint to resume from ({listed}); restore one, or start in another run_dir"
    )


def load_checkpoint(
    directory: Path, iteration: int, policy: Policy, optimizer: Optimizer
) -> dict[str, Any]:
    """Restore policy, optimizer, schedule and random generators in place; return the ``run`` part.
    Collective.

    Raises :class:`UserError` naming the checkpoint if a part is missing or unreadable.
    """
    path = iteration_dir(directory, iteration)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
    try:
        _check_parts(path, optimizer)
        loaded = _load(path, policy, optimizer)
        _restore(loaded, policy, optimizer)
        return dict(loaded["run"])
    except _UNREADABLE as error:
        original = cause(error)
        if isinstance(original, UserError):
            raise original from None
        raise UserError(f"checkpoint {path} cannot be read ({describe_error(original)})") from None


def _load(path: Path, policy: Policy, optimizer: Optimizer) -> dict[str, Any]:
    try:
        wanted = _sharded_state(policy, optimizer, is_loading=True)
        strategy = SharedRead(policy.topology.replica_group)
        with warnings.catch_warnings():  # from torch, about the type of Megatron's shards
            warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
            return dist_checkpointing.load(wanted, str(path), strategy)
    finally:
        metadata_of.cache_clear()
        CHECKED.clear()


def _restore(loaded: dict[str, Any], policy: Policy, optimizer: Optimizer) -> None:
    for index, gpt in enumerate(policy.gpt):
        result = gpt.load_state_dict(loaded[_model_key(policy, index)], strict=False)
        missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
        if missing:
            raise CheckpointingException(f"parameter {missing[0]} missing")
    _check_constants(policy)
    optimizer_shards.restore(optimizer.megatron, loaded["optimizer"])
    optimizer.restore_adapter(loaded.get("adapter", {}))
    try:
        _restore_schedule(optimizer, loaded["opt_param_scheduler"])
        _restore_rng_states(policy.topology, loaded["run"]["rng_state"])
    except RuntimeError as error:  # from torch, for a tensor of another size or instead of a number
        raise CheckpointingException(f"opt_param_scheduler or rng_state: {error}") from None


def _check_constants(policy: Policy) -> None:
    """Raise :class:`UserError` if the checkpoint has other constants than ``model.path``, from
    which engines get them.
    """
    for chunk, copies in enumerate(policy.copies):
        restored = policy.parameters(chunk)
        for copy in copies:
            expected = policy.constants.get(copy.hf)
            if expected is None or torch.equal(restored[copy.megatron], expected):
                continue
            raise UserError(
                f"{copy.hf} in the checkpoint is not that of model.path, and training does not "
                "change it; resume with the model that the run began with"
            )


def _restore_schedule(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Take the number of steps from the checkpoint, everything else from the configuration."""
    for group in optimizer.param_groups:
        group["max_lr"] = optimizer.scheduler.max_lr
        group["min_lr"] = optimizer.scheduler.min_lr
    optimizer.scheduler.load_state_dict(loaded)


def _check_parts(path: Path, optimizer: Optimizer) -> None:
    """Check, before anything is loaded, that all parts other than tensors are readable."""
    metadata_of(path)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"checkpoint {path} cannot be read (common.pt: {describe_error(error)})"
        ) from None
    absent = [part for part in PARTS if not isinstance(common.get(part), dict)]
    if "run" not in absent:
        absent += [part for part in RUN_PARTS if part not in common["run"]]
    if absent:
        raise CheckpointingException(f"it has no {', '.join(absent)}")
    _check_adapter(path, common, optimizer)
    saved = common["run"]["distributed_optimizer"]
    now = optimizer_shards.is_distributed(optimizer.megatron)
    if not isinstance(saved, bool):
        raise CheckpointingException("run.distributed_optimizer is neither true nor false")
    if saved != now:
        raise UserError(
            f"checkpoint {path} was saved with "
            f"parallel.use_distributed_optimizer={str(saved).lower()}, whose state Megatron stores "
            "in another form; keep the option to resume (TP, PP and DP may change)"
        )


def _check_adapter(path: Path, common: dict[str, Any], optimizer: Optimizer) -> None:
    """Raise :class:`UserError` if the checkpoint was saved with another ``model.adapter``."""
    options = optimizer.adapter_options
    if ("adapter" in common) != (options is not None):
        how = "with" if "adapter" in common else "without"
        raise UserError(
            f"checkpoint {path} was saved {how} model.adapter; resume with the same setting, or "
            "start another run_dir"
        )
    if options is None:
        return
    saved = common["adapter"]["config"]
    for key, value in options.items():
        if saved.get(key) != value:
            raise UserError(
                f"checkpoint {path} was saved with model.adapter.{key}={saved.get(key)}, not "
                f"{value}; keep it to resume, or start another run_dir"
            )


def gather_rng_states(topology: Topology) -> dict[str, Any]:
    """Return the generators of each tensor- and pipeline-parallel rank; data-parallel replicas have
    the same ones. Collective.
    """
    trackers = {}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        if isinstance(state, torch.Tensor):
            state = state.cpu()
        trackers[name] = state
    _, keys, *rest = np.random.get_state(legacy=True)
    generators = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": rng_state(),
        "rng_tracker_states": trackers,
    }
    states = [(_rank_name(topology), generators)] * (topology.tp_size * topology.pp_size)
    if len(states) > 1:
        dist.all_gather_object(states, states[0], group=parallel_state.get_model_parallel_group())
    return dict(states)


def _restore_rng_states(topology: Topology, states: dict[str, Any]) -> None:
    state = states.get(_rank_name(topology))
    if state is None:
        if topology.rank == 0:
            logger.info("saved at another parallel layout: random generators start from the seed")
        return
    version, internal, gauss = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))
    keys, *rest = state["np_rng_state"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch_rng_state"])
    set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _rank_name(topology: Topology) -> str:
    """Return the name of the tensor- and pipeline-parallel rank in its layout."""
    return f"tp{topology.tp_rank}of{topology.tp_size}_pp{topology.pp_rank}of{topology.pp_size}"


def _check(path: Path, iteration: int, topology: Topology) -> str | None:
    """Return what is wrong with a checkpoint, if anything. All ranks check it together; at the same
    layout, a rank reads the files that it wrote.
    """
    problem: str | None = None
    CHECKED.clear()
    try:
        files = listed_files(path, iteration)
        writers = {}
        for name in files:
            match = _WRITER.match(name)
            if match:
                writers[name] = int(match[1])
        count = max(writers.values(), default=0) + 1
        share = []
        for name, expected in files.items():
            if writers.get(name, 0) * topology.world_size // count == topology.rank:
                share.append((name, expected))
        problem = damage(path, share, CHECKED)
    except ValueError as error:
        problem = str(error)
    return next(filter(None, all_gather_objects(problem)), None)


def _model_key(policy: Policy, index: int) -> str:
    if len(policy.gpt) == 1:
        return "model"
    return f"model{index}"


@torch.no_grad()
def _sharded_state(policy: Policy, optimizer: Optimizer, is_loading: bool) -> dict[str, Any]:
    model = {}
    for index, gpt in enumerate(policy.gpt):
        model[_model_key(policy, index)] = gpt.sharded_state_dict()
    state = dict(model)
    state["optimizer"] = optimizer_shards.optimizer_state(optimizer.megatron, model, is_loading)
    state["opt_param_scheduler"] = optimizer.scheduler.state_dict()
    if optimizer.adapter_options is not None:
        state["adapter"] = optimizer.adapter_state()
    return state
