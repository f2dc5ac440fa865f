"""The policy: a Megatron ``GPTModel`` built from a Hugging Face ``config.json`` and filled through
the weight table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dcpo.architectures.config_json import Activation, Architecture, read_architecture
from megatron_dcpo.config import ModelConfig, ParallelConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.policy.layers import block_spec, layer_spec, use_transformer_engine
from megatron_dcpo.policy.megatron_options import options_of
from megatron_dcpo.policy.rotary import (
    has_fused_rotation,
    set_rotary_frequencies,
    softmax_scale,
)
from megatron_dcpo.runtime.device import (
    capabilities,
    current_device,
    disable_cudnn_attention,
    fp32_head,
)
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.megatron_private import APEX_KERNEL, without_asking_for_apex
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE, Coordinates, Layout
from megatron_dcpo.weights.pipeline import chunk_layers
from megatron_dcpo.weights.planner import (
    Copy,
    check_layout,
    padded_vocab_size,
    plan,
    sharded_dimensions,
)
from megatron_dcpo.weights.read_once import ChunkToFill, load_once
from megatron_dcpo.weights.table import ROUTER_BIAS, hf_shapes, is_constant

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

# as transformers computes them
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Policy:
    """The model chunks of this rank (one, or several with virtual pipeline stages), wrapped for
    training.

    ``gpt`` holds the bare models and ``chunks`` the same models as the schedules call them, in
    their wrappers. ``copies[i]`` maps chunk i to Hugging Face tensors. A ``frozen`` policy has no
    gradients, and its chunks are not wrapped in DDP. With ``fp32_head``, logits are computed in
    fp32, whatever the type of the parameters. ``constants`` has the tensors of all stages that
    training leaves as they are, by their Hugging Face name: the biases of the routers, in fp32.
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
    constants: Mapping[str, Tensor]

    @property
    def merged(self) -> tuple[str, ...]:
        """Return the names of the tensors to which the export adds something. There are none here;
        :class:`megatron_dcpo.policy.adapter.MergedPolicy` has some.
        """
        return ()

    def addition(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return what the export adds to rows (or columns) ``start`` to ``stop`` of a merged
        tensor.
        """
        raise KeyError(name)

    @property
    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, on the last stage."""
        gpt = self.gpt[-1]
        weight: Tensor
        if self.arch.tied_embeddings:
            weight = gpt.shared_embedding_or_output_weight()
        else:
            weight = gpt.output_layer.weight
        return weight

    def parameters(self, chunk: int) -> dict[str, Tensor]:
        """Return the parameters of a chunk, and the biases of its routers, by their name in the
        weight table.
        """
        return tensors_of(self.gpt[chunk])


def tensors_of(gpt: GPTModel) -> dict[str, Tensor]:
    """Return the tensors of a model chunk by their name in the weight table: its parameters, then
    the biases that its routers add to the scores, which are buffers.
    """
    tensors = {name: parameter.data for name, parameter in gpt.named_parameters()}
    for name, buffer in gpt.named_buffers():
        if name.endswith(ROUTER_BIAS):
            tensors[name] = buffer
    return tensors


def transformer_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    transformer_engine: bool = False,
) -> TransformerConfig:
    """Return Megatron's configuration of ``arch`` (RMSNorm, SwiGLU, rotary embeddings, grouped
    queries), with the options of ``parallel.megatron``. Raises :class:`UserError` if Megatron
    refuses them.
    """
    options: dict[str, Any] = {
        **_model_options(arch),
        **_parallel_options(parallel),
        **_numeric_options(arch, dtype, transformer_engine),
        **_activation(arch),
        **_recomputation(parallel),
        **_experts(arch, parallel, transformer_engine),
        **options_of(TransformerConfig, parallel.megatron),
        **_pipeline(parallel),
    }
    try:
        return TransformerConfig(**options)
    except (ValueError, AssertionError, TypeError, ImportError) as error:
        raise UserError(
            f"parallel: Megatron refuses these options ({one_line(error, 300)})"
        ) from None


def _model_options(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.dense_ffn_hidden_size or arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.layernorm_epsilon,
        "qk_layernorm": arch.qk_layernorm,
        "gated_linear_unit": True,
        "add_bias_linear": arch.mlp_bias,
        "add_qkv_bias": arch.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # the weights come from a checkpoint
        "softmax_scale": softmax_scale(arch),
        "layernorm_zero_centered_gamma": arch.zero_centered_norms,
        "rotary_interleaved": arch.rotary_interleaved,
        **_window_options(arch),
    }


def _window_options(arch: Architecture) -> dict[str, Any]:
    window = arch.sliding_window
    if window is None:
        return {}
    return {
        # tokens before and after the one that attends
        "window_size": (window.size - 1, 0),
        "window_attn_skip_freq": [int(has_window) for has_window in window.layers],
    }


def _parallel_options(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline_model_parallel_size > 1
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        # With two interleaved stages, each is both the next and the previous stage of the other.
        # Only the overlapped transfers keep the two directions apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type,
        "sequence_parallel": parallel.sequence_parallel,
        "variable_seq_lengths": True,
        # required with variable_seq_lengths, even without experts
        "moe_token_dispatcher_type": "alltoall",
    }


