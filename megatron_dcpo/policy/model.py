"""The policy: a Megatron ``GPTModel`` built from a Hugging Face ``config.json`` and filled through
the weight table.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_dcpo.config import ModelConfig, ParallelConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.policy.layers import block_spec, layer_spec, use_transformer_engine
from megatron_dcpo.policy.megatron_options import options_of
from megatron_dcpo.runtime.device import capabilities, current_device, fp32_head
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.megatron_private import APEX_KERNEL, without_asking_for_apex
from megatron_dcpo.weights.architecture import Architecture, read_architecture
from megatron_dcpo.weights.hf_checkpoint import HFReader, load_into
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE, Coordinates, Layout
from megatron_dcpo.weights.planner import (
    Copy,
    check_layout,
    padded_vocab_size,
    plan,
    sharded_dimensions,
)

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """The model chunks of this rank (one, or several with virtual pipeline stages), wrapped for
    training.

    ``copies[i]`` maps chunk i to Hugging Face tensors. ``frozen``: it has no gradients, and chunks
    are not wrapped in DDP. ``fp32_head``: logits are computed in fp32, whatever the parameters are.
    """

    arch: Architecture
    layout: Layout
    config: TransformerConfig
    chunks: tuple[Any, ...]
    gpt: tuple[GPTModel, ...]
    copies: tuple[tuple[Copy, ...], ...]
    topology: Topology
    frozen: bool
    fp32_head: bool

    @property
    def merged(self) -> tuple[str, ...]:
        """Return the tensors that are exported with an addition: none. See
        :class:`megatron_dcpo.policy.adapter.MergedPolicy`."""
        return ()

    def addition(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        raise KeyError(name)

    @property
    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, on the last stage."""
        gpt = self.gpt[-1]
        weight: Tensor = (
            gpt.shared_embedding_or_output_weight()
            if self.arch.tied_embeddings
            else gpt.output_layer.weight
        )
        return weight

    def parameters(self, chunk: int) -> dict[str, Tensor]:
        """Return the parameters of a chunk by their name in the weight table."""
        return {name: p.data for name, p in self.gpt[chunk].named_parameters()}


def transformer_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    transformer_engine: bool = False,
) -> TransformerConfig:
    """Return Megatron's configuration of ``arch`` (RMSNorm, SwiGLU, rotary embeddings, grouped
    queries), with the options of ``parallel.megatron``. Raises :class:`UserError` where Megatron
    refuses them.
    """
    on_cpu = capabilities().cpu_initialization
    interleaved = parallel.virtual_pipeline_model_parallel_size > 1
    options: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.layernorm_epsilon,
        "qk_layernorm": arch.qk_layernorm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        # Of two interleaved stages each is the other's next and previous; only the overlapped
        # transfers keep them apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type,
        "sequence_parallel": parallel.sequence_parallel,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
        # required with variable_seq_lengths, also without experts
        "moe_token_dispatcher_type": "alltoall",
        "perform_initialization": False,  # the weights come from a checkpoint
        "use_cpu_initialization": on_cpu,
        # Transformer Engine's layers add it by their own product, Megatron's by a kernel of Apex's
        "gradient_accumulation_fusion": not on_cpu
        and (transformer_engine or find_spec(APEX_KERNEL) is not None),
        "bias_activation_fusion": not on_cpu,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": not on_cpu,
        # unfused, packed sequences wait for the host four times a layer
        "apply_rope_fusion": transformer_engine,
        "persist_layer_norm": False,
        "deterministic_mode": on_cpu,
        **_recomputation(parallel),
        **_experts(arch, parallel, transformer_engine),
        **options_of(TransformerConfig, parallel.megatron),
        **_pipeline(parallel),
    }
    try:
        return TransformerConfig(**options)
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(
            f"parallel: Megatron refuses these options ({one_line(error, 300)})"
        ) from None


def _recomputation(parallel: ParallelConfig) -> dict[str, Any]:
    if parallel.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": parallel.recompute_method,
            "recompute_num_layers": parallel.recompute_num_layers,
        }
    if parallel.recompute_granularity == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(parallel.recompute_modules),
        }
    return {}


