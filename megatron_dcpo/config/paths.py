"""The paths in a configuration, seen from the file that names them (by ``nearby_paths.py``)."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dcpo.runtime.nearby_paths import beside
from megatron_dcpo.runtime.run_records import CONFIG, RUN


def seen_from(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the values of ``file`` with every path that is found next to it made absolute. A run
    directory's ``config.yaml`` has them as the run's working directory had them.
    """
    if file.name == CONFIG and file.with_name(RUN).exists():
        return values
    for (section, key), find in _PATHS.items():
        holder: object = values
        for part in section.split("."):
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            holder[key] = find(holder[key], file.parent)
    return values


def _each(find: Callable[[str, Path], str]) -> Callable[[object, Path], object]:
    """Return ``find`` for a text, or each one of a list; other values are left for the checks of
    their type.
    """

    def found(value: object, folder: Path) -> object:
        if isinstance(value, list):
            return [found(one, folder) for one in value]
        return find(value, folder) if isinstance(value, str) else value

    return found


def _import_path(text: str, folder: Path) -> str:
    module_path, _, name = text.rpartition(":")
    return f"{beside(module_path, folder)}:{name}" if module_path.endswith(".py") else text


def _command(text: str, folder: Path) -> str:
    """Return a command whose words that name files beside the configuration are their paths."""
    try:
        words = shlex.split(text)
    except ValueError:  # it is refused where it is read
        return text
    return shlex.join(beside(word, folder) for word in words)


def _benchmarks(text: str, folder: Path) -> str:
    named = [part.partition("=") for part in text.split(",")]
    return ",".join(f"{name}{equal}{beside(path.strip(), folder)}" for name, equal, path in named)


def _sources(value: object, folder: Path) -> object:
    if isinstance(value, list):
        return [_sources(one, folder) for one in value]
    if isinstance(value, dict):
        finds = {"path": _path, "verifier": _verifier, "template": _function, "row": _function}
        return {key: finds[key](one, folder) if key in finds else one for key, one in value.items()}
    return _path(value, folder)


def _verifier(value: object, folder: Path) -> object:
    """Return a verifier with its paths found. Those of a mapping to weights become a list, so that
    a file that is based on this one, or an override, replaces them instead of adding to them.
    """
    if isinstance(value, list):
        return [_verifier(one, folder) for one in value]
    if not isinstance(value, dict):
        return _function(value, folder)
    if isinstance(value.get("name"), str):  # of a list
        return {**value, "name": _import_path(value["name"], folder)}
    return [{"name": _function(name, folder), "weight": weight} for name, weight in value.items()]


_path, _function = _each(beside), _each(_import_path)
_PATHS: dict[tuple[str, str], Callable[[object, Path], object]] = {
    ("model", "path"): _path,
    ("model.adapter", "path"): _path,
    ("data", "path"): _sources,
    ("data", "template"): _function,
    ("data", "row"): _function,
    ("judging", "verifier"): _verifier,
    ("rollout", "agent"): _function,
    ("rollout", "command"): _each(_command),
    ("objective", "name"): _function,
    ("objective", "teacher"): _path,
    ("training", "callback"): _function,
    ("evaluation", "benchmarks"): _each(_benchmarks),
    ("evaluation", "path"): _path,
    ("logging", "to"): _function,
}
