"""Norms against their equations, in the order of roundings that Hugging Face's models have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dcpo.policy.norms import RMSNorm

WIDTH = 8


def norm(zero_centered: bool, dtype: torch.dtype, sequence_parallel: bool = False) -> RMSNorm:
    config: Any = SimpleNamespace(
        params_dtype=dtype,
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=sequence_parallel,
    )
    torch.manual_seed(0)
    made = RMSNorm(config, WIDTH, eps=1e-6)
    with torch.no_grad():
        made.weight.copy_(torch.randn(WIDTH))
    return made


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(mean x^2 + eps), in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_rounds_before_it_scales(dtype: torch.dtype) -> None:
    """w * (x / rms x).to(dtype), as ``Qwen3RMSNorm.forward``."""
    made = norm(zero_centered=False, dtype=dtype)
    x = torch.randn(3, 5, WIDTH).to(dtype)
    expected = normalized(x).to(dtype) * made.weight
    torch.testing.assert_close(made(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_centered_norm_scales_by_one_more_and_rounds_last(dtype: torch.dtype) -> None:
    """((x / rms x) * (1 + w)).to(dtype), as ``Gemma3RMSNorm.forward``."""
    made = norm(zero_centered=True, dtype=dtype)
    x = torch.randn(3, 5, WIDTH).to(dtype)
    expected = (normalized(x) * (1.0 + made.weight.float())).to(dtype)
    torch.testing.assert_close(made(x), expected, rtol=1e-6, atol=1e-6)


def test_the_weight_is_marked_for_sequence_parallelism() -> None:
    """``finalize_model_grads`` sums the gradients of marked weights over tensor-parallel ranks."""
    marked = norm(zero_centered=False, dtype=torch.float32, sequence_parallel=True)
    assert marked.weight.sequence_parallel is True
