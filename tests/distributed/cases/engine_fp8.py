"""One rank: a policy in bf16 and a vLLM engine beside it that quantizes its weights to FP8. After
updates in small buckets the engine must hold what a new one makes of the same weights when it loads
them.

Written per model: the names of the tensors that differ, of those whose memory is another one than
before, and of those in FP8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.distributed import barrier
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.training.weight_sync import writers_of
from megatron_dcpo.weights.hf_checkpoint import write_checkpoint
from megatron_dcpo.weights.reshard import export_buckets, gather_full, plan_for
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config
from tests.distributed.cases.engine_parity import move_weights


def engine_of(model: str, options: dict[str, Any], dummy_weights: bool) -> VllmEngine:
    return VllmEngine(
        model,
        EngineOptions(
            dtype="bf16",
            tensor_model_parallel_size=options["engine_tp"],
            max_model_len=64,
            max_num_seqs=4,
            dummy_weights=dummy_weights,
            arguments={
                "quantization": options["quantization"],
                "kv_cache_memory_bytes": 16 << 20,
                "enforce_eager": True,
            },
        ),
    )


def parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    return dict(worker.model_runner.model.named_parameters())


def begin_and_break_off(engine: VllmEngine, policy: Any, plan: Any) -> None:
    """Hand over every second bucket; vLLM refuses to finish."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    engine.llm.start_weight_update()
    for number, bucket in enumerate(export_buckets(policy, plan)):
        if number % 2 == 0:
            engine.llm.update_weights({"update_info": {"pieces": bucket, "arch": engine.arch}})
    try:
        engine.llm.finish_weight_update(weight_version="9")
    except RuntimeError:
        worker._weight_update_active = False
    else:
        raise AssertionError("an update without all weights was taken for complete")


def check_model(model: str, options: dict[str, Any], topology: Any) -> dict[str, Any]:
    parallel = parallel_config(options["parallel"])
    policy = build_policy(
        config_for_test(model, "bf16", parallel).model, parallel, topology, training=False
    )
    plan = plan_for(policy, options["engine_tp"], options["bucket_bytes"])
    engine = engine_of(model, options, dummy_weights=True)
    places = {name: tensor.data_ptr() for name, tensor in parameters(engine).items()}
    for update in (1, 2):
        move_weights(policy, update)
        begin_and_break_off(engine, policy, plan)
        engine.update_weights(export_buckets(policy, plan), update)
    held = {name: tensor.detach().clone() for name, tensor in parameters(engine).items()}
    moved = [
        name for name, tensor in parameters(engine).items() if tensor.data_ptr() != places[name]
    ]
    out = Path(options["out"], Path(model).name + "_exported")
    write_checkpoint(
        out,
        Path(model),
        policy.arch,
        torch_dtype("bf16"),
        lambda shapes: gather_full(policy, shapes),
        writers_of(topology),
    )
    barrier()
    engine.close()
    loaded = parameters(engine_of(str(out), options, dummy_weights=False))
    assert held.keys() == loaded.keys()
    return {
        "different": [name for name in held if not torch.equal(held[name], loaded[name])],
        "moved": moved,
        "in fp8": [name for name in held if held[name].dtype == torch.float8_e4m3fn],
    }


def run(options: dict[str, Any]) -> Any:
    topology = initialize_layout(parallel_config(options["parallel"]))
    return {
        name: check_model(model, options, topology) for name, model in options["models"].items()
    }
