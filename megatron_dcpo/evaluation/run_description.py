"""What a report says of its runs besides their results: where they come from, how they differ, what
they were warned of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_dcpo.config import flat
from megatron_dcpo.runtime.run_records import CONFIG, read_launches

SAMPLING = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "max_tokens": "tokens at most",
}
# Options that differ without making another run of it.
_OF_EVERY_RUN = ("run_dir", "seed", "training.resume")
_RECENT = 10  # steps whose median says how long the others take


def sampling_text(settings: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """Return how the responses of an evaluation were drawn, in words; "" where its settings are not
    known.
    """
    if not settings:
        return ""
    repeats = evaluation.get("overall", {}).get("repeats")
    parts = [
        f"{label} {settings[key]}" for key, label in SAMPLING.items() if key in settings
    ]
    parts += [f"template {settings['template']}"]
    parts += [f"thinking {settings['thinking']}"] if "thinking" in settings else []
    return ", ".join([*parts, f"{repeats} responses each"] if repeats else parts)


def origin(name: str, path: Path, steps: int) -> dict[str, Any]:
    """Return a row of the table of runs, from ``run.json`` and ``config.yaml``; empty cells where
    there is neither.
    """
    launches, config = read_launches(path), options(path)
    last = launches[-1] if launches else {}
    commit = str(last.get("commit") or "")[:12] + (
        "+" if last.get("uncommitted_changes") else ""
    )
    return {
        "run": name,
        "model": config.get("model.path", ""),
        "method": config.get("objective.name", ""),
        "data": str(config.get("data.path", "")),
        "seed": config.get("seed", ""),
        "steps": steps or "",
        "started": str(launches[0].get("time", ""))[:16].replace("T", " ")
        if launches
        else "",
        "version": f"{last.get('version', '')} {commit}".strip(),
        "device": last.get("device", ""),
    }


def options(path: Path) -> dict[str, Any]:
    """Return the options of a run by dotted name; none where its ``config.yaml`` is not there, or
    not readable.
    """
    try:
        return dict(flat(OmegaConf.to_container(OmegaConf.load(path / CONFIG))))
    except (OSError, OmegaConfBaseException, YAMLError, ValueError):
        return {}


def total_steps(path: Path) -> int | None:
    """Return ``training.steps`` of a run's ``config.yaml``, where there is one."""
    steps = options(path).get("training.steps")
    return steps if isinstance(steps, int) else None


def seconds_left(rows: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """Return how long the ``steps`` that are left take, by the median of the last ones; None where
    none was timed.
    """
    recent = [row["time/step"] for row in rows if row.get("time/step")][-_RECENT:]
    return steps * float(np.median(recent)) if recent else None


def differences(paths: Mapping[str, Path]) -> list[tuple[str, list[str]]]:
    """Return the options in which the runs differ, with each run's value, in the order of the runs
    that have any.
    """
    found = {name: values for name, path in paths.items() if (values := options(path))}
    names = sorted(
        {option for values in found.values() for option in values} - set(_OF_EVERY_RUN)
    )
    rows = [
        (option, [_text(values.get(option)) for values in found.values()])
        for option in names
    ]
    return [(option, values) for option, values in rows if len(set(values)) > 1]


def configured(paths: Mapping[str, Path]) -> Sequence[str]:
    """Return the runs that :func:`differences` compares."""
    return [name for name, path in paths.items() if options(path)]


def _text(value: object) -> str:
    return "–" if value is None else str(value)
