"""Read and write archives of published records; compute means and intervals over training runs and
problems.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from megatron_dcpo.calibration import json_ready
from megatron_dcpo.runtime.files import write_atomically

DIGITS = 6  # significant digits kept of every published number


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the files of a ``tar.xz`` by name."""
    with tarfile.open(path, "r:xz") as tar:
        members = [(member.name, tar.extractfile(member)) for member in tar]
        return {name: file.read() for name, file in members if file is not None}


def write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a ``tar.xz``; the same files give the same bytes. Whoever reads or writes it meanwhile
    has a whole one.
    """
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:xz", preset=9) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))
    write_atomically(path, whole.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` with floats at ``DIGITS`` significant digits."""
    path.write_text(json.dumps(rounded(json_ready(value)), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Return the same structure with floats at ``DIGITS`` significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Interval:
    """Hold a mean and its 95 % interval (Student's t); the ends are NaN where they are not
    known.
    """

    mean: float
    low: float
    high: float

    def shown(self, digits: int) -> str:
        """Return ``mean ± half``, or the mean alone where the interval is not known."""
        half = "" if math.isnan(self.low) else f" ± {self.high - self.mean:.{digits}f}"
        return f"{self.mean:+.{digits}f}{half}"


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return mean ± t_{0.975, n-1} sd / sqrt(n) of n values."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return Interval(mean, math.nan, math.nan)
    return _students(mean, float(x.var(ddof=1)) / len(x), len(x) - 1)


def _students(mean: float, variance: float, freedom: float) -> Interval:
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def crossed(differences: np.ndarray) -> Interval:
    """Return the mean of [runs, problems] with its 95 % interval for other runs and other problems.

    Both effects are crossed: the variance of the mean is V(run means)/S + V(problem means)/P -
    V(residual)/(S P), since each of the first two holds the residual's share. Student's t with
    Satterthwaite's degrees of freedom.
    """
    x = np.asarray(differences, dtype=np.float64)
    runs, problems = x.shape
    mean = float(x.mean())
    if runs < 2 or problems < 2:
        return Interval(mean, math.nan, math.nan)
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + mean
    of_runs = x.mean(axis=1).var(ddof=1) / runs
    of_problems = x.mean(axis=0).var(ddof=1) / problems
    of_both = (residual**2).sum() / ((runs - 1) * (problems - 1)) / (runs * problems)
    variance = max(of_runs + of_problems - of_both, of_runs, of_problems)
    freedom = (
        variance**2 / (of_runs**2 / (runs - 1) + of_problems**2 / (problems - 1))
        if variance
        else math.inf
    )
    return _students(mean, float(variance), float(freedom))
