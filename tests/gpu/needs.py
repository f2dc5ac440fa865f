"""What the tests of this directory need; a test is skipped by the name of what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megatron_dcpo.runtime.device import has_cuda

CUDA = pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")
TRANSFORMER_ENGINE = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
# the layers that a policy can have on a GPU
LAYERS = ["local", pytest.param("transformer_engine", marks=TRANSFORMER_ENGINE)]


def gpus(number: int, found: int | None = None) -> Any:
    """Skipped on a machine with fewer; ``found`` stands in for counting them."""
    found = torch.cuda.device_count() if found is None else found
    return pytest.mark.skipif(
        found < number, reason=f"needs {number} GPUs, this machine has {found}"
    )


def engine_layers() -> str:
    """The layers of a policy beside a vLLM engine: Transformer Engine's where they are."""
    return "transformer_engine" if find_spec("transformer_engine") else "local"
