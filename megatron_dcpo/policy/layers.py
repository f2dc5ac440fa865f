"""The transformer layer: Transformer Engine's on GPU, a local one everywhere else.

The local spec is Megatron's own with two parts replaced: an RMSNorm that takes part in sequence
parallelism, and a core attention that takes padded batches and packed sequences alike and never
materializes the score matrix. What an architecture has and no option of Megatron's configuration
describes is put into either spec: norms of the outputs of attention and MLP, one norm over all
heads of a token, and what differs between layers with and without a sliding window.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.errors import UserError, one_line, pip_install
from megatron_dcpo.policy.batching import PackedSequences
from megatron_dcpo.policy.context_parallel import gather_keys_and_values
from megatron_dcpo.policy.norms import NormedResidual, NormOfKeys, NormOfQueries, RMSNorm
from megatron_dcpo.policy.rotary import angles_of_layer, has_two_rotations, softmax_scale
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.weights.table import OUTPUT_NORMS


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
        self.window: int | None = None  # tokens that one attends to, itself among them
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Return [s, b, heads * d], or [t, heads * d] for packed sequences."""
        size = self.config.context_parallel_size
        if packed_seq_params is None:
            sequences = [(0, len(query) * size)]
        else:
            sequences = list(itertools.pairwise(packed_seq_params.bounds))
        if size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = gather_keys_and_values(key, value, bounds=sequences, group=group)
        if packed_seq_params is None:
            q = query.permute(1, 2, 0, 3)  # [b, heads, s, d]
            k = key.permute(1, 2, 0, 3)
            v = value.permute(1, 2, 0, 3)
            out = self._attend(q, k, v).permute(2, 0, 1, 3)
            return out.reshape(*out.shape[:2], -1)
        pieces = []
        for start, stop in sequences:
            rows = slice(start // size, stop // size)  # this rank's queries of the sequence
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
        size = self.config.context_parallel_size
        tokens = k.shape[2]
        masked = size > 1 or (self.window is not None and self.window < tokens)
        heads_of_group = q.shape[1] // k.shape[1]
        if masked and heads_of_group > 1 and not capabilities().masked_grouped_attention:
            k = k.repeat_interleave(heads_of_group, dim=1)
            v = v.repeat_interleave(heads_of_group, dim=1)
        attend = partial(
            F.scaled_dot_product_attention,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        if not masked:
            return attend(q, k, v, is_causal=True)
        if size == 1:
            return attend(q, k, v, attn_mask=self._mask(tokens, tokens, q.device))
        # Each of this rank's two chunks of queries sees the keys up to its own end.
        width = q.shape[2] // 2
        rank = parallel_state.get_context_parallel_rank()
        outputs = []
        for queries, chunk in zip(q.split(width, 2), (rank, 2 * size - 1 - rank), strict=True):
            stop = (chunk + 1) * width
            mask = self._mask(width, stop, q.device)
            outputs.append(attend(queries, k[:, :, :stop], v[:, :, :stop], attn_mask=mask))
        return torch.cat(outputs, 2)

    def _mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which of the keys [0, ``keys``) the last ``queries`` tokens among them attend to,
        bool [queries, keys].
        """
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
        mask = mask.tril(keys - queries)
        if self.window is not None:
            mask = mask.triu(keys - queries - self.window + 1)
        return mask


class ArchitectureAttention(SelfAttention):
    """Megatron's self-attention with what its options give to all layers alike, or to the
    attention and the MLP alike: the bias of the output projection, one norm over all heads, and the
    rotary frequencies and the scale of the scores in layers with and without a sliding window.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        arch: Architecture,
        layer_number: int,
        **kwargs: object,
    ) -> None:
        self.has_window = arch.has_window(layer_number - 1)
        self.two_rotations = has_two_rotations(arch)
        attention_config = copy.copy(config)
        attention_config.add_bias_linear = arch.output_bias
        attention_config.softmax_scale = softmax_scale(arch, self.has_window)
        # Only here: for the whole model it would have Megatron add up the gradients of weights of
        # which each tensor-parallel rank has its own.
        attention_config.qk_layernorm = arch.qk_layernorm or arch.whole_qk_layernorm
        super().__init__(attention_config, *args, layer_number=layer_number, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        *args: object,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: object,
    ) -> object:
        """Attend with the layer's part of ``rotary_pos_emb``, the angles [2, s, 1, 1, d]."""
        if self.two_rotations and rotary_pos_emb is not None:
            rotary_pos_emb = angles_of_layer(rotary_pos_emb, self.has_window)
        return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def layer_spec(
    arch: Architecture, config: TransformerConfig, transformer_engine: bool, layer: int
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return Megatron's spec of ``layer`` of ``arch``, counted from 0; ``config`` describes the
    rest.
    """
    experts = arch.has_experts(layer)
    num_experts = config.num_moe_experts if experts else None
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
    else:
        spec = _local_spec(config, num_experts)
    if (
        arch.output_bias != config.add_bias_linear
        or arch.sliding_window is not None
        or arch.whole_qk_layernorm
    ):
        attention: Any = spec.submodules.self_attention
        attention.module = ArchitectureAttention
        attention.params = {**attention.params, "arch": arch}
    _put_norms(spec, arch, config, transformer_engine)
    return spec


def _put_norms(
    spec: Any,  # noqa: ANN401 - a spec of Megatron's, whose submodules have no common type
    arch: Architecture,
    config: TransformerConfig,
    transformer_engine: bool,
) -> None:
    """Put the norms of ``arch`` where they differ from Megatron's into ``spec``."""
    layer = spec.submodules
    attention = layer.self_attention.submodules
    norm: type = RMSNorm
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        norm = TENorm
        # Transformer Engine's linear layers include the norm before them.
        if arch.norms.attention_input is None:
            attention.linear_qkv = TEColumnParallelLinear
        if arch.norms.mlp_input is None:
            layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    else:
        if arch.norms.attention_input is None:
            layer.input_layernorm = IdentityOp
        if arch.norms.mlp_input is None:
            layer.pre_mlp_layernorm = IdentityOp
    for name, attribute in (
        (arch.norms.attention_output, "self_attn_bda"),
        (arch.norms.mlp_output, "mlp_bda"),
    ):
        if name is not None:
            params = {"config": config, "norm": norm}
            setattr(layer, attribute, ModuleSpec(module=NormedResidual, params=params))
    layer.sharded_state_dict_keys_map = {**layer.sharded_state_dict_keys_map, **OUTPUT_NORMS}
    if arch.whole_qk_layernorm:
        attention.q_layernorm = NormOfQueries
        attention.k_layernorm = NormOfKeys


def _local_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if num_experts:
        # The norm keeps its name in checkpoints, as in Transformer Engine's spec, whose experts
        # have no norm fused to them.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(specs: Sequence[ModuleSpec], transformer_engine: bool) -> TransformerBlockSubmodules:
    """Return the spec of a pipeline stage: its layers' ``specs`` and the final norm."""
    norm = LayerNormImpl if transformer_engine else RMSNorm
    return TransformerBlockSubmodules(layer_specs=list(specs), layer_norm=norm)


__all__ = ["CausalAttention", "block_spec", "layer_spec", "use_transformer_engine"]
