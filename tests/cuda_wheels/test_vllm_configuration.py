"""vLLM makes a configuration for CUDA of what our engine asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_wheels.needs import in_cuda_wheels, printed_by
from tests.helpers.paths import REPOSITORY

pytestmark = in_cuda_wheels


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return printed_by(
        "vllm_configuration",
        str(REPOSITORY / "megatron_dcpo" / "planning" / "models" / "Qwen" / "Qwen3-8B"),
    )


COMMON = {
    "device": "cuda",
    "worker": "vllm.v1.worker.gpu_worker.Worker",
    "dtype": "torch.bfloat16",
    "transfer": "megatron_dcpo",
    "generation_config": "vllm",
}
OF = {
    "training": {
        "sleep": True,
        "load": "dummy",
        "length": 4096,
        "utilization": 0.8,
        "logprobs": "processed_logprobs",
        "eager": False,
        "ranks": 1,
        "adapter": 0,
        "sequences": 512,
        "quantization": None,
    },
    "evaluation": {"logprobs": "raw_logprobs", "load": "auto", "adapter": 16, "sleep": False},
    "no sleep, no graphs": {"sleep": False, "eager": True, "length": 40960},
    "fp8": {
        "quantization": "fp8_per_block",
        "quantized by": "OnlineQuantizationConfig",
        "load": "dummy",
    },
    "two ranks": {"ranks": 2, "executor": "external_launcher", "sleep": True, "sequences": 64},
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", OF)
def test_configuration(case: str, made: dict[str, Any]) -> None:
    assert made[case] == made[case] | COMMON | OF[case]