def _numeric_options(
    arch: Architecture, dtype: torch.dtype, transformer_engine: bool
) -> dict[str, Any]:
    on_cpu = capabilities().cpu_initialization
    # The weight's gradient is added to the fp32 buffer in the product itself, by Transformer
    # Engine's layers or, in Megatron's own layers, by a kernel from Apex.
    has_fused_accumulation = transformer_engine or find_spec(APEX_KERNEL) is not None
    return {
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        "gradient_accumulation_fusion": not on_cpu and has_fused_accumulation,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": not on_cpu,
        # unfused, packed sequences wait for the host four times a layer
        "apply_rope_fusion": transformer_engine and has_fused_rotation(arch),
        "persist_layer_norm": False,
        "deterministic_mode": on_cpu,
    }


def _activation(arch: Architecture) -> dict[str, Any]:
    """Return the activation, on a GPU with Megatron's fused kernel where it has one.

    Megatron chooses the kernel by the function, and that of ``F.gelu`` is the tanh approximation:
    it is Gemma's activation, and no other GELU's. Experts have none but SiLU's.
    """
    function = ACTIVATIONS[arch.activation]
    fused = False
    if not capabilities().cpu_initialization:
        if arch.activation == "silu":
            fused = True
        elif arch.activation == "gelu_pytorch_tanh" and not arch.num_experts:
            function, fused = F.gelu, True
    return {"activation_func": function, "bias_activation_fusion": fused}


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
        "moe_router_pre_softmax": (arch.router_score == "softmax" and not arch.normalized_experts),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": transformer_engine,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        **_router(arch),
        **_beside_experts(arch),
    }


def _router(arch: Architecture) -> dict[str, Any]:
    """Return how experts are chosen and weighted, where that is not Megatron's default."""
    options: dict[str, Any] = {"moe_router_score_function": arch.router_score}
    if arch.router_bias:
        # Megatron adds this rate times a sign to the bias after every step.
        options |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    if arch.router_scale != 1:
        options["moe_router_topk_scaling_factor"] = arch.router_scale
    if arch.router_groups > 1:
        options["moe_router_num_groups"] = arch.router_groups
        options["moe_router_group_topk"] = arch.router_group_topk
    return options


def _beside_experts(arch: Architecture) -> dict[str, Any]:
    """Return the shared expert, and the layers that have experts if not all do."""
    options: dict[str, Any] = {}
    if arch.shared_ffn_hidden_size:
        options["moe_shared_expert_intermediate_size"] = arch.shared_ffn_hidden_size
        options["moe_shared_expert_gate"] = arch.shared_expert_gate
    if arch.dense_layers:
        layers = range(arch.num_layers)
        options["moe_layer_freq"] = [int(arch.has_experts(layer)) for layer in layers]
    return options


def _pipeline(parallel: ParallelConfig) -> dict[str, Any]:
    options = {option: getattr(parallel, option) for option in UNEVEN_PIPELINE}
    two_stages = parallel.pipeline_model_parallel_size == 2
    if two_stages and options["num_layers_in_first_pipeline_stage"]:
        # The last stage gets the remaining layers anyway. If Megatron is given both numbers, it
        # divides by the number of stages in between, which is zero here.
        options["num_layers_in_last_pipeline_stage"] = None
    options["virtual_pipeline_model_parallel_size"] = None
    if parallel.virtual_pipeline_model_parallel_size > 1:
        virtual = parallel.virtual_pipeline_model_parallel_size
        options["virtual_pipeline_model_parallel_size"] = virtual
    return options


def build_policy(
    model: ModelConfig,
    parallel: ParallelConfig,
    topology: Topology,
    training: bool = True,
    reader: HFReader | None = None,
) -> Policy:
    """Build this rank's chunks and load their slices of ``model.path``, or of what another
    ``reader`` reads, wrapped in Megatron's DDP when ``training`` and frozen otherwise. Collective
    over all ranks.

    Raises :class:`UserError` if the checkpoint is missing or broken, or if the layout does not
    divide the model.
    """
    arch = read_architecture(model.path)
    transformer_engine = use_transformer_engine(model.transformer_impl)
    if not transformer_engine:
        disable_cudnn_attention()
    if training and topology.rank == 0 and capabilities().transformer_engine:
        kind = "Transformer Engine"
        if not transformer_engine:
            kind = "local (model.transformer_impl=local)"
        logger.info("layers: %s", kind)
    layout = Layout.of(parallel, transformer_engine)
    check_layout(arch, layout)
    if reader is None:
        reader = HFReader(model.path, arch)
    reader.check(arch)
    config = transformer_config(
        arch=arch,
        parallel=parallel,
        dtype=torch_dtype(model.params_dtype),
        transformer_engine=transformer_engine,
    )
    gpts = []
    copies = []
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        coordinates = layout.at(topology.part, topology.pp_rank, virtual)
        gpt = _build_chunk(arch, layout, config, coordinates)
        gpts.append(gpt)
        copies.append(plan(arch, layout, coordinates))
    chunks_to_fill = [
        ChunkToFill(copies=chunk_copies, tensors=tensors_of(gpt))
        for gpt, chunk_copies in zip(gpts, copies, strict=True)
    ]
    load_once(reader, chunks_to_fill, topology)
    if training:
        chunks = [
            _wrap_for_training(gpt, config, parallel, is_first=index == 0)
            for index, gpt in enumerate(gpts)
        ]
        if parallel.overlap_grad_reduce:
            # only the last micro-batch starts the reduction
            hooks = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    else:
        chunks = [_mixed_precision(gpt, config).requires_grad_(False).eval() for gpt in gpts]
    return Policy(
        arch=arch,
        layout=layout,
        config=config,
        chunks=tuple(chunks),
        gpt=tuple(gpts),
        copies=tuple(copies),
        topology=topology,
        frozen=not training,
        fp32_head=fp32_head(model.head_dtype),
        constants=_constants(reader, arch),
    )


