"""The arithmetic of a forward pass, counted from the shape of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import padded_vocab_size


@dataclass(frozen=True)
class Operations:
    """The operations (two for a multiply-add) of a forward pass for one token: of each layer but
    for its experts, of each layer's experts, and of the output layer.
    """

    dense: tuple[float, ...]
    experts: tuple[float, ...]
    output: float

    @property
    def layers(self) -> list[float]:
        return [dense + experts for dense, experts in zip(self.dense, self.experts, strict=True)]


def sequence_flops(arch: Architecture, layout: Layout, tokens: int, length: float) -> float:
    """Return the operations (two for a multiply-add) of a forward pass over ``tokens`` in sequences
    of ``length``. Attention is causal.
    """
    operations = operations_per_token(arch, layout, length)
    return tokens * (sum(operations.layers) + operations.output)


def operations_per_token(arch: Architecture, layout: Layout, length: float) -> Operations:
    """Return the operations per token in sequences of ``length``."""
    d = arch.kv_channels
    q = arch.num_attention_heads * d
    k = arch.num_query_groups * d
    h = arch.hidden_size
    projections = h * (q + 2 * k) + q * h
    dense: list[float] = []
    experts: list[float] = []
    for layer in range(arch.num_layers):
        # scores and values over half the length, or over the layer's window
        attended = length
        if arch.sliding_window is not None and arch.has_window(layer):
            attended = min(length, 2 * arch.sliding_window.size)
        width = arch.dense_ffn_hidden_size or arch.ffn_hidden_size
        router = 0
        chosen = 0
        if arch.has_experts(layer):
            width = arch.shared_ffn_hidden_size
            router = h * arch.num_experts
            chosen = 3 * h * arch.ffn_hidden_size * arch.experts_per_token
        products = 3 * h * width + router + projections
        dense.append(2 * products + 2 * q * attended)
        experts.append(2 * chosen)
    output = 2 * h * padded_vocab_size(arch, layout)
    return Operations(dense=tuple(dense), experts=tuple(experts), output=output)
