"""The messages of ``rollout.weight_transfer=nccl`` before vLLM's own consumer of them. Needs vLLM;
its streams are left out, for which it asks a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dcpo.rollout import server_tensors
from megatron_dcpo.rollout.server_tensors import connection, described, in_calls, packed
from megatron_dcpo.weights.packed import WORKER_STREAMS
from tests.helpers.vllm import needs_vllm

pytestmark = needs_vllm


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, from its file: the package asks for more than this needs."""
    package = Path(str(importlib.util.find_spec("vllm").origin)).parent
    file = package / "distributed" / "weight_transfer" / "packed_tensor.py"
    spec = importlib.util.spec_from_file_location("packed_tensor_of_vllm", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(module, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return module


def test_vllm_unpacks_the_bits_that_were_packed(
    consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tensors, "MESSAGE_BYTES", 100)
    monkeypatch.setattr(server_tensors, "CALL_BYTES", 400)
    weights = {}
    for number, rows in enumerate((3, 5, 1, 40, 7, 49, 2, 1, 90, 11)):
        dtype = torch.float32 if number % 3 == 2 else torch.bfloat16
        weights[f"w{number}"] = torch.randn(rows, 3).to(dtype)
    came: dict[str, torch.Tensor] = {}
    told = connection({"master_address": "127.0.0.1", "master_port": 1, "world_size": 2})
    for call in in_calls(weights.items()):
        consumer.packed_nccl_broadcast_consumer(
            iterator=metadata(described(call)),
            group=Messages(packed(call)),
            src=0,
            post_unpack_func=came.update,
            buffer_size_bytes=told["packed_buffer_size_bytes"],
            num_buffers=WORKER_STREAMS,
            device="cpu",
        )
    assert came.keys() == weights.keys()
    for name, tensor in weights.items():
        assert came[name].dtype == tensor.dtype
        assert torch.equal(came[name], tensor), name


def metadata(told: dict[str, list[Any]]) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
    """Yield what vLLM's worker reads out of a request."""
    for name, dtype, shape in zip(*told.values(), strict=True):
        yield name, (shape, getattr(torch, dtype))


class Messages:
    """Stands in for the communicator, on the worker's side."""

    def __init__(self, messages: list[torch.Tensor]) -> None:
        self.left = messages

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        message = self.left.pop(0)
        assert tensor.shape == message.shape
        tensor.copy_(message)
