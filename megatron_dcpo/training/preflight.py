"""What can be known about a run before anything is allocated: a dry run of its configuration."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from megatron_dcpo.config import Config
from megatron_dcpo.data.gym import is_gym
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.errors import UserError, check_world_size
from megatron_dcpo.evaluation.heldout import benchmark_names, check_validation, named_sources
from megatron_dcpo.judging.verifiers import check_verifier
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.training.loggers import check_loggers
from megatron_dcpo.weights.architecture import Architecture, read_architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import check_layout, check_options
from megatron_dcpo.weights.table import number_of_parameters


def check_processes(config: Config, processes: int | None) -> None:
    """Check the number of processes, where it is known, and Transformer Engine, where it is needed. Raises
    :class:`UserError`."""
    parallel = config.parallel
    if processes is not None:
        check_world_size(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
            processes,
            parallel.expert_model_parallel_size
            * (parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size),
        )
    if config.model.transformer_impl == "transformer_engine" or capabilities().transformer_engine:
        from megatron_dcpo.policy.layers import use_transformer_engine

        use_transformer_engine(config.model.transformer_impl)


def check_pass_through(config: Config) -> None:
    """Check the names of what is handed on to Megatron and vLLM, where they are installed, the prompt template and the
    verifier. Raises :class:`UserError`."""
    find_template(config.data.template)
    for source in named_sources(config).values():
        find_template(source.template or config.data.template)
        check_verifier(source.verifier or config.judging.verifier)
    if config.parallel.megatron:
        from megatron_dcpo.policy.megatron_options import check_megatron_options

        check_megatron_options(config.parallel.megatron)
    if config.rollout.vllm:
        from megatron_dcpo.rollout.vllm_host import check_engine_arguments

        check_engine_arguments(config.rollout.vllm)


def check_model(config: Config) -> Architecture:
    """Return the architecture, checked against the parallel layout. Raises :class:`UserError`."""
    arch = read_architecture(config.model.path)
    check_pass_through(config)
    layout = Layout.of(config.parallel)
    check_layout(arch, layout)
    check_options(arch, layout, config.model, config.parallel)
    if arch.num_experts and config.rollout.engine == "server":
        raise UserError(
            "with a mixture of experts rollout.engine=server does not get the policy's weights in this version; "
            "take vllm or transformers"
        )
    return arch


def describe(config: Config) -> dict[str, Any]:
    """Return the facts of a run. Model and data may be absent on the machine that checks (``(not here)``), never wrong."""
    from megatron_dcpo.objectives import build_method

    method = build_method(config.objective)
    check_processes(config, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    check_loggers(config)
    check_pass_through(config)
    parallel, training, evaluation = config.parallel, config.training, config.evaluation
    if evaluation.interval:
        check_validation(config)
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    responses = config.data.prompts_per_step * config.rollout.group_size
    if os.path.exists(config.model.path):
        arch = check_model(config)
        parameters = number_of_parameters(arch)
        model = f"{config.model.path}: {arch.name}, {parameters:,} parameters"
    elif config.model.path.startswith((".", "/")):
        raise UserError(f"model directory {config.model.path} does not exist; pass a Hugging Face checkpoint directory")
    else:
        model = f"{config.model.path} (not here)"
    paths = [source.path for source in config.data.sources]
    data = ", ".join(path if Path(path).exists() or is_gym(path) else f"{path} (not here)" for path in paths)
    return {
        "objective": f"{config.objective.name}, preset {config.objective.preset}",
        "objective options": str(method.options),
        "model": model,
        "data": data,
        "processes": f"a multiple of {math.prod(sizes)}",
        "responses per step": responses,
        "responses per update": responses // training.updates_per_rollout,
        "longest sequence": config.data.max_prompt_length + config.rollout.max_response_length,
        "steps": training.steps,
        **(
            {"validation": f"every {evaluation.interval} steps on {', '.join(benchmark_names(evaluation))}"}
            if evaluation.interval
            else {}
        ),
        "run_dir": config.run_dir,
    }
