"""What can be known about a run before anything is allocated: a dry run of its configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture, read_architecture
from megatron_dcpo.weights.planner import Layout, check_layout
from megatron_dcpo.weights.table import hf_shapes


def layout_of(config: Config, transformer_engine: bool = False) -> Layout:
    """The planner's view of a configuration."""
    parallel = config.parallel
    return Layout(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        config.model.make_vocab_size_divisible_by,
        transformer_engine,
    )


def check_model(config: Config) -> Architecture:
    """The architecture, checked against the parallel layout. Raises :class:`UserError`."""
    arch = read_architecture(config.model.path)
    check_layout(arch, layout_of(config))
    return arch


def describe(config: Config) -> dict[str, Any]:
    """The facts of a run. Model and data may be absent on the machine that checks (``(not here)``), never wrong."""
    from megatron_dcpo.objectives import build_objective

    objective = build_objective(config.objective)
    parallel, training = config.parallel, config.training
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    responses = config.data.prompts_per_step * config.rollout.group_size
    if os.path.exists(config.model.path):
        arch = check_model(config)
        parameters = sum(_product(shape) for shape in hf_shapes(arch).values())
        model = f"{config.model.path}: {arch.name}, {parameters:,} parameters"
    elif config.model.path.startswith((".", "/")):
        raise UserError(f"model directory {config.model.path} does not exist; pass a Hugging Face checkpoint directory")
    else:
        model = f"{config.model.path} (not here)"
    data = config.data.path if Path(config.data.path).exists() else f"{config.data.path} (not here)"
    return {
        "objective": f"{config.objective.name}, preset {config.objective.preset}",
        "objective options": str(objective.options),
        "model": model,
        "data": data,
        "processes": f"a multiple of {model_parallel}",
        "responses per step": responses,
        "responses per update": responses // training.updates_per_rollout,
        "longest sequence": config.data.max_prompt_length + config.rollout.max_response_length,
        "steps": training.steps,
        "run_dir": config.run_dir,
    }


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
