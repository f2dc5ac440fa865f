"""Capture what every shipped configuration hands to Megatron and to vLLM, without building a model
or an engine.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import Config, load_config
from megatron_dcpo.policy import model as model_module
from megatron_dcpo.policy import optimizer as optimizer_module
from megatron_dcpo.rollout import vllm_engine
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.training import run as run_module
from tests.helpers.shipped import model_of


def arguments(path: Path) -> dict[str, Any]:
    """Return the arguments of one configuration: only fields that differ from the defaults of
    Megatron's classes.
    """
    model = model_of(path)
    config = load_config(path, [f"model.path={model}"])
    arch = read_architecture(model)
    transformer = model_module.transformer_config(
        arch, config.parallel, torch_dtype(config.model.params_dtype)
    )
    found = {"transformer": _changed(transformer), "engine": engine_arguments(path, model)}
    if (
        config.model.adapter is None
    ):  # otherwise the model is frozen: Megatron has neither DDP nor an optimizer
        found |= {"ddp": _ddp(config, transformer), "optimizer": _optimizer(config, transformer)}
    return found


def _changed(value: Any) -> dict[str, str]:
    """Return the fields of a Megatron dataclass that differ from their defaults, as text."""
    changed = {}
    for field in dataclasses.fields(value):
        if "init_method" in field.name:  # weights come from a checkpoint; their text has an address
            continue
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default:
            found = getattr(value, field.name)
            changed[field.name] = getattr(found, "__name__", repr(found))
    return changed


def _ddp(config: Config, transformer: Any) -> dict[str, str]:
    with mock.patch.object(model_module, "DistributedDataParallel") as wrapped:
        model_module._wrap_for_training(
            SimpleNamespace(), _no_bf16(transformer), config.parallel, is_first=True
        )
    return _changed(wrapped.call_args.args[1])


def _no_bf16(transformer: Any) -> Any:
    return dataclasses.replace(transformer, bf16=False) if transformer.bf16 else transformer


def _optimizer(config: Config, transformer: Any) -> dict[str, Any]:
    policy: Any = SimpleNamespace(chunks=(), config=SimpleNamespace())
    with (
        mock.patch.object(optimizer_module, "get_megatron_optimizer") as built,
        mock.patch.object(optimizer_module, "OptimizerParamScheduler") as schedule,
    ):
        optimizer_module.build_scheduler(optimizer_module.build_optimizer(config, policy), config)
    return {
        "optimizer": _changed(built.call_args.args[0]),
        "schedule": {
            name: repr(value) for name, value in sorted(schedule.call_args.kwargs.items())
        },
    }


def engine_arguments(path: Path, model: Path) -> dict[str, str]:
    """Return the arguments of vllm.LLM, as on one process with a cache whose size is left
    to vLLM.
    """
    config = load_config(path, [f"model.path={model}"])

    class Built(Exception):
        pass

    def llm(*arguments: Any, **options: Any) -> None:
        raise Built(options)

    with mock.patch.object(run_module, "build_local_engine") as build:
        run_module.build_engine(config, SimpleNamespace(world_size=64))
    options = build.call_args.args[2]
    engine = object.__new__(vllm_engine.VllmEngine)
    engine.model_dir, engine.options, engine.arch = (
        Path("MODEL"),
        options,
        read_architecture(model),
    )
    engine.tensor_model_parallel_size = options.tensor_model_parallel_size
    vllm: Any = ModuleType("vllm")
    vllm.LLM = llm
    weights: Any = ModuleType("megatron_dcpo.rollout.vllm_weights")
    weights.register = lambda: "registered"
    modules = {"vllm": vllm, "megatron_dcpo.rollout.vllm_weights": weights}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(vllm_engine, "cache_bytes", return_value=0),
        mock.patch.object(vllm_engine, "every_rank_returns_experts", nullcontext),
    ):
        try:
            engine._start()
        except Built as built:
            return {name: repr(value) for name, value in sorted(built.args[0].items())}
    raise AssertionError("vllm.LLM was not called")


def stored(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``found`` with equal arguments written once: of each kind the different ones, and
    which one each file has.
    """
    kinds: dict[str, Any] = {}
    for name, by_kind in found.items():
        for kind, values in by_kind.items():
            entry = kinds.setdefault(kind, {"different": [], "of": {}})
            if values not in entry["different"]:
                entry["different"].append(values)
            entry["of"][name] = entry["different"].index(values)
    return kinds
