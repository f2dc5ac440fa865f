"""What ``dcpo evaluate`` reads: the sections of a run's configuration that an evaluation has a use
for, with the same names and the same overrides.

    defaults  <-  the run of --as-trained  <-  --config FILE  <-  flags and overrides

An option that only training reads is ignored in a file, which describes the training as well, and
refused as an override.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.config import (
    checked,
    load_config,
    merged,
    overridden,
    parse_overrides,
    read_file,
    section_fields,
)
from megatron_dcpo.config.evaluation_sections import EngineConfig, EvaluateConfig
from megatron_dcpo.config.rules import AGENT_OPTIONS, check_evaluation
from megatron_dcpo.config.sections import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.run_records import read_launches

Values = dict[str, Any]  # of nested sections, as YAML has them


def load_evaluation(
    overrides: Sequence[str] | Mapping[str, Any] = (),
    file: str | None = None,
    as_trained: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    evaluates_model: bool = True,
) -> EvaluateConfig:
    """Return the configuration of an evaluation from dotted ``overrides``, texts or values by name,
    the sections of a configuration ``file``, and the ``config.yaml`` of the run that it is to agree
    with.

    ``defaults`` are nested values that everything else overrides. The model in a file is not
    evaluated if a server is, or with ``evaluates_model`` False. Raises :class:`UserError`.
    """
    if not isinstance(overrides, Mapping):
        overrides = parse_overrides(overrides)
    asks_server = bool(overrides.get("endpoint.url"))
    layers = [dict(defaults or {})]
    if as_trained is not None:
        layers.append(values_as_trained(as_trained, server=asks_server))
    if file is not None:
        from_file = values_of_file(file)
        if asks_server or not evaluates_model:
            from_file.get("model", {}).pop("path", None)
        layers.append(from_file)
    values: Values = {}
    for layer in layers:
        values = merged(values, layer)
    for name, value in overrides.items():
        values = overridden(values, name, value)
    if _value(values, "evaluation.temperature") == 0:  # greedy responses are all the same
        values["evaluation"].setdefault("samples", 1)
    source = "options" if file is None else file
    config = checked(values, EvaluateConfig, source)
    check_evaluation(config, source)
    return config


def values_as_trained(path: str, server: bool) -> Values:
    """Return the options that make an evaluation agree with the run whose configuration is at
    ``path``: how responses are judged, how prompts are made, and how long a response may be.

    For a ``server`` the prompts are rendered by the tokenizer of the run's model.
    """
    run = load_config(path)
    data: Values = {"template": run.data.template, "thinking": run.data.thinking}
    data |= {"columns": dict(run.data.columns), "row": run.data.row, "unread": run.data.unread}
    data["sources"] = _own_sources(run)
    values: Values = {
        "judging": dataclasses.asdict(run.judging),
        "data": data,
        "rollout": {"max_response_length": run.rollout.max_response_length},
    }
    if run.rollout.runs_agents and not server:
        agents = ("agent", "agent_python", "command", *AGENT_OPTIONS)
        known = section_fields(EngineConfig)
        values["rollout"] |= {n: getattr(run.rollout, n) for n in agents if n in known}
    if server:
        launches = read_launches(Path(path).parent)
        values["endpoint"] = {"tokenizer": hub.recorded_name(run.model.path, launches)}
    return values


def _own_sources(run: Config) -> list[Values]:
    """Return the sources of a run that have their own verifier or template, or are read by columns
    or a function.
    """
    if isinstance(run.data.path, str):
        return []
    found = []
    for source in run.data.sources:
        if source.verifier or source.template or source.columns or source.row:
            names = ("path", "name", "verifier", "template", "columns", "row")
            chosen = {name: getattr(source, name) for name in names}
            found.append({name: value for name, value in chosen.items() if value})
    return found


def values_of_file(path: str) -> Values:
    """Return the options in a configuration file that an evaluation reads. What only a training
    reads is left out, and so are a training's run directory and its server.

    Raises :class:`UserError` for an option that neither knows.
    """
    values = read_file(path)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), list):
        training = {"run_dir": "", "model": {"path": ""}, "data": {"path": data["path"]}}
        sources = _own_sources(checked(training, Config, path))
        data.setdefault("sources", sources)
    kept: Values = {}
    for name, section in values.items():
        known = section_fields(EvaluateConfig).get(name)
        if section_fields(known) and not isinstance(section, dict | None):
            raise UserError(f"{path}: {name}: expected a mapping of options, found {section!r:.40}")
        if known is None or not isinstance(section, dict):
            checked_later = name in section_fields(Config)
            if not checked_later:
                raise UserError(f"{path}: unknown section {name}")
            continue
        in_training = section_fields(section_fields(Config).get(name))
        for key, value in section.items():
            if key in section_fields(known) or key not in in_training:
                kept.setdefault(name, {})[key] = value
    if _value(kept, "rollout.engine") == "server":
        del kept["rollout"]["engine"]
    return kept


def _value(values: Mapping[Any, Any], name: str) -> object:
    """Return the value of a dotted name in nested values; None if there is none."""
    section, _, key = name.partition(".")
    inner = values.get(section)
    return inner.get(key) if isinstance(inner, Mapping) else None
