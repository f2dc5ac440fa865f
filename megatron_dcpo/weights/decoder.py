"""A decoder-only model in Hugging Face terms, as far as the weight table and the policy need it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# the activations of an MLP under the names of transformers; "swish" is "silu"
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's frequency scaling (``rope_type: llama3``), with the numbers of the checkpoint."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's frequency scaling (``rope_type: yarn``; Peng et al. 2023), with the numbers of the
    checkpoint. It is static: sequences of every length are computed with it.

    A frequency that turns more than ``beta_fast`` times in the original context is kept, one that
    turns less than ``beta_slow`` times is divided by ``factor``, and between the two dimensions,
    rounded outwards if ``truncate``, the share changes linearly.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """Return the factor of cosine and sine, for queries and for keys."""
        return yarn_attention_factor(self.factor)


def yarn_attention_factor(factor: float) -> float:
    """Return 0.1 ln(factor) + 1, YaRN's factor of cosine and sine."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer in Hugging Face terms. Sizes are counts, not bytes.

    With ``num_experts`` every layer has that many experts, each an MLP of width
    ``ffn_hidden_size``; a token goes to ``experts_per_token`` of them. With ``normalized_experts``
    the weights of these sum to one. ``output_bias`` is the bias of the projection behind the
    attention, ``mlp_bias`` those of the three projections of an MLP. With ``fused_projections`` a
    checkpoint holds queries, keys and values of a layer in one tensor, and gate and up in another.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | YarnScaling | None
    tied_embeddings: bool
    qk_layernorm: bool
    qkv_bias: bool
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    num_experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = False
    fused_projections: bool = False
