"""Which of torch's attention kernels the local layers and the embedded engine ask for."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_dcpo.policy import layers, model
from megatron_dcpo.rollout import transformers_engine
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime import device


@pytest.mark.parametrize("cuda", [True, False])
def test_cudnn_is_left_out_on_a_gpu_alone(monkeypatch: Any, cuda: bool) -> None:
    said: list[bool] = []
    monkeypatch.setattr(device, "has_cuda", lambda: cuda)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    device.disable_cudnn_attention()
    assert said == [False] * cuda


def test_the_embedded_engine_leaves_it_out(monkeypatch: Any, tiny_models: Any) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        transformers_engine, "disable_cudnn_attention", lambda: called.append("disabled")
    )
    TransformersEngine.from_pretrained(tiny_models("qwen3"))
    assert called == ["disabled"]


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_local_layers_leave_it_out(monkeypatch: Any, transformer_engine: bool) -> None:
    called: list[str] = []

    def layout(*_: object) -> None:
        raise StopIteration

    monkeypatch.setattr(model, "read_architecture", lambda _: SimpleNamespace())
    monkeypatch.setattr(model, "use_transformer_engine", lambda _: transformer_engine)
    monkeypatch.setattr(model, "disable_cudnn_attention", lambda: called.append("disabled"))
    monkeypatch.setattr(model, "Layout", SimpleNamespace(of=layout))
    parts: Any = SimpleNamespace(path="m", transformer_impl="auto", rank=1)
    with pytest.raises(StopIteration):
        model.build_policy(parts, parts, parts)
    assert called == [] if transformer_engine else ["disabled"]


@pytest.mark.parametrize("window", [None, 3])
def test_masked_attention_has_as_many_keys_as_queries_on_a_gpu(
    monkeypatch: Any, window: int | None
) -> None:
    """Of torch's kernels for GPUs none takes a mask and grouped queries."""
    attention: Any = object.__new__(layers.CausalAttention)
    torch.nn.Module.__init__(attention)
    attention.config = SimpleNamespace(context_parallel_size=1)
    attention.softmax_scale, attention.window = None, window
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    expected = attention._attend(q, k, v)
    grouped: list[bool] = []
    attend = F.scaled_dot_product_attention

    def noted(*tensors: torch.Tensor, **how: Any) -> torch.Tensor:
        grouped.append(tensors[0].shape[1] != tensors[1].shape[1])
        return attend(*tensors, **how)

    monkeypatch.setattr(layers.F, "scaled_dot_product_attention", noted)
    on_gpu = dataclasses.replace(device._CPU, masked_grouped_attention=False)
    monkeypatch.setattr(device, "_CPU", on_gpu)
    torch.testing.assert_close(attention._attend(q, k, v), expected)
    assert grouped == [window is None]
    assert not device._GPU.masked_grouped_attention
