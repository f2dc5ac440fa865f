"""Watchers over the metrics: what makes a run hopeless, said once, with what to try
(docs/metrics.md#warnings).

A watcher maps the records of the steps so far, oldest first, to a sentence, or to None. Thresholds
are those at which a run has hardly ever recovered by itself; a healthy run comes near none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dcpo.runtime.run_records import WARNINGS, read_warnings

Rows = Sequence[Mapping[str, Any]]
STEPS = 5  # in a row, unless a watcher says otherwise


def all_malformed(rows: Rows) -> str | None:
    if not _last(rows, "format/violation_rate", lambda rate: rate >= 1):
        return None
    if rows[0].get("format/violation_rate", 1.0) < 0.5:
        return "no response states a valid confidence any more: the updates destroyed the policy, lower optimizer.lr"
    return (
        "no response states a valid confidence: look at samples/ for what the policy writes; the "
        "prompt must ask for the "
        "line (data.template=paper), or the policy needs a supervised warm start"
    )


def no_gradient(rows: Rows) -> str | None:
    if not _last(rows, "grad_norm/total", lambda norm: norm <= 1e-12):
        return None
    return (
        "the gradient is 0: every group agrees in its rewards; take problems that are solved "
        "sometimes, a larger "
        "rollout.group_size, or rollout.filter_groups=true"
    )


def accuracy_zero(rows: Rows) -> str | None:
    if not _last(rows, "reward/accuracy", lambda accuracy: accuracy <= 0, 2 * STEPS):
        return None
    return (
        "no response is right: take easier problems, raise rollout.max_response_length, and check "
        "in samples/ that right "
        "answers are taken for right (dcpo judge)"
    )


def accuracy_one(rows: Rows) -> str | None:
    if not _last(rows, "reward/accuracy", lambda accuracy: accuracy >= 1, 2 * STEPS):
        return None
    return "every response is right: the problems teach nothing, take harder ones"


def exploding(rows: Rows) -> str | None:
    """Three norms in a row, each a hundred times the median of those before."""
    norms = _values(rows, "grad_norm/total")
    before, last = norms[:-3], norms[-3:]
    if len(before) < 2 * STEPS or not 0 < 100 * median(before) < min(last):
        return None
    return "the gradient norm is a hundred times what it was: lower optimizer.lr, and resume from an earlier checkpoint"


def mismatch_growing(rows: Rows) -> str | None:
    """KL(engine || trainer) of the last ten steps above 0.01 nats a token and five times that of
    the first ten.
    """
    values = _values(rows, "engine/kl")
    first, last = values[: 2 * STEPS], values[-2 * STEPS :]
    if len(values) < 4 * STEPS or _mean(last) < max(0.01, 5 * abs(_mean(first))):
        return None
    return (
        "engine and trainer drift apart: see mismatch.jsonl; correct for it "
        "(objective.tis_level=token), and compute both "
        "in the same precision"
    )


def at_the_limit(rows: Rows) -> str | None:
    if not _last(rows, "length/truncated", lambda share: share >= 0.5):
        return None
    return (
        "half of the responses are cut off at rollout.max_response_length: raise it, or the "
        "policy does not end its "
        "responses (is eos_token_id of the model its chat template's?)"
    )


def entropy_collapsed(rows: Rows) -> str | None:
    """Ten steps below a hundredth of a nat, or of a fiftieth of the first ten's."""
    values = _values(rows, "entropy")
    if len(values) < 4 * STEPS or max(values[-2 * STEPS :]) > max(
        0.01, _mean(values[: 2 * STEPS]) / 50
    ):
        return None
    return "the policy has almost no entropy left: lower optimizer.lr, or add objective.entropy_coef=0.001"


def confidence_constant(rows: Rows) -> str | None:
    if not _last(rows, "confidence/std", lambda deviation: deviation < 0.005, 2 * STEPS):
        return None
    return (
        "every response states the same confidence, which then says nothing of a single answer: "
        "lower optimizer.lr, or "
        "keep other values in reach with objective.entropy_coef_confidence=0.02"
    )


WATCHERS: tuple[Callable[[Rows], str | None], ...] = (
    *(all_malformed, no_gradient, accuracy_zero, accuracy_one, exploding),
    *(mismatch_growing, at_the_limit, entropy_collapsed, confidence_constant),
)


def new_warnings(directory: Path, rows: Rows) -> list[str]:
    """Return what has to be said after the last of ``rows``, and write it to ``warnings.jsonl``. A
    watcher warns once in a run, across resumes too.
    """
    said = {warning["watcher"] for warning in read_warnings(directory)}
    new = {w.__name__: text for w in WATCHERS if w.__name__ not in said and (text := w(rows))}
    if new:
        with (directory / WARNINGS).open("a") as file:
            for name, text in new.items():
                file.write(
                    json.dumps({"step": rows[-1]["step"], "watcher": name, "text": text}) + "\n"
                )
    return list(new.values())


def too_few_problems(problems: int, per_step: int) -> str | None:
    """Return what to say where a step repeats problems."""
    if problems >= per_step:
        return None
    return (
        f"{problems} problems are fewer than data.prompts_per_step={per_step}: problems come "
        "twice in a step; lower "
        "it, or add problems"
    )


def _values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric, oldest first."""
    found = (row.get(name) for row in rows)
    return [
        float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)
    ]


def _last(rows: Rows, name: str, holds: Callable[[float], bool], steps: int = STEPS) -> bool:
    """Return whether a metric has been defined and as ``holds`` says in each of the last
    ``steps``.
    """
    values = [row.get(name) for row in rows[-steps:]]
    defined = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    return len(values) == steps and defined and all(map(holds, values))  # type: ignore[arg-type]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