def _experts(
    arch: Architecture, parallel: ParallelConfig, transformer_engine: bool
) -> dict[str, Any]:
    if not arch.num_experts:
        return {}
    return {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.ffn_hidden_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.normalized_experts,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": transformer_engine,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def _pipeline(parallel: ParallelConfig) -> dict[str, Any]:
    options = {option: getattr(parallel, option) for option in UNEVEN_PIPELINE}
    if parallel.pipeline_model_parallel_size == 2 and options["num_layers_in_first_pipeline_stage"]:
        # The last stage has the rest anyway; told of both, Megatron divides by its number of stages
        # in between.
        options["num_layers_in_last_pipeline_stage"] = None
    virtual = parallel.virtual_pipeline_model_parallel_size
    return {**options, "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None}


def build_policy(
    model: ModelConfig, parallel: ParallelConfig, topology: Topology, training: bool = True
) -> Policy:
    """Build this rank's chunks and load their slices of ``model.path``, wrapped in Megatron's DDP
    when ``training`` and frozen otherwise.

    Raises :class:`UserError` when the checkpoint is missing or broken or the layout does not divide
    the model.
    """
    arch = read_architecture(model.path)
    engine = use_transformer_engine(model.transformer_impl)
    if training and topology.rank == 0 and capabilities().transformer_engine:
        logger.info(
            "layers: %s", "Transformer Engine" if engine else "local (model.transformer_impl=local)"
        )
    layout = Layout.of(parallel, engine)
    check_layout(arch, layout)
    reader = HFReader(model.path)
    reader.check(arch)
    config = transformer_config(arch, parallel, torch_dtype(model.params_dtype), engine)
    gpts, copies = [], []
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        at = layout.at(topology.part, topology.pp_rank, virtual)
        gpt = _build_chunk(arch, layout, config, at)
        copies.append(plan(arch, layout, at))
        load_into(reader, copies[-1], {name: p.data for name, p in gpt.named_parameters()})
        gpts.append(gpt)
    wrapped = [_wrap(gpt, config, parallel, index, training) for index, gpt in enumerate(gpts)]
    if training and parallel.overlap_grad_reduce:  # only the last micro-batch starts the reduction
        hooks = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    parts = tuple(wrapped), tuple(gpts), tuple(copies)
    return Policy(arch, layout, config, *parts, topology, not training, fp32_head(model.head_dtype))


def _build_chunk(
    arch: Architecture, layout: Layout, config: TransformerConfig, at: Coordinates
) -> GPTModel:
    pp, vp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    spec = layer_spec(config, layout.transformer_engine)
    layers = get_num_layers_to_build(config, at.virtual if vp > 1 else None, at.pipeline)
    with without_asking_for_apex() if layout.transformer_engine else nullcontext():
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(spec, layers, layout.transformer_engine),
            vocab_size=padded_vocab_size(arch, layout),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=at.pipeline == at.virtual == 0,
            post_process=at.pipeline == pp - 1 and at.virtual == vp - 1,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(arch.rotary_base),
            parallel_output=True,
            vp_stage=at.virtual if vp > 1 else None,
        ).to(current_device())
    # Megatron knows Llama-3.1's scaling by its factor alone; the checkpoint's other numbers matter
    # as much.
    gpt.rotary_pos_emb.inv_freq = rotary_inverse_frequencies(arch).to(current_device())
    gpt.model_type = ModelType.encoder_or_decoder
    if gpt.post_process:  # logits are made of the response rows alone: policy/output_layer.py
        gpt.output_layer.forward = _hidden_states
    _mark_tensor_parallel(gpt, sharded_dimensions(arch, layout, at))
    return gpt


def _hidden_states(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Return, in the place of the output layer's product, [s, b, h] as they are."""
    return hidden, None


def _mark_tensor_parallel(gpt: GPTModel, dimensions: dict[str, int | None]) -> None:
    """Mark the sharded parameters. Megatron does so while it draws random weights, which is skipped
    here; without the mark its gradient norm counts a sharded parameter on the first tensor-parallel
    rank only. That holds for experts as well, which another tensor-parallel rank does not have,
    also where an expert is on one rank.
    """
    for name, parameter in gpt.named_parameters():
        dim = dimensions[name]
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def rotary_inverse_frequencies(arch: Architecture) -> Tensor:
    """Return [kv_channels / 2] fp32 angular frequencies, with Llama-3.1's scaling where the
    checkpoint asks for it.

    Wavelengths above ``original / low`` are stretched by ``factor``, those below ``original /
    high`` are kept, the ones between are interpolated linearly in the frequency.
    """
    exponent = torch.arange(0, arch.kv_channels, 2, dtype=torch.int64).float() / arch.kv_channels
    inv_freq = 1.0 / (arch.rotary_base**exponent)
    scaling = arch.rope_scaling
    if scaling is None:
        return inv_freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def _wrap(
    gpt: GPTModel, config: TransformerConfig, parallel: ParallelConfig, index: int, training: bool
) -> Any:
    """Wrap the model for mixed precision, and for training by DDP with fp32 gradients. The
    schedules read the hooks from ``config``.
    """
    module = Float16Module(config, gpt) if config.bf16 else gpt
    if not training:
        return module.requires_grad_(False)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        **options_of(DistributedDataParallelConfig, parallel.megatron),
    )
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
    ddp.broadcast_params()
    return ddp
