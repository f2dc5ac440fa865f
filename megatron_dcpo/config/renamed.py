"""Options that have moved or gone: their old names work for one release, or say what to do instead."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

_MEGATRON = (
    *(
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    ),
    *(
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
    ),
    *("cp_comm_type", "overlap_grad_reduce", "overlap_param_gather"),
    *("recompute_method", "recompute_num_layers", "recompute_modules"),
)
RENAMED = {
    **{f"parallel.{name}": f"parallel.megatron.{name}" for name in _MEGATRON},
    **{f"optimizer.{name}": f"parallel.megatron.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps")},
    **{
        f"rollout.{name}": f"rollout.vllm.{name}"
        for name in ("max_model_len", "enforce_eager", "kv_cache_memory_bytes")
    },
    "rollout.dtype": "rollout.vllm.dtype",
    "rollout.sleep": "rollout.vllm.enable_sleep_mode",
    "training.early_stop.patience": "training.early_stop",
}
_ADAPTER = "the confidence adapter is gone (its code is in commit 80ba0e8); see dcpo calibrate --kind logistic"
_DIGITS = "the gradient over all digits is gone (its code is in commit 80ba0e8)"
_CONSTANT = "it is a constant now"
REMOVED = {
    "rollout.chunks": "each response is judged as soon as it is there; rollout.max_num_seqs bounds how many come at once",
    "training.train": "model.adapter alone says that an adapter is trained",
    "training.early_stop.metric": "training.early_stop watches the metric of training.keep_best",
    "training.phase_warning_seconds": _CONSTANT,
    "optimizer.adapter_lr": "optimizer.lr is the adapter's where model.adapter is set",
    "model.adapter.activated": _ADAPTER,
    "model.make_vocab_size_divisible_by": "it is 128, as Megatron's; dcpo convert has an option for other checkpoints",
    "judging.confidence_tokens": _ADAPTER,
    "objective.confidence_parameters": _ADAPTER,
    "objective.confidence_sees": _ADAPTER,
    "objective.confidence_gradient": _DIGITS,
    "objective.digit_damping": _DIGITS,
    "objective.leave_one_out": "the group accuracy is that of all responses, as in the paper",
    "objective.score_clamp": _CONSTANT,
    "objective.one_minus_c_clamp": _CONSTANT,
    **{f"objective.clip_{side}_{block}": f"objective.clip_{side} is that of both blocks"
       for side in ("low", "high") for block in ("reasoning", "confidence")},
    "evaluation.at_start": "a validation before the first step is always made",
    "evaluation.seed": _CONSTANT,
    "logging.samples_per_step": _CONSTANT,
}  # fmt: skip


def removed(name: str) -> str | None:
    """Return why there is no option ``name`` any more; None where there never was one."""
    return REMOVED.get(name)


def move_renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` of a configuration with renamed options in their new places, and say so in the log. A file that has
    both names keeps the new one."""
    values = {key: dict(part) if isinstance(part, dict) else part for key, part in values.items()}
    for old, new in RENAMED.items():
        section, *path = old.split(".")
        holder = values.get(section)
        for key in path[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or path[-1] not in holder:
            continue
        if any(removed(".".join((section, *path[:-1], key))) for key in holder if path[:-1]):
            continue  # what is beside it went, and is refused
        value = holder.pop(path[-1])
        logger.warning("%s is now %s; the old name works in this release", old, new)
        if old == "training.early_stop.patience":
            values["training"]["early_stop"] = value
            continue
        if value is None or (old == "rollout.dtype" and value == "same") or (value == 0 and old in _ZERO_IS_UNSET):
            continue
        target = values.setdefault(new.split(".")[0], {})
        options = dict(target.get(new.split(".")[1]) or {})
        options.setdefault(new.split(".")[2], value)
        target[new.split(".")[1]] = options
    return values


_ZERO_IS_UNSET = ("rollout.max_model_len", "rollout.kv_cache_memory_bytes")
