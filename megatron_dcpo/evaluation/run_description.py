"""What a report says about its runs besides their results: where they come from and how they
differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_dcpo.config import flat
from megatron_dcpo.runtime.run_records import CONFIG, differing, read_launches

SAMPLING = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "max_tokens": "tokens at most",
}
# Options that differ between runs of the same configuration.
_OF_EVERY_RUN = ("run_dir", "seed", "training.resume")
_MOST_STEPS = 10**12  # more are a damaged configuration


def sampling_text(settings: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """Return how the responses of an evaluation were sampled, in words; "" if its settings are not
    known.
    """
    if not settings:
        return ""
    parts = []
    for key, label in SAMPLING.items():
        if key in settings:
            parts.append(f"{label} {settings[key]}")
    if "template" in settings:
        parts.append(f"template {settings['template']}")
    if "thinking" in settings:
        parts.append(f"thinking {settings['thinking']}")
    repeats = evaluation.get("overall", {}).get("repeats")
    if repeats:
        parts.append(f"{repeats} responses each")
    return ", ".join(parts)


def origin(name: str, path: Path, steps: int, evaluated_model: str = "") -> dict[str, Any]:
    """Return a row of the table of runs, from ``run.json`` and ``config.yaml``, and for an
    evaluation the model that it names. Values that none of them has are empty.
    """
    launches = read_launches(path)
    config = options(path)
    last = launches[-1] if launches else {}
    commit = str(last.get("commit") or "")[:12]
    if last.get("uncommitted_changes"):
        commit += "+"
    started = ""
    if launches:
        started = str(launches[0].get("time", ""))[:16].replace("T", " ")
    return {
        "run": name,
        "model": config.get("model.path") or evaluated_model,
        "method": config.get("objective.name", ""),
        "data": str(config.get("data.path", "")),
        "seed": config.get("seed", ""),
        "steps": steps or "",
        "started": started,
        "version": f"{last.get('version', '')} {commit}".strip(),
        "device": last.get("device", ""),
    }


def options(path: Path) -> dict[str, Any]:
    """Return the options of a run by dotted name; none if its ``config.yaml`` is missing or cannot
    be read.
    """
    try:
        return dict(flat(OmegaConf.to_container(OmegaConf.load(path / CONFIG))))
    except (OSError, OmegaConfBaseException, YAMLError, ValueError, RecursionError):
        return {}


def total_steps(path: Path) -> int | None:
    """Return ``training.steps`` from the ``config.yaml`` of a run, None if it has none."""
    steps = options(path).get("training.steps")
    return steps if isinstance(steps, int) and 0 < steps < _MOST_STEPS else None


def differences(paths: Mapping[str, Path]) -> list[tuple[str, list[str]]]:
    """Return the options in which the runs differ, each with the values of the runs that have
    options, in their order.
    """
    options_of_runs = [options(path) for path in paths.values()]
    known = [values for values in options_of_runs if values]
    rows = []
    for name, values in differing(*known):
        texts = [_text(value) for value in values]
        if name not in _OF_EVERY_RUN and len(set(texts)) > 1:
            rows.append((name, texts))
    return rows


def configured(paths: Mapping[str, Path]) -> Sequence[str]:
    """Return the runs that :func:`differences` compares."""
    return [name for name, path in paths.items() if options(path)]


def _text(value: object) -> str:
    return "–" if value is None else str(value)
