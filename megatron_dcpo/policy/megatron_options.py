"""``parallel.megatron``: options that are passed to Megatron's configuration classes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_dcpo.config.rules import check_passed_on

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

CLASSES = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
# These follow from the checkpoint.
_FROM_CHECKPOINT = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "apply_residual_connection_post_layernorm",
    "qk_layernorm",
    "softmax_scale",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "rotary_interleaved",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "gated_linear_unit",
    "activation_func",
    "add_bias_linear",
    "add_qkv_bias",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
)
# These follow from how the trainer works, for example from the loss scaling of policy/schedule.py.
_FROM_TRAINER = (
    "no_sync_func",
    "grad_scale_func",
    "finalize_model_grads_func",
    "param_sync_func",
    "variable_seq_lengths",
    "perform_initialization",
    "calculate_per_token_loss",
    "grad_reduce_in_fp32",
    "average_in_collective",
    "moe_router_bias_update_rate",
    "optimizer",
)
# What decides an option instead of ``parallel.megatron``.
_DECIDED = {
    "tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
    "context_parallel_size": "parallel.context_parallel_size",
    "expert_model_parallel_size": "parallel.expert_model_parallel_size",
    "expert_tensor_parallel_size": "parallel.expert_tensor_parallel_size",
    "sequence_parallel": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.use_distributed_optimizer",
    "recompute_granularity": "parallel.recompute_granularity",
    "bf16": "model.params_dtype",
    "fp16": "model.params_dtype",
    "params_dtype": "model.params_dtype",
    "pipeline_dtype": "model.params_dtype",
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "weight_decay": "optimizer.weight_decay",
    "clip_grad": "optimizer.clip_grad",
    **dict.fromkeys(_FROM_CHECKPOINT, "model.path"),
    **dict.fromkeys(_FROM_TRAINER, "the trainer"),
}


def options_of(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` that are fields of the Megatron class ``kind``."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def check_megatron_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for an option that no class of the installed Megatron has, or that
    something else decides.
    """
    known = {field.name for kind in CLASSES for field in fields(kind)}
    where = f"{', '.join(kind.__name__ for kind in CLASSES)} of the installed megatron-core"
    check_passed_on(
        section="parallel.megatron", options=options, decided=_DECIDED, known=known, where=where
    )
