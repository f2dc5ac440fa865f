"""Checkpoints of a run, in Megatron's layout: ``iter_0000120/`` and ``latest_checkpointed_iteration.txt``.

A checkpoint is written under a temporary name, and renamed and announced only when every rank has finished, so whatever
``latest_checkpointed_iteration.txt`` names is complete. It holds model, optimizer, schedule and step. Nothing else is
needed to continue bit for bit: the data order and the random numbers of sampling are functions of seed and step.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.distributed import barrier, broadcast_object

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingException

LATEST = "latest_checkpointed_iteration.txt"
# Resumable at another data-parallel size, also with the distributed optimizer.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def iteration_dir(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def latest_iteration(directory: Path) -> int | None:
    """The newest complete checkpoint in ``directory``, or ``None``. Raises :class:`UserError` when it is not there."""
    tracker = directory / LATEST
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit() or not iteration_dir(directory, int(text)).is_dir():
        raise UserError(
            f"{tracker} names iteration {text!r}, but there is no such checkpoint; delete the file to restart"
        )
    return int(text)


def save_checkpoint(
    directory: Path, iteration: int, policy: Policy, optimizer: Any, scheduler: Any, extra: dict[str, Any], keep: int
) -> None:
    """Write ``iter_<iteration>`` and make it the latest; remove all but the newest ``keep``. Collective.

    Raises :class:`UserError` when the disk refuses; the previous checkpoint stays the latest.
    """
    final = iteration_dir(directory, iteration)
    temporary = final.with_name(final.name + ".tmp")
    error: str | None = None
    if policy.topology.rank == 0:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as refused:
            error = str(refused)
    error = broadcast_object(error)
    if error is None:
        try:
            state = _sharded_state(policy, optimizer, scheduler, is_loading=False) | {
                "run": {"iteration": iteration} | extra
            }
            dist_checkpointing.save(state, str(temporary), content_metadata=_SHARDING)
        except (OSError, CheckpointingException, RuntimeError) as failed:
            error = f"{type(failed).__name__}: {failed}"
    if error is not None:
        raise UserError(
            f"cannot write checkpoint {final} ({' '.join(error.split())}); free space or change run_dir. "
            f"The last complete checkpoint is iteration {latest_iteration(directory)}"
        )
    barrier()
    if policy.topology.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        announce = directory / (LATEST + ".tmp")
        announce.write_text(str(iteration))
        os.replace(announce, directory / LATEST)
        complete = sorted(path for path in directory.glob("iter_*") if path.suffix != ".tmp")
        for old in complete[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    barrier()


def load_checkpoint(directory: Path, iteration: int, policy: Policy, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Restore policy, optimizer and schedule in place; returns the ``extra`` saved with them. Collective.

    Raises :class:`UserError` naming the checkpoint when a part is missing or unreadable.
    """
    path = iteration_dir(directory, iteration)
    state = _sharded_state(policy, optimizer, scheduler, is_loading=True)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
    try:
        loaded = dist_checkpointing.load(state, str(path))
        for index, gpt in enumerate(policy.gpt):
            gpt.load_state_dict(loaded[_model_key(policy, index)], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        for group in optimizer.param_groups:
            group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
        return dict(loaded["run"])
    except (OSError, KeyError, CheckpointingException, RuntimeError) as error:
        raise UserError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from None


def _model_key(policy: Policy, index: int) -> str:
    return "model" if len(policy.gpt) == 1 else f"model{index}"


@torch.no_grad()
def _sharded_state(policy: Policy, optimizer: Any, scheduler: Any, is_loading: bool) -> dict[str, Any]:
    model = {_model_key(policy, index): gpt.sharded_state_dict() for index, gpt in enumerate(policy.gpt)}
    return {
        **model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_SHARDING),
        "opt_param_scheduler": scheduler.state_dict(),
    }
