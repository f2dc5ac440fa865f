"""Decide which validation is the best, for ``training.keep_best`` and ``training.early_stop``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_dcpo.config import Config, ValidationConfig
from megatron_dcpo.data.benchmarks import name_of, parse_specs
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.evaluation.headline import METRICS


def benchmark_names(options: ValidationConfig) -> list[str]:
    """Return the names of a run's benchmarks as its metrics spell them."""
    return [name_of(spec) for spec in parse_specs(options.benchmark_list)]


def check_keep_best(config: Config) -> None:
    """Raise :class:`UserError` for a benchmark or a metric that does not exist. Reads no data."""
    names = benchmark_names(config.evaluation)
    word = config.training.keep_best
    if not word:
        return
    benchmark, metric = _parts(word)
    known = [name for name, shown in METRICS.items() if shown.better is not None]
    if metric not in known:
        hint = did_you_mean(metric, known)
        raise UserError(
            f"training.keep_best={word}: no benchmark gives a metric {metric!r} with a "
            f"direction{hint}"
        )
    if benchmark and benchmark not in names:
        raise UserError(
            f"training.keep_best={word}: evaluation.benchmarks has no {benchmark!r}; write "
            f"{names[0]}/{metric}, or {metric} for the mean of {', '.join(names)}"
        )


def value_of(metrics: Mapping[str, float], word: str) -> float:
    """Return the value that ``training.keep_best`` names: ``BENCHMARK/METRIC``, or ``METRIC``, its
    mean over the benchmarks. NaN if there is none.
    """
    benchmark, metric = _parts(word)
    wanted = f"evaluation/{benchmark}/{metric}" if benchmark else f"/{metric}"
    values = [value for key, value in metrics.items() if key.endswith(wanted)]
    if not values:
        return math.nan
    return sum(values) / len(values)


def improves(word: str, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
    """Return whether ``metrics`` are better than ``best``; an undefined value never is."""
    new = value_of(metrics, word)
    if math.isnan(new):
        return False
    old = math.nan if best is None else value_of(best, word)
    if math.isnan(old):
        return True
    better = METRICS[_parts(word)[1]].better
    assert better is not None  # check_keep_best
    return new != old and better(new, old) == new


def _parts(word: str) -> tuple[str, str]:
    """Return benchmark and metric of ``BENCHMARK/METRIC``; the benchmark may be empty."""
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    return benchmark, metric
