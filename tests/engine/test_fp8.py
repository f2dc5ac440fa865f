"""Updates of an engine whose weights vLLM quantizes to FP8. Needs vLLM (``make setup-engine``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.vllm import at_length, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

# tied embeddings; biases and a fused tensor in the checkpoint; two fused ones
MODELS = (("qwen3", True), ("glm4", False), ("phi3", False))
# the one that the CPU build can make without instructions for FP8 (AMX)
SCHEME = "fp8_per_channel"


@at_length
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_an_update_is_quantized_as_vllm_does_when_it_loads(
    tiny_models: Any, tmp_path: Path, engine_tp: int
) -> None:
    """Weights and scales bit for bit, in the memory that the kernels have read from the start, also
    after an update that was broken off. Of two ranks the scales of a layer divided by its inputs
    are of the whole layer.
    """
    options = {
        "models": {name: str(tiny_models(name, tied)) for name, tied in MODELS},
        "parallel": {"tensor_model_parallel_size": engine_tp},
        "engine_tp": engine_tp,
        "quantization": SCHEME,
        "bucket_bytes": 16_384,
        "leave_at_once": True,
    }
    for rank in torchrun("engine_fp8", engine_tp, tmp_path, options, timeout=1500):
        for found in rank.values():
            assert (found["different"], found["moved"]) == ([], [])
            kinds = {name.split(".")[-2] for name in found["in fp8"]}
            assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
