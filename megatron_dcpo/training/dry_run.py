"""``dcpo train --dry-run``: a configuration against model, tokenizer and data. Loads no weights,
and downloads none, and starts no ranks.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.config import Config, ObjectiveConfig, as_dict, flat
from megatron_dcpo.config.without_effect import options_without_effect
from megatron_dcpo.data.row_files import is_here, is_hub_name
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.held_out import benchmark_names, check_keep_best, load_held_out
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.objectives import build_method, resolve
from megatron_dcpo.rollout.local_engine import choose_engine
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.brought import REASONING_GYM
from megatron_dcpo.training.loggers import check_loggers
from megatron_dcpo.training.preflight import (
    check_lengths,
    check_model,
    check_pass_through,
    check_processes,
    check_teacher,
    check_tokens,
)
from megatron_dcpo.training.provenance import check_run_dir, date_of, with_model_here
from megatron_dcpo.training.sources import contradictions, load_sources, trained_problems
from megatron_dcpo.training.warnings import too_few
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.table import number_of_parameters, stored_shapes

# The paper's method, its ablations, and what it compares with (docs/algorithms.md#2-methods).
PAPER_METHODS = ("grpo", "dcpo", "coupled", "rlcr", "ccgspg", "posthoc")
# The paper's values of the options that decide what a step computes. Methods without a confidence
# line have the template grpo.
PAPER_SETTINGS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "data.template": ("paper", "grpo"),
        "data.prompts_per_step": (256,),
        "rollout.group_size": (8,),
        "rollout.temperature": (1.0,),
        "rollout.top_p": (1.0,),
        "rollout.top_k": (0,),
        "rollout.max_response_length": (3000,),
        "rollout.agent": ("",),
        "rollout.command": ("",),
        "rollout.filter_groups": ("none",),
        "rollout.max_staleness": (0,),
        "judging.graded": (False,),
        "optimizer.lr": (1e-6,),
        "optimizer.lr_decay_style": ("constant",),
        "optimizer.lr_warmup_iters": (0,),
        "optimizer.weight_decay": (0.01,),
        "optimizer.clip_grad": (1.0,),
        "training.updates_per_rollout": (4,),
        "training.steps": (120,),
    }
)


def describe(config: Config, allow_missing: bool = False) -> dict[str, Any]:
    """Return the facts of a run and of its data, tokenizer and checkpoint. No weights are loaded.

    Raises :class:`UserError` for contradictions, and for files that are not on this machine unless
    ``allow_missing``.
    """
    if not allow_missing:
        config = with_model_here(config, weights=False)
    world_size = os.environ.get("WORLD_SIZE")
    check_processes(config, None if world_size is None else int(world_size))
    check_loggers(config)
    build_method(config.objective)
    check_pass_through(config)
    evaluation = config.evaluation
    if evaluation.interval:
        check_keep_best(config)
    sizes = (
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        config.parallel.context_parallel_size,
    )
    responses = config.data.prompts_per_step * config.rollout.group_size
    facts = {
        "objective": f"{config.objective.name}, preset {config.objective.preset}",
        "unlike the paper": ", ".join(unlike_the_paper(config)) or "nothing",
        "without effect": "; ".join(options_without_effect(config)) or "nothing",
        **_describe_inputs(config, allow_missing),
        "processes": "any number" if math.prod(sizes) == 1 else f"a multiple of {math.prod(sizes)}",
        "responses per step": responses,
        "responses per update": responses // config.training.updates_per_rollout,
        "steps": config.training.steps,
    }
    if evaluation.interval:
        names = ", ".join(benchmark_names(evaluation))
        facts["validation"] = f"every {evaluation.interval} steps on {names}"
    check_run_dir(config.run_dir, config.training.resume)
    facts["run_dir"] = config.run_dir
    return facts


def unlike_the_paper(config: Config) -> list[str]:
    """Return the options that decide what a step computes and differ from the paper's, as
    ``name=value``: method, objective, batch, sampling, optimizer. Model and data are not compared.
    """
    objective = config.objective
    changed = []
    if objective.name not in PAPER_METHODS:
        changed.append(f"objective.name={objective.name}")
    usual = _flat(ObjectiveConfig(name=objective.name))
    for name, value in _flat(objective).items():
        if value != usual[name] and name != "preset":
            changed.append(f"objective.{name}={value}")
    values = dict(flat(as_dict(config)))
    for name, papers in PAPER_SETTINGS.items():
        if values[name] not in papers:
            changed.append(f"{name}={values[name]}")
    if config.frozen:
        changed.append("model.adapter")
    return changed


def _flat(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return the resolved options, the method's own among them."""
    values = resolve(objective).model_dump()
    return values | values.pop("options")


