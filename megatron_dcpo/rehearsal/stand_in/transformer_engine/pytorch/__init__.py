from transformer_engine.pytorch import attention, distributed, float8_tensor, fp8, ops
from transformer_engine.pytorch.layers import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "float8_tensor",
    "fp8",
    "ops",
]
