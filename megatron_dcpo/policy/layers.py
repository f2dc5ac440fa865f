"""The transformer layer: Transformer Engine's on GPU, a local one everywhere else.

The local spec is Megatron's own with two parts replaced: an RMSNorm that takes part in sequence
parallelism, and a core attention that takes padded batches and packed sequences alike and never
materializes the score matrix.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dcpo.errors import UserError, one_line, pip_install
from megatron_dcpo.policy.context_parallel import gather_keys_and_values
from megatron_dcpo.runtime.device import capabilities


def use_transformer_engine(choice: str) -> bool:
    """Return whether the layers are Transformer Engine's, given the ``choice`` of
    ``model.transformer_impl``.

    Raises :class:`UserError` if Transformer Engine is wanted but cannot be used. On a GPU nothing
    falls back to the local layers, which are several times slower there, unless the configuration
    asks for them.
    """
    if choice == "local":
        return False
    if not capabilities().transformer_engine:
        if choice == "auto":
            return False
        raise UserError(
            "model.transformer_impl=transformer_engine, but Transformer Engine needs a GPU and "
            "its package; use auto or local"
        )
    problem = _transformer_engine_problem()
    if problem:
        raise UserError(
            f"model.transformer_impl={choice}: on a GPU the layers are Transformer Engine's, "
            f"which cannot be used ({problem}); install it ({pip_install('gpu')}), or set "
            "model.transformer_impl=local, which is several times slower"
        )
    return True


def _transformer_engine_problem() -> str:
    """Return why Megatron cannot use Transformer Engine's layers; empty if it can."""
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    if HAVE_TE:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing system library does not raise ImportError
        return f"{type(error).__name__}: {one_line(error, 200)}"
    return "megatron-core does not import it"


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm in fp32. Under sequence parallelism the gradient of its weight is
    summed over the tensor-parallel ranks.

    Megatron's wrapper around torch's norm refuses sequence parallelism, although
    ``finalize_model_grads`` only needs the ``sequence_parallel`` mark on the weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # Hugging Face's order: normalize in fp32, round to the activation type, then scale.
        eps = cast(float, self.eps)
        normalized = F.rms_norm(x.float(), self.normalized_shape, weight=None, eps=eps)
        return normalized.to(x.dtype) * self.weight


class CausalAttention(MegatronModule):
    """Causal softmax attention with grouped queries, for batches [s, b, heads, d] and packed
    sequences [t, heads, d].

    Padding needs no mask: it stands at the end of a row, and no real token attends to it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: object,
        softmax_scale: float | None = None,
        **__: object,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, heads * d], or [t, heads * d] for packed sequences. The boundaries of
        packed sequences are ``cu_seqlens_q`` int32 [sequences + 1].
        """
        size = self.config.context_parallel_size
        if packed_seq_params is None:
            bounds = [0, len(query) * size]
        else:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
        sequences = list(itertools.pairwise(bounds))
        if size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = gather_keys_and_values(
                key, value, bounds=sequences, group=group
            )
        if packed_seq_params is None:
            q = query.permute(1, 2, 0, 3)  # [b, heads, s, d]
            k = key.permute(1, 2, 0, 3)
            v = value.permute(1, 2, 0, 3)
            out = self._attend(q, k, v).permute(2, 0, 1, 3)
            return out.reshape(*out.shape[:2], -1)
        pieces = []
        for start, stop in sequences:
            rows = slice(
                start // size, stop // size
            )  # this rank's queries of the sequence
            q = query[rows].transpose(0, 1).unsqueeze(0)  # [1, heads, t_i, d]
            k = key[start:stop].transpose(0, 1).unsqueeze(0)
            v = value[start:stop].transpose(0, 1).unsqueeze(0)
            pieces.append(self._attend(q, k, v).squeeze(0).transpose(0, 1))
        out = torch.cat(pieces)
        return out.reshape(out.shape[0], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of queries ``q`` [b, heads, s / CP, d] to keys ``k`` and values
        ``v`` [b, groups, s, d].
        """
        attend = partial(
            F.scaled_dot_product_attention,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        size = self.config.context_parallel_size
        if size == 1:
            return attend(q, k, v, is_causal=True)
        # Each of this rank's two chunks of queries sees the keys up to its own end.
        width = q.shape[2] // 2
        rank = parallel_state.get_context_parallel_rank()
        outputs = []
        for queries, chunk in zip(
            q.split(width, 2), (rank, 2 * size - 1 - rank), strict=True
        ):
            stop = (chunk + 1) * width
            mask = torch.ones(width, stop, dtype=torch.bool, device=q.device)
            mask = mask.tril(stop - width)
            outputs.append(
                attend(queries, k[:, :, :stop], v[:, :, :stop], attn_mask=mask)
            )
        return torch.cat(outputs, 2)


class BiasedAttention(SelfAttention):
    """Megatron's self-attention, with or without the ``output_bias``, which Megatron's
    ``add_bias_linear`` gives to the attention and the MLP or to neither.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        output_bias: bool,
        **kwargs: object,
    ) -> None:
        of_attention = copy.copy(config)
        of_attention.add_bias_linear = output_bias
        super().__init__(of_attention, *args, **kwargs)


def layer_spec(
    config: TransformerConfig, transformer_engine: bool, output_bias: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return Megatron's spec of one layer of the model that ``config`` describes, with or without a
    bias after the attention.
    """
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    else:
        spec = _local_spec(config)
    if output_bias != config.add_bias_linear:
        attention: Any = spec.submodules.self_attention
        attention.module = BiasedAttention
        attention.params = {**attention.params, "output_bias": output_bias}
    return spec


def _local_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.num_moe_experts:
        # The norm keeps its name in checkpoints, as in Transformer Engine's spec, whose experts
        # have no norm fused to them.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(
    spec: ModuleSpec, layers: int, transformer_engine: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec of a pipeline stage: ``layers`` layers and the final norm. With Transformer
    Engine it is the layer's ``spec``, from which Megatron builds both.
    """
    if transformer_engine:
        return spec
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


__all__ = [
    "CausalAttention",
    "RMSNorm",
    "block_spec",
    "layer_spec",
    "use_transformer_engine",
]
