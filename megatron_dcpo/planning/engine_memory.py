"""The memory of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.config.rules import check_engine_gpus, check_engine_size, check_servers
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.machine import GB, Machine
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.table import (
    engine_weight_bytes,
    kv_bytes_per_token,
    number_of_parameters,
)


@dataclass(frozen=True)
class EngineMemory:
    """The rollout engine of one rank, in bytes. ``kind`` is ``transformers``, ``vllm`` or
    ``server`` (whose engines have other devices).

    concurrent: the sequences that the engine decodes at once.
    responses: the responses that it generates in a step.
    resident: the bytes that stay on the device while the policy trains.
    """

    kind: str
    tensor_model_parallel_size: int
    weights: int
    kv_cache: int
    kv_per_token: int
    sampling: int
    concurrent: int
    responses: int
    resident: int

    @property
    def cached_tokens(self) -> int:
        """Return the tokens whose keys and values have room; 0 if the engine is not planned."""
        return self.kv_cache // self.kv_per_token


def engine_memory(arch: Architecture, config: Config, machine: Machine) -> EngineMemory:
    """Plan the engine of ``config`` on ``machine``. Raises :class:`UserError` if the number of GPUs
    does not suit it.
    """
    rollout = config.rollout
    if machine.engine_gpus and rollout.engine != "server":
        raise UserError(f"--engine-gpus is for rollout.engine=server, not {rollout.engine}")
    kind: str = rollout.engine
    if kind == "auto":
        kind = "vllm" if machine.processor == "gpu" else "transformers"
    if kind == "transformers":
        return _embedded(arch, config, machine)
    size = rollout.tensor_model_parallel_size
    check_engine_size(arch, size)
    if kind == "server":
        servers = max(1, len(rollout.endpoint))
        if machine.engine_gpus % servers:
            raise UserError(
                f"--engine-gpus {machine.engine_gpus} is not a multiple of the {servers} servers "
                "of rollout.endpoint"
            )
        each = machine.engine_gpus // servers
        check_engine_gpus(config, each, "a server (--engine-gpus)")
        check_servers(config, machine.gpus)
        return _server(arch, config, machine, size)
    if machine.gpus % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {machine.gpus} GPUs"
        )
    return _vllm(arch, config, machine, size)


def _embedded(arch: Architecture, config: Config, machine: Machine) -> EngineMemory:
    rollout = config.rollout
    itemsize = _itemsize(config)
    weights = number_of_parameters(arch) * itemsize
    kv = kv_bytes_per_token(arch, itemsize, 1)
    longest = config.data.max_prompt_length + rollout.max_response_length
    responses = _responses(config, size=1, gpus=machine.gpus)
    groups = max(1, rollout.max_num_seqs // rollout.group_size)
    concurrent = min(responses, groups * rollout.group_size)
    # sample_token: logits, scaled in fp32, log-probs, probabilities and their sums in fp64
    sampling = concurrent * arch.vocab_size * (itemsize + 4 + 4 + 8 + 8)
    # a growing cache copies one layer at a time
    one_layer = concurrent * longest * kv // arch.num_layers
    return EngineMemory(
        kind="transformers",
        tensor_model_parallel_size=1,
        weights=weights,
        kv_cache=concurrent * longest * kv + one_layer,
        kv_per_token=kv,
        sampling=sampling,
        concurrent=concurrent,
        responses=responses,
        resident=weights,
    )


def _server(arch: Architecture, config: Config, machine: Machine, size: int) -> EngineMemory:
    # dcpo launch --engines passes this type on, and of rollout.vllm the quantization alone
    itemsize = dtype_bytes(config.model.params_dtype)
    if not machine.engine_gpus:
        return EngineMemory(
            kind="server",
            tensor_model_parallel_size=size,
            weights=0,
            kv_cache=0,
            kv_per_token=kv_bytes_per_token(arch, itemsize, size),
            sampling=0,
            concurrent=config.rollout.max_num_seqs,
            responses=_responses(config, size=1, gpus=machine.gpus),
            resident=0,
        )
    weights = engine_weight_bytes(arch, itemsize, config.rollout.quantization) // size
    kv = kv_bytes_per_token(arch, itemsize, size)
    responses = _responses(config, size=size, gpus=machine.engine_gpus)
    cache = max(0, _share(config, machine) - weights)
    return EngineMemory(
        kind="server",
        tensor_model_parallel_size=size,
        weights=weights,
        kv_cache=cache,
        kv_per_token=kv,
        sampling=0,
        concurrent=_concurrent(config, machine, responses, cache // kv),
        responses=responses,
        resident=0,
    )


def _vllm(arch: Architecture, config: Config, machine: Machine, size: int) -> EngineMemory:
    itemsize = _itemsize(config)
    weights = engine_weight_bytes(arch, itemsize, config.rollout.quantization) // size
    kv = kv_bytes_per_token(arch, itemsize, size)
    responses = _responses(config, size=size, gpus=machine.gpus)
    cache = _cache(config, _share(config, machine) - weights)
    resident = 0
    if not config.rollout.vllm.get("enable_sleep_mode", True):
        resident = weights + cache
    return EngineMemory(
        kind="vllm",
        tensor_model_parallel_size=size,
        weights=weights,
        kv_cache=cache,
        kv_per_token=kv,
        sampling=0,
        concurrent=_concurrent(config, machine, responses, cache // kv),
        responses=responses,
        resident=resident,
    )


def _itemsize(config: Config) -> int:
    return dtype_bytes(config.rollout.vllm.get("dtype", config.model.params_dtype))


def _share(config: Config, machine: Machine) -> int:
    """Return the bytes of a GPU that vLLM may use."""
    return int(config.rollout.gpu_memory_utilization * machine.gpu_memory_gb * GB)


def _cache(config: Config, room: int) -> int:
    return config.rollout.vllm.get("kv_cache_memory_bytes") or max(0, room)


def _responses(config: Config, size: int, gpus: int) -> int:
    """Return the responses of an engine of ``size`` GPUs in a step, out of ``gpus`` in all."""
    prompts = -(-config.data.prompts_per_step * size // gpus)
    return prompts * config.rollout.group_size


def _concurrent(config: Config, machine: Machine, responses: int, cached_tokens: int) -> int:
    """Return the sequences of mean length that run at once with a cache of ``cached_tokens``."""
    rollout = config.rollout
    mean = config.data.max_prompt_length + (machine.response_tokens or rollout.max_response_length)
    return min(rollout.max_num_seqs, responses, cached_tokens // mean)
