"""Options that have moved or gone: their old names work for one release, or say what to do instead."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from megatron_dcpo.errors import UserError

logger = logging.getLogger(__name__)

_MEGATRON = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "cp_comm_type",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
RENAMED = {
    **{f"parallel.{name}": f"parallel.megatron.{name}" for name in _MEGATRON},
    **{
        f"optimizer.{name}": f"parallel.megatron.{name}"
        for name in ("adam_beta1", "adam_beta2", "adam_eps")
    },
    **{
        f"rollout.{name}": f"rollout.vllm.{name}"
        for name in ("max_model_len", "enforce_eager", "kv_cache_memory_bytes", "dtype")
    },
    "rollout.sleep": "rollout.vllm.enable_sleep_mode",
    "training.early_stop.patience": "training.early_stop",
}
# Values by which the old option asked for the default: there the new one is left out. Of all others
# None.
_UNSET: dict[str, tuple[Any, ...]] = {
    "rollout.dtype": (None, "same"),
    "rollout.max_model_len": (None, 0),
    "rollout.kv_cache_memory_bytes": (None, 0),
    "training.early_stop.patience": (),
}
_ADAPTER = "the confidence adapter is gone (its code is in commit 80ba0e8); see dcpo calibrate --kind logistic"
_DIGITS = "the gradient over all digits is gone (its code is in commit 80ba0e8)"
_CONSTANT = "it is a constant now"
REMOVED = {
    "rollout.chunks": "each response is judged as soon as it is there; rollout.max_num_seqs "
    "bounds how many come at once",
    "training.train": "model.adapter alone says that an adapter is trained",
    "training.early_stop.metric": "training.early_stop watches the metric of training.keep_best",
    "training.phase_warning_seconds": _CONSTANT,
    "optimizer.adapter_lr": "optimizer.lr is the adapter's where model.adapter is set",
    "model.adapter.activated": _ADAPTER,
    "model.make_vocab_size_divisible_by": "it is 128, as Megatron's; dcpo convert has an option "
    "for other checkpoints",
    "judging.confidence_tokens": _ADAPTER,
    "objective.confidence_parameters": _ADAPTER,
    "objective.confidence_sees": _ADAPTER,
    "objective.confidence_gradient": _DIGITS,
    "objective.digit_damping": _DIGITS,
    "objective.leave_one_out": "the group accuracy is that of all responses, as in the paper",
    "objective.score_clamp": _CONSTANT,
    "objective.one_minus_c_clamp": _CONSTANT,
    **{
        f"objective.clip_{side}_{block}": f"objective.clip_{side} is that of both blocks"
        for side in ("low", "high")
        for block in ("reasoning", "confidence")
    },
    "evaluation.at_start": "a validation before the first step is always made",
    "evaluation.seed": _CONSTANT,
    "logging.samples_per_step": _CONSTANT,
    "logging.tensorboard": "write logging.to=[tensorboard], the default, or logging.to=[]",
    "logging.wandb_project": "write logging.to=[tensorboard,wandb], and logging.project for its "
    "project",
}


def refuse_removed(values: dict[str, Any], source: str) -> None:
    """Raise :class:`UserError` for an option of ``values`` that is gone, with what to do instead."""
    for name, why in REMOVED.items():
        *place, key = name.split(".")
        if key in (_section(values, place) or {}):
            raise UserError(f"{source}: {name} was removed, take it out: {why}")


def move_renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` of a configuration with renamed options in their new places, and say so in
    the log. A file that has both names keeps the new one.
    """
    values = copy.deepcopy(values)
    for old, new in RENAMED.items():
        *place, key = old.split(".")
        holder = _section(values, place)
        if holder is None or key not in holder:
            continue
        value = holder.pop(key)
        if not holder and len(place) > 1:  # a section of before, which has no other option
            _section(values, place[:-1]).pop(place[-1])
        logger.warning("%s is now %s; the old name works in this release", old, new)
        if value not in _UNSET.get(old, (None,)):
            *place, key = new.split(".")
            holder = values
            for part in place:
                holder[part] = holder.get(part) or {}
                holder = (
                    holder[part] if isinstance(holder[part], dict) else {}
                )  # refused as the section that it is not
            holder.setdefault(key, value)
    return values


def _section(values: Any, place: Sequence[str]) -> Any:
    """Return the section at ``place``; None where there is none."""
    for key in place:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None