def _describe_inputs(config: Config, allow_missing: bool) -> dict[str, Any]:
    """Return the facts of model, tokenizer and data."""
    path = config.model.path
    paths = [source.path for source in config.data.sources]
    unread = [source for source in paths if _is_unread(source, allow_missing)]
    named = [f"{source} (not here)" if source in unread else source for source in paths]
    name = hub.name_of(path)
    facts = {"model": name, "data": ", ".join(named)}
    absent = allow_missing and not any(Path(path).glob("*.safetensors"))
    if absent and not Path(path).is_dir():
        return facts | {"model": f"{path} (not here)"}
    arch = check_model(config)
    facts["model"] += f": {arch.name}, {number_of_parameters(arch):,} parameters"
    facts["engine"] = describe_engine(config)
    if absent:
        return facts
    facts["model"] += describe_weights(path, arch)
    tokenizer = load_tokenizer(path)
    vocabulary = token_bytes(tokenizer)
    check_tokens(config, arch, vocabulary)
    teacher = config.objective.teacher
    if not allow_missing or Path(teacher).is_dir():
        check_teacher(config, arch, tokenizer, vocabulary)
        facts["teacher"] = teacher
    elif teacher:
        facts["teacher"] = f"{teacher} (not here)"
    facts["tokenizer"] = f"{len(vocabulary.table):,} tokens, at most {arch.vocab_size:,}"
    if unread:
        return facts
    date = date_of(config)
    loaded = load_sources(config, tokenizer, date)
    held_out = None
    if not allow_missing:
        held_out = load_held_out(config, tokenizer, vocabulary, date)
    longest = check_lengths(config, arch, loaded, held_out)
    first = loaded[0].prompts[0].token_ids
    facts["data"] = ", ".join(
        f"{source.path}: {len(source.prompts):,} problems" for source in loaded
    )
    facts["longest prompt"] = f"{longest} tokens, at most {config.data.max_prompt_length}"
    whole = longest + config.rollout.max_response_length
    facts["longest sequence"] = f"{whole} tokens, at most {arch.max_position_embeddings}"
    facts["first prompt"] = f"{len(first)} tokens: {tokenizer.decode(first)[:500]!r}"
    overlap = trained_problems(loaded, held_out.prompts.values()) if held_out else ""
    if overlap:
        facts["held out"] = overlap
    twice = contradictions(loaded)
    if twice:
        facts["answers"] = twice
    problems = sum(len(source.prompts) for source in loaded)
    warning = too_few(problems, "problems", "data.prompts_per_step", config.data.prompts_per_step)
    if warning:
        facts["warning"] = warning
    return facts


def describe_engine(config: Config) -> str:
    """Return what samples, or why it cannot on this machine: the run may be meant for another."""
    engine = config.rollout.engine
    if engine == "server":
        return f"server, {config.rollout.endpoint}"
    try:
        return choose_engine(engine, config.model.path)
    except UserError as error:
        return f"{engine}, but not on this machine: {error}"


def describe_weights(path: str, arch: Architecture) -> str:
    """Return what is known of the weights, which a model of the hub may not have here yet."""
    commit = hub.commit_of(path)
    if commit:
        return f"; commit {commit} of the hub, whose weights the run downloads"
    HFReader(path, arch).check(arch)
    return f"; its {len(stored_shapes(arch)):,} tensors have the shapes that config.json implies"


def _is_unread(path: str, allow_missing: bool) -> bool:
    """Return whether the data is not on this machine and need not be: because missing data is
    allowed, or because a run fetches it from the hub.
    """
    if path.startswith(REASONING_GYM) or is_here(path):
        return False
    return allow_missing or (is_hub_name(path) and importlib.util.find_spec("datasets") is not None)
