"""Compare validations by the metric of ``training.keep_best``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_dcpo.evaluation.headline import METRICS


def value_of(metrics: Mapping[str, float], word: str) -> float:
    """Return the value that ``training.keep_best`` names: ``BENCHMARK/METRIC``, or ``METRIC``, its
    mean over the benchmarks. NaN if there is none.
    """
    benchmark, metric = parts(word)
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
    better = METRICS[parts(word)[1]].better
    assert better is not None  # check_keep_best
    return new != old and better(new, old) == new


def parts(word: str) -> tuple[str, str]:
    """Return benchmark and metric of ``BENCHMARK/METRIC``; the benchmark may be empty."""
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    return benchmark, metric