def _constants(reader: HFReader, arch: Architecture) -> dict[str, Tensor]:
    constants = {}
    for name in hf_shapes(arch):
        if is_constant(name):
            values = reader.tensor(name).float()
            constants[name] = values.clone().to(current_device())
    return constants


def _build_chunk(
    arch: Architecture, layout: Layout, config: TransformerConfig, coordinates: Coordinates
) -> GPTModel:
    last_stage = layout.pipeline_model_parallel_size - 1
    last_virtual = layout.virtual_pipeline_model_parallel_size - 1
    virtual_stage = None
    if last_virtual > 0:
        virtual_stage = coordinates.virtual
    is_first = coordinates.pipeline == 0 and coordinates.virtual == 0
    is_last = coordinates.pipeline == last_stage and coordinates.virtual == last_virtual
    spec = partial(layer_spec, arch, config, transformer_engine=layout.transformer_engine)
    number = coordinates.virtual * (last_stage + 1) + coordinates.pipeline
    layers = chunk_layers(arch.num_layers, layout)[number]
    specs = [spec(layer=layer) for layer in layers]
    with without_asking_for_apex() if layout.transformer_engine else nullcontext():
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(specs, layout.transformer_engine),
            vocab_size=padded_vocab_size(arch, layout),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=arch.rotary_percent,
            rotary_base=int(arch.rotary_base),
            parallel_output=True,
            vp_stage=virtual_stage,
        ).to(current_device())
    set_rotary_frequencies(gpt, arch)
    if is_first and arch.embedding_scale is not None:
        gpt.embedding.register_forward_hook(partial(_scale, arch.embedding_scale))
    gpt.model_type = ModelType.encoder_or_decoder
    if gpt.post_process:
        # logits are computed for the response rows only: policy/output_layer.py
        gpt.output_layer.forward = _hidden_states
    _mark_tensor_parallel(gpt, sharded_dimensions(arch, layout, coordinates))
    return gpt


def _scale(scale: float, module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Return the embeddings times ``scale``, which is rounded to their type, as Gemma does."""
    return output * torch.tensor(scale, dtype=output.dtype, device=output.device)


def _hidden_states(hidden: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stand in for the output layer's forward pass: return the hidden states [s, b, h] as they
    are.
    """
    return hidden, None


def _mark_tensor_parallel(gpt: GPTModel, dimensions: dict[str, int | None]) -> None:
    """Mark the sharded parameters as tensor parallel.

    Megatron sets the mark while it draws random weights, which is skipped here. Without it,
    Megatron's gradient norm counts a sharded parameter on the first tensor-parallel rank only. The
    parameters of experts need the mark too, because no other tensor-parallel rank has them, even if
    an expert is whole on one rank.
    """
    for name, parameter in gpt.named_parameters():
        dim = dimensions[name]
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _biased_routers(gpt: GPTModel) -> list[TopKRouter]:
    routers = [module for module in gpt.modules() if isinstance(module, TopKRouter)]
    return [router for router in routers if router.expert_bias is not None]


def _mixed_precision(gpt: GPTModel, config: TransformerConfig) -> Float16Module | GPTModel:
    if not config.bf16:
        return gpt
    kept = [router.expert_bias for router in _biased_routers(gpt)]
    wrapped = Float16Module(config, gpt)
    for router, bias in zip(_biased_routers(gpt), kept, strict=True):
        # Megatron's routers make it fp32 again, but only after it has been rounded.
        router.expert_bias = bias
    return wrapped


def _wrap_for_training(
    gpt: GPTModel, config: TransformerConfig, parallel: ParallelConfig, is_first: bool
) -> DistributedDataParallel:
    """Wrap the model for mixed precision, then in DDP with fp32 gradients. The schedules read the
    hook that finishes the gradients from ``config``.
    """
    module = _mixed_precision(gpt, config)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        **options_of(DistributedDataParallelConfig, parallel.megatron),
    )
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, ddp_config, module, disable_bucketing=not is_first)
