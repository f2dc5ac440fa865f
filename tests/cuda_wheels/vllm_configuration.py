"""vLLM's configuration for CUDA, made of what ``VllmEngine`` asks for, without a device. A process
of its own.

    python -m tests.cuda_wheels.vllm_configuration MODEL      prints one JSON object: of every case
    what vLLM made of it

vLLM's compiled parts want a driver's library to be loaded: :func:`driver` makes one whose every
function says that there is no device. The card that vLLM asks its platform about is made up.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

CASES: dict[str, dict[str, Any]] = {
    "training": {"dummy_weights": True, "max_model_len": 4096, "gpu_memory_utilization": 0.8},
    "evaluation": {
        "raw_logprobs": True,
        "max_model_len": 4096,
        "sleep": False,
        "arguments": {"enable_lora": True, "max_lora_rank": 16},
    },
    "no sleep, no graphs": {
        "sleep": False,
        "arguments": {"enforce_eager": True},
        "dtype": "bfloat16",
    },
    "fp8": {"dummy_weights": True, "arguments": {"quantization": "fp8_per_block"}},
    "two ranks": {"dummy_weights": True, "tensor_model_parallel_size": 2, "max_num_seqs": 64},
}


def driver(directory: Path) -> Path:
    """A ``libcuda.so.1`` with the functions that vLLM's libraries want of it."""
    [package] = list(find_spec("vllm").submodule_search_locations)  # type: ignore[union-attr, arg-type]
    wanted: set[str] = set()
    for library in Path(package).rglob("*.so"):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        names = (line.split()[-1] for line in listed.stdout.splitlines())
        wanted |= {name for name in names if name.startswith("cu") and name[2:3].isupper()}
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(wanted))
    (directory / "driver.c").write_text(source)
    made = directory / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(made), str(directory / "driver.c")], check=True)
    return made


def pretend() -> None:
    """A card for vLLM, before it looks for one; and for the package."""
    with tempfile.TemporaryDirectory() as directory:
        ctypes.CDLL(str(driver(Path(directory))), mode=ctypes.RTLD_GLOBAL)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Card(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

    vllm.platforms._current_platform = Card()
    from megatron_dcpo.runtime import device

    device._CPU = device._GPU


class Asked(Exception):
    """What ``LLM`` would start an engine with."""


def configuration(model: str, options: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.engine.llm_engine import LLMEngine

    from megatron_dcpo.rollout.engine_options import EngineOptions
    from megatron_dcpo.rollout.vllm_engine import VllmEngine

    def instead(engine_args: Any, *_: Any, **__: Any) -> None:
        raise Asked(engine_args)

    LLMEngine.from_engine_args = instead
    ranks = options.get("tensor_model_parallel_size", 1)
    os.environ |= {
        "WORLD_SIZE": str(ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    try:
        VllmEngine(model, EngineOptions(**options))
    except Asked as asked:
        (arguments,) = asked.args
    made = arguments.create_engine_config()
    return {
        "device": made.device_config.device_type,
        "worker": made.parallel_config.worker_cls,
        "executor": str(made.parallel_config.distributed_executor_backend),
        "ranks": made.parallel_config.tensor_parallel_size,
        "sleep": made.model_config.enable_sleep_mode,
        "dtype": str(made.model_config.dtype),
        "logprobs": made.model_config.logprobs_mode,
        "length": made.model_config.max_model_len,
        "eager": made.model_config.enforce_eager,
        "load": str(made.load_config.load_format),
        "quantization": made.model_config.quantization,
        "quantized by": type(made.quant_config).__name__,
        "transfer": made.weight_transfer_config.backend,
        "utilization": made.cache_config.gpu_memory_utilization,
        "sequences": made.scheduler_config.max_num_seqs,
        "adapter": made.lora_config.max_lora_rank if made.lora_config else 0,
        "generation_config": made.model_config.generation_config,
    }


def main() -> None:
    pretend()
    print(
        json.dumps({name: configuration(sys.argv[1], options) for name, options in CASES.items()})
    )


if __name__ == "__main__":
    main()
