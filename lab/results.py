"""What the grid leaves for publication: one archive with a small JSON per cell and its training curve.

Means and intervals over seeds. A seed is one training run; runs are few, so the intervals are Student's.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from lab.grid import METHODS
from megatron_dcpo.calibration import json_ready, summarize
from megatron_dcpo.data.datasets import read_json_lines
from megatron_dcpo.errors import UserError

DIGITS = 6  # significant digits kept of every published number


def collect(grid: Path, archive: Path, heldout: Path) -> int:
    """Put every finished cell of a grid into ``archive`` as NAME.json and NAME.metrics.jsonl; returns how many.

    Where the cell's samples are there, its record gains ``by_type``, the scores of every type of ``heldout`` problem, and
    ``right``, how many responses to each problem were right. Cells that the archive has already are replaced.
    """
    types = [row["type"] for _, row in read_json_lines(heldout)]
    finished = sorted(grid.glob("*/*/*/cell.json"))
    files = read_archive(archive) if archive.is_file() else {}
    for path in finished:
        record = json.loads(path.read_text())
        name = f"{record['family']}.{record['method']}.{record['seed']}"
        sampled = path.with_name("samples.jsonl")
        if sampled.is_file():
            samples = [row for _, row in read_json_lines(sampled)]
            record["by_type"] = by_type(samples, types, METHODS[record["method"]].confidence)
            record["right"] = right_by_problem(samples)
        files[f"{name}.json"] = json.dumps(rounded(record)).encode() + b"\n"
        metrics = path.with_name("metrics.jsonl")
        if metrics.is_file():
            lines = [json.dumps(rounded(row)) + "\n" for _, row in read_json_lines(metrics)]
            files[f"{name}.metrics.jsonl"] = "".join(lines).encode()
    write_archive(archive, files)
    return len(finished)


def read_archive(path: Path) -> dict[str, bytes]:
    """The files of a ``tar.xz`` by name."""
    with tarfile.open(path, "r:xz") as tar:
        members = [(member.name, tar.extractfile(member)) for member in tar]
        return {name: file.read() for name, file in members if file is not None}


def write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    """The same files give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz", preset=9) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))


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


def load_cells(archive: Path) -> list[dict[str, Any]]:
    """The published records, each with ``curve``: {metric: [steps]} where it was trained. Raises :class:`UserError`."""
    files = read_archive(archive) if archive.is_file() else {}
    records = [name for name in sorted(files) if name.endswith(".json")]
    if not records:
        raise UserError(f"{archive} holds no finished cell; run: python -m lab run")
    curve_of = {name: files.get(name.removesuffix(".json") + ".metrics.jsonl", b"") for name in records}
    return [json.loads(files[name]) | {"curve": _curve(curve_of[name])} for name in records]


def _curve(metrics: bytes) -> dict[str, np.ndarray]:
    rows = [json.loads(line) for line in metrics.decode().splitlines()]
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


SCORES = ("ece", "pce", "brier", "auroc")
COLUMNS = ("accuracy", *SCORES, "violation_rate")


@dataclass(frozen=True)
class Interval:
    """Mean over seeds and its 95 % interval (Student's t); the ends are NaN for a single seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.low) else f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Of n values: mean ± t_{0.975, n-1} sd / sqrt(n)."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return Interval(mean, math.nan, math.nan)
    return _students(mean, float(x.var(ddof=1)) / len(x), len(x) - 1)


def _students(mean: float, variance: float, freedom: float) -> Interval:
    """``variance`` is the mean's."""
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def crossed(differences: np.ndarray) -> Interval:
    """[seeds, problems] -> mean with its 95 % interval for other seeds and other problems.

    Every seed answers the same problems, so both effects are crossed: the variance of the mean is V(seed means)/S +
    V(problem means)/P - V(residual)/(S P), since each of the first two holds the residual's share. Student's t with
    Satterthwaite's degrees of freedom.
    """
    x = np.asarray(differences, dtype=np.float64)
    seeds, problems = x.shape
    mean = float(x.mean())
    if seeds < 2 or problems < 2:
        return Interval(mean, math.nan, math.nan)
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + mean
    of_seeds = x.mean(axis=1).var(ddof=1) / seeds
    of_problems = x.mean(axis=0).var(ddof=1) / problems
    of_both = (residual**2).sum() / ((seeds - 1) * (problems - 1)) / (seeds * problems)
    variance = max(of_seeds + of_problems - of_both, of_seeds, of_problems)
    freedom = variance**2 / (of_seeds**2 / (seeds - 1) + of_problems**2 / (problems - 1)) if variance else math.inf
    return _students(mean, float(variance), float(freedom))


def apart(a: Interval, b: Interval) -> bool:
    """Whether two intervals do not overlap. False where one of them is not known."""
    return a.high < b.low or b.high < a.low


def values_by_row(cells: Sequence[Mapping[str, Any]], family: str) -> dict[str, dict[str, list[float]]]:
    """``{method: {"accuracy": [per seed], "ece": ..., ...}}`` of one family, seeds in order, methods as in ``METHODS``.

    A method is scored on the kind of confidence it is made for (CCGSPG with the token's, ConfClass with its classifier's);
    the other kind of base, GRPO and CCGSPG is ``base_token``, ``grpo_token``, ``ccgspg_verbal``.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for name, method in METHODS.items():
        mine = sorted((c for c in cells if c["family"] == family and c["method"] == name), key=lambda c: c["seed"])
        if not mine:
            continue
        rows[name] = _columns(mine, method.confidence)
        if name in ("base", "grpo"):
            rows[f"{name}_token"] = _columns(mine, "token")
        if name == "ccgspg":
            rows[f"{name}_verbal"] = _columns(mine, "verbal")
    return rows


def _columns(cells: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[float]]:
    return {
        "seed": [c["seed"] for c in cells],
        "accuracy": [c["accuracy"] for c in cells],
        **{key: [_number(c["scores"][kind][key]) for c in cells] for key in SCORES},
        "mean_confidence": [_number(c["scores"][kind]["mean"]) for c in cells],
        "violation_rate": [c["violation_rate"] for c in cells],
        "mean_length": [c["mean_length"] for c in cells],
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def row_title(name: str) -> str:
    """A row's title; of the second kind of confidence, with that kind."""
    for suffix, kind in (("_token", "token"), ("_verbal", "verbal")):
        if name.endswith(suffix) and name.removesuffix(suffix) in METHODS:
            return f"{METHODS[name.removesuffix(suffix)].title}, {kind}"
    method = METHODS[name]
    return method.title if method.confidence == "verbal" else f"{method.title}, {method.confidence}"
