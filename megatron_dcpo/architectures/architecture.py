"""A decoder-only model in Hugging Face terms, as far as the weight table and the policy need it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# the activations of an MLP under the names of transformers; "swish" is "silu"
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]
# what makes a router's logits into the scores of the experts
RouterScore = Literal["softmax", "sigmoid"]


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


@dataclass(frozen=True)
class LinearScaling:
    """Frequencies divided by ``factor`` (``rope_type: linear``), at every length."""

    factor: float


def yarn_attention_factor(factor: float) -> float:
    """Return 0.1 ln(factor) + 1, YaRN's factor of cosine and sine."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LayerNorms:
    """The norms of a layer under their Hugging Face names, None where there is none: of the inputs
    of attention and MLP, and of their outputs before they are added to the residual.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


LLAMA_NORMS = LayerNorms()


@dataclass(frozen=True)
class SlidingWindow:
    """In the ``layers`` that are true, a token attends to the last ``size`` tokens, itself among
    them. These layers have rotary frequencies of their own: those of ``rotary_base``, not scaled.
    """

    size: int
    layers: tuple[bool, ...]
    rotary_base: float


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer in Hugging Face terms. Sizes are counts, not bytes.

    With ``num_experts`` every layer has that many experts, each an MLP of width
    ``ffn_hidden_size``; a token goes to ``experts_per_token`` of them. With ``normalized_experts``
    the weights of these sum to one. ``output_bias`` is the bias of the projection behind the
    attention, ``mlp_bias`` those of the three projections of an MLP. ``fused_projections`` names
    the tensors of a layer in which a checkpoint holds several projections (``qkv_proj``,
    ``gate_up_proj``).

    Queries and keys are normed head by head with ``qk_layernorm``, all heads of a token together
    with ``whole_qk_layernorm``. ``zero_centered_norms`` multiply by 1 + weight. The first
    ``rotary_percent`` of each head's dimensions are rotated, ``rotary_interleaved`` in pairs of
    neighbors. The scores of the attention are divided by the root of ``query_scalar``, or else of
    ``kv_channels``. Embeddings are multiplied by ``embedding_scale``.

    The ``dense_layers``, counted from 0, have an MLP of width ``dense_ffn_hidden_size`` in the
    place of experts. With ``shared_ffn_hidden_size`` every token goes through a shared expert of
    that width as well, times the sigmoid of a logit of its own with ``shared_expert_gate``.

    Experts are chosen by the ``router_score`` of their logit, with ``router_bias`` plus a number
    of the expert that training leaves alone (``e_score_correction_bias``), and only from the best
    ``router_group_topk`` of ``router_groups`` groups, by the sum of a group's two best. Their
    weights are those of the scores, without that number, times ``router_scale``.

    A checkpoint may hold ``nextn_layers`` more layers, which predict further tokens for an
    engine's speculation. They are not trained, and go into exports as they are.
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
    rope_scaling: RopeScaling | YarnScaling | LinearScaling | None
    tied_embeddings: bool
    qk_layernorm: bool
    qkv_bias: bool
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    num_experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = False
    fused_projections: tuple[str, ...] = ()
    norms: LayerNorms = LLAMA_NORMS
    whole_qk_layernorm: bool = False
    zero_centered_norms: bool = False
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    query_scalar: float | None = None
    embedding_scale: float | None = None
    sliding_window: SlidingWindow | None = None
    dense_layers: tuple[int, ...] = ()
    dense_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    router_score: RouterScore = "softmax"
    router_bias: bool = False
    router_scale: float = 1.0
    router_groups: int = 1
    router_group_topk: int = 1
    nextn_layers: int = 0

    @property
    def rotary_dimensions(self) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(self.kv_channels * self.rotary_percent)

    def has_window(self, layer: int) -> bool:
        """Return whether a token attends to a window only in ``layer``, counted from 0."""
        return self.sliding_window is not None and self.sliding_window.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Return whether ``layer``, counted from 0, has experts and not a single MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers
