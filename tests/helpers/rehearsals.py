"""Rehearsals of a small job with a fault planted in its code: ``python -m tests.helpers.rehearsals
DIRECTORY`` writes what became of each as JSON.

A rehearsal registers a device, which is a process's for good, so they have one of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import layers as megatron_layers

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.config import (
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
)
from megatron_dcpo.objectives import ObjectiveConfig
from megatron_dcpo.policy import batching, model, output_layer, schedule
from megatron_dcpo.rehearsal import job
from megatron_dcpo.rehearsal.inputs import InventedEngine
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.rehearsed_world import Rank
from megatron_dcpo.weights.reshard import gather_full
from megatron_dcpo.weights.table import hf_shapes
from tests.distributed.cases.common import parallel_config

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}
PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RANKS = 4


def small_job(directory: Path, parallel: dict[str, Any], dtype: str = "bf16") -> Config:
    """The configuration of a job with the model in ``directory``."""
    return Config(
        run_dir=str(directory / "run"),
        model=ModelConfig(path=str(directory), params_dtype=dtype, transformer_impl="local"),
        data=DataConfig(path="unused", max_prompt_length=88, prompts_per_step=8),
        rollout=RolloutConfig(max_response_length=936, group_size=4),
        training=TrainingConfig(steps=1, micro_batch_size=2, max_tokens_per_micro_batch=2048),
        parallel=parallel_config(parallel),
    )


def config_of(directory: Path, **parallel: Any) -> Config:
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return small_job(directory, {**PARALLEL, **parallel})


def tensor_left_on_the_host() -> Any:
    return patch.object(
        batching, "to_device", lambda values, dtype=None: torch.tensor(values, dtype=dtype)
    )


def missing_to() -> Any:
    """A model chunk is not moved: its norms stay where Python made them."""
    return patch.object(model, "current_device", lambda: torch.device("cpu"))


def product_of_two_types() -> Any:
    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b, out=out)

    return patch.object(output_layer, "fp32_product", product)


def wrong_split() -> Any:
    return patch.object(
        megatron_layers,
        "reduce_scatter_to_sequence_parallel_region",
        lambda values, *_, **__: values,
    )


def rows_of_the_whole_sequence() -> Any:
    """The output layer reads rows of all tokens from a rank's part of them."""
    return patch.object(
        schedule, "gather_from_sequence_parallel_region", lambda values, **_: values
    )


def all_logits() -> Any:
    """The output layer keeps the logits of every chunk."""
    forward = output_layer._forward
    kept = []

    def keeping(layer: Any, chunk: Any) -> Any:
        kept.append(chunk.p.clone())
        return forward(layer, chunk)

    return patch.object(output_layer, "_forward", keeping)


@contextmanager
def optimizer_state_twice() -> Iterator[None]:
    build = job.build_optimizer
    kept = []

    def twice(*arguments: Any) -> Any:
        optimizer = build(*arguments)
        for group in optimizer.param_groups:
            kept.extend(parameter.detach().clone() for parameter in group["params"])
        return optimizer

    with patch.object(job, "build_optimizer", twice):
        yield


def wrong_group() -> Any:
    """The log-sum-exp of a vocabulary's parts is reduced over the data-parallel ranks."""
    of = output_layer.OutputLayer.of.__func__  # type: ignore[attr-defined]

    def with_another_group(cls: type, *arguments: Any, **options: Any) -> Any:
        from megatron.core import parallel_state

        layer = of(cls, *arguments, **options)
        return dataclasses.replace(layer, group=parallel_state.get_data_parallel_group())

    return patch.object(output_layer.OutputLayer, "of", classmethod(with_another_group))


def item_in_the_loop() -> Any:
    fused = schedule.fused_loss

    def waiting(**options: Any) -> Any:
        total, outputs = fused(**options)
        total.item()
        return total, outputs

    return patch.object(schedule, "fused_loss", waiting)


def another_shape_in_the_engine() -> Any:
    def engine_of(arch: Architecture, config: Config) -> InventedEngine:
        shapes = dict(hf_shapes(arch))
        shapes["model.norm.weight"] = (511,)
        return InventedEngine(shapes, 1)

    return patch.object(job, "engine_of", engine_of)


@contextmanager
def save_of_everything() -> Iterator[None]:
    state = job.MegatronModel.state

    def gathered(self: Any, step: int, run: dict[str, Any]) -> Any:
        whole = gather_full(self.policy, hf_shapes(self.policy.arch))
        return {**state(self, step, run), "whole": list(whole.values())}

    with patch.object(job.MegatronModel, "state", gathered):
        yield


def chunks_by_the_tokens_of_a_rank() -> Any:
    """The fault that a rehearsal found: ranks with and without the vocabulary's padding."""
    chunks = output_layer._chunks

    def by_tokens(layer: Any, hidden: torch.Tensor, targets: torch.Tensor) -> Any:
        with patch.object(output_layer, "LOGITS_AT_ONCE", len(layer.weight) * layer.width // 8):
            yield from chunks(layer, hidden, targets)

    return patch.object(output_layer, "_chunks", by_tokens)


@contextmanager
def in_different_numbers() -> Iterator[None]:
    """Faults that show in memory, traffic, waits and the host's memory, each in another one."""
    with optimizer_state_twice(), wrong_group(), item_in_the_loop(), save_of_everything():
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "tensor_left_on_the_host": tensor_left_on_the_host,
    "missing_to": missing_to,
    "product_of_two_types": product_of_two_types,
    "wrong_split": wrong_split,
    "rows_of_the_whole_sequence": rows_of_the_whole_sequence,
    "all_logits": all_logits,
    "in_different_numbers": in_different_numbers,
    "another_shape_in_the_engine": another_shape_in_the_engine,
    "chunks_by_the_tokens_of_a_rank": chunks_by_the_tokens_of_a_rank,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "first stage": (0, {"pipeline_model_parallel_size": 2}),
    "last stage": (2, {"pipeline_model_parallel_size": 2}),
    "context parallel, padded": (1, {"context_parallel_size": 2, "sequence_packing": False}),
    "full recomputation": (0, {"recompute_granularity": "full"}),
}


TAUGHT = (0, 2)  # of the first and the last of two stages


def taught(directory: Path) -> Config:
    """The configuration of a job on two stages with a wider and deeper teacher."""
    teacher = directory / "teacher"
    teacher.mkdir(exist_ok=True)
    larger = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
    (teacher / "config.json").write_text(json.dumps(SHAPE | larger))
    objective = ObjectiveConfig(teacher=str(teacher), distill_coef_reasoning=1.0)
    config = config_of(directory, pipeline_model_parallel_size=2)
    return dataclasses.replace(config, objective=objective)


def rehearsed(config: Config, rank: int) -> dict[str, Any]:
    arch = read_architecture(config.model.path)
    try:
        return job.rehearse(config, arch, Rank(rank=rank, world_size=RANKS)).as_dict()
    except Exception as error:
        with contextlib.suppress(Exception):
            distributed.destroy()
        return {"stopped": f"{type(error).__name__}: {error}"}


def main(directory: Path) -> None:
    found: dict[str, Any] = {}
    for name, planted in FAULTS.items():
        with planted():
            found[name] = rehearsed(config_of(directory), rank=0)
            gc.collect()
    for rank in TAUGHT:
        found[f"taught, rank {rank}"] = rehearsed(taught(directory), rank=rank)
    with FAULTS["chunks_by_the_tokens_of_a_rank"]():
        found["last tensor-parallel rank"] = rehearsed(config_of(directory), rank=1)
    for name, (rank, parallel) in LAYOUTS.items():
        found[name] = rehearsed(config_of(directory, **parallel), rank=rank)
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
