"""What the grid leaves for publication: one small JSON per cell and its training curve, read back by tables and figures."""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.calibration import json_ready, summarize
from megatron_dcpo.errors import UserError
from megatron_dcpo.lab.cells import METHODS

DIGITS = 6  # significant digits kept of every published number


def collect(grid: Path, published: Path, heldout: Path) -> int:
    """Copy every finished cell of a grid to ``published`` as NAME.json and NAME.metrics.jsonl.xz; returns how many.

    Where the cell's samples are there, its record gains ``by_type``, the scores of every type of ``heldout`` problem, and
    ``right``, how many responses to each problem were right.
    """
    published.mkdir(parents=True, exist_ok=True)
    types = [json.loads(line)["type"] for line in heldout.read_text().splitlines()]
    found = sorted(grid.glob("*/*/*/cell.json"))
    for path in found:
        record = json.loads(path.read_text())
        name = f"{record['family']}.{record['method']}.{record['seed']}"
        sampled = path.with_name("samples.jsonl")
        if sampled.is_file():
            samples = [json.loads(line) for line in sampled.read_text().splitlines()]
            record["by_type"] = by_type(samples, types, METHODS[record["method"]].confidence)
            record["right"] = right_by_problem(samples)
        (published / f"{name}.json").write_text(json.dumps(rounded(record)) + "\n")
        metrics = path.with_name("metrics.jsonl")
        if metrics.is_file():
            lines = [json.dumps(rounded(json.loads(line))) + "\n" for line in metrics.read_text().splitlines()]
            (published / f"{name}.metrics.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode(), preset=9))
    return len(found)


def by_type(samples: Sequence[Mapping[str, Any]], types: Sequence[str], kind: str) -> dict[str, Any]:
    """Accuracy, mean confidence, ECE and AUROC among the samples of each type; problems are numbered as in the data."""
    key = {"verbal": "confidence", "token": "token_confidence", "posthoc": "posthoc_confidence"}[kind]
    found: dict[str, list[tuple[float | None, float]]] = {}
    for sample in samples:
        found.setdefault(types[problem_of(sample)], []).append((sample[key], float(sample["correct"])))
    scores = {}
    for name in sorted(found):
        c, y = zip(*found[name], strict=True)
        summary = summarize(c, y)
        scores[name] = {key: summary[key] for key in ("n", "accuracy", "mean_confidence", "ece", "auroc")}
    return json_ready(scores)


def problem_of(sample: Mapping[str, Any]) -> int:
    """The number of a sample's problem in its file."""
    return int(sample["prompt_id"].rsplit("/", 1)[1])


def right_by_problem(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many responses to each problem were right."""
    right: Counter[int] = Counter()
    for sample in samples:
        right[problem_of(sample)] += bool(sample["correct"])
    return [right[problem] for problem in range(max(right) + 1)]


def load_cells(published: Path) -> list[dict[str, Any]]:
    """The published records, each with ``curve``: {metric: [steps]} where it was trained. Raises :class:`UserError`."""
    cells = []
    for path in sorted(published.glob("*.json")):
        record = json.loads(path.read_text())
        metrics = path.with_name(path.stem + ".metrics.jsonl.xz")
        record["curve"] = _curve(metrics) if metrics.is_file() else {}
        cells.append(record)
    if not cells:
        raise UserError(f"{published} holds no finished cell; run: python -m megatron_dcpo.lab run")
    return cells


def _curve(path: Path) -> dict[str, np.ndarray]:
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: np.array([math.nan if row.get(key) is None else row[key] for row in rows], float) for key in keys}


def curves(cells: Sequence[dict[str, Any]], method: str, metric: str, family: str = "qwen3") -> np.ndarray:
    """[seeds, steps] of one metric over training; [0, 0] where there is none."""
    found = [c["curve"][metric] for c in cells if c["method"] == method and c["family"] == family and c["curve"]]
    steps = min((len(curve) for curve in found), default=0)
    return np.array([curve[:steps] for curve in found]) if found else np.zeros((0, 0))


def rounded(value: Any) -> Any:
    """The same structure with floats at ``DIGITS`` significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
