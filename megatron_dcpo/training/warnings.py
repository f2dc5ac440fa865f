"""Watchers over the metrics: signs that a run is hopeless, reported once, with what to try
(docs/metrics.md#warnings).

A watcher maps the records of the steps so far, oldest first, to a sentence, or to None. Thresholds
are those at which a run has hardly ever recovered by itself; a healthy run comes near none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dcpo.objectives import find_method, resolve
from megatron_dcpo.objectives.options import ObjectiveConfig, normalization_of_the_confidence
from megatron_dcpo.runtime.run_records import WARNINGS, read_warnings

Rows = Sequence[Mapping[str, Any]]
STEPS = 5  # in a row, unless a watcher says otherwise


def all_malformed(rows: Rows) -> str | None:
    if not _last(rows, "format/violation_rate", lambda rate: rate >= 1):
        return None
    if rows[0].get("format/violation_rate", 1.0) < 0.5:
        return (
            "no response states a valid confidence any more: the updates destroyed the policy; "
            "lower optimizer.lr"
        )
    return (
        "no response states a valid confidence: look at samples/ for what the policy writes; the "
        "prompt must ask for the line (data.template=paper), or the policy needs a supervised warm "
        "start"
    )


def no_gradient(rows: Rows) -> str | None:
    if not _last(rows, "grad_norm/total", lambda norm: norm <= 1e-12):
        return None
    return (
        "the gradient is 0: every group agrees in its rewards; take problems that are solved "
        "sometimes, a larger rollout.group_size, or rollout.filter_groups=true"
    )


def accuracy_zero(rows: Rows) -> str | None:
    if not _last(rows, "reward/accuracy", lambda accuracy: accuracy <= 0, 2 * STEPS):
        return None
    return (
        "no response is right: take easier problems, raise rollout.max_response_length, and check "
        "in samples/ that right answers are judged right (dcpo judge)"
    )


def accuracy_one(rows: Rows) -> str | None:
    if not _last(rows, "reward/accuracy", lambda accuracy: accuracy >= 1, 2 * STEPS):
        return None
    return "every response is right: the problems teach nothing, take harder ones"


def exploding(rows: Rows) -> str | None:
    """Three norms in a row, each a hundred times the median of those before."""
    norms = _values(rows, "grad_norm/total")
    before = norms[:-3]
    last = norms[-3:]
    if len(before) < 2 * STEPS or not 0 < 100 * median(before) < min(last):
        return None
    return (
        "the gradient norm is a hundred times what it was: lower optimizer.lr, and resume from an "
        "earlier checkpoint"
    )


def mismatch_growing(rows: Rows) -> str | None:
    """KL(engine || trainer) of the last ten steps above 0.01 nats a token and five times that of
    the first ten.
    """
    values = _values(rows, "engine/kl")
    if len(values) < 4 * STEPS:
        return None
    first = _mean(values[: 2 * STEPS])
    last = _mean(values[-2 * STEPS :])
    if last < max(0.01, 5 * abs(first)):
        return None
    return (
        "engine and trainer drift apart: see mismatch.jsonl; correct for it "
        "(objective.tis_level=token), and compute both in the same precision"
    )


def at_the_limit(rows: Rows) -> str | None:
    if not _last(rows, "length/truncated", lambda share: share >= 0.5):
        return None
    return (
        "half of the responses are cut off at rollout.max_response_length: raise it, or find out "
        "why the policy does not end its responses (is eos_token_id of the model that of its chat "
        "template?)"
    )


def entropy_collapsed(rows: Rows) -> str | None:
    """Ten steps below a hundredth of a nat, or below a fiftieth of the mean of the first ten."""
    values = _values(rows, "entropy")
    if len(values) < 4 * STEPS:
        return None
    first = _mean(values[: 2 * STEPS])
    if max(values[-2 * STEPS :]) > max(0.01, first / 50):
        return None
    return (
        "the policy has almost no entropy left: lower optimizer.lr, or add "
        "objective.entropy_coef=0.001"
    )


def confidence_constant(rows: Rows) -> str | None:
    if not _last(rows, "confidence/std", lambda deviation: deviation < 0.02, 2 * STEPS):
        return None
    return (
        "every response states the same confidence, which then says nothing about a single answer: "
        "lower optimizer.lr, or keep other values in reach with "
        "objective.entropy_coef_confidence=0.02"
    )


def confidence_is_a_bit(rows: Rows) -> str | None:
    if not _last(rows, "confidence/extremes", lambda share: share > 0.9, 2 * STEPS):
        return None
    return (
        "nine in ten confidences are exactly 0 or 1: a guess at right or wrong, not a probability; "
        "preset=paper drives them there, objective.preset=dcpo_proper does not "
        "(docs/algorithms.md#4-advantages)"
    )


def one_answer(rows: Rows) -> str | None:
    """Of the whole step, or of one source of a mixture."""
    names = [name for name in rows[-1] if name.startswith("answer/most_frequent")]
    for name in sorted(names):
        if not _last(rows, name, lambda share: share > 0.5, 2 * STEPS):
            continue
        source = name.removeprefix("answer/most_frequent").removeprefix("/")
        where = f" of {source}" if source else ""
        return (
            f"more than half of the responses{where} give the same answer: the policy may be "
            "guessing; compare with the prompt-blind accuracy that dcpo evaluate prints, and look "
            "at samples/"
        )
    return None


WATCHERS: tuple[Callable[[Rows], str | None], ...] = (
    all_malformed,
    no_gradient,
    accuracy_zero,
    accuracy_one,
    exploding,
    mismatch_growing,
    at_the_limit,
    entropy_collapsed,
    confidence_constant,
    confidence_is_a_bit,
    one_answer,
)


def new_warnings(directory: Path, rows: Rows) -> list[str]:
    """Return the warnings that are new after the last of ``rows``, and add them to
    ``warnings.jsonl``. A watcher warns once in a run, across resumes too.
    """
    have_warned = {warning["watcher"] for warning in read_warnings(directory)}
    new: dict[str, str] = {}
    for watcher in WATCHERS:
        name = watcher.__name__
        text = watcher(rows) if name not in have_warned else None
        if text:
            new[name] = text
    _write(directory, rows[-1]["step"], new)
    return list(new.values())


def warnings_of_the_start(directory: Path, config: ObjectiveConfig) -> list[str]:
    """Return the warnings that need no step, and add those to ``warnings.jsonl`` that it lacks."""
    method = find_method(config.name)
    warnings: dict[str, str] = {}
    drift = drift_of_the_confidence(resolve(config), method.reads)
    if drift:
        warnings[drift_of_the_confidence.__name__] = drift
    have_warned = {warning["watcher"] for warning in read_warnings(directory)}
    new = {name: text for name, text in warnings.items() if name not in have_warned}
    _write(directory, 0, new)
    return list(warnings.values())


def _write(directory: Path, step: int, warnings: Mapping[str, str]) -> None:
    if not warnings:
        return
    with (directory / WARNINGS).open("a") as file:
        for name, text in warnings.items():
            row = {"step": step, "watcher": name, "text": text}
            file.write(json.dumps(row) + "\n")


def too_few(count: int, what: str, option: str, per_step: int) -> str | None:
    """Return a warning when a step, whose size is ``per_step`` by an ``option``, repeats some of
    ``what`` there is.
    """
    if count >= per_step:
        return None
    return (
        f"{count} {what} are fewer than {option}={per_step}: {what} come twice in a step; lower "
        f"it, or add {what}"
    )


def drift_of_the_confidence(options: ObjectiveConfig, reads: Set[str]) -> str | None:
    """Return a warning when a method divides the advantages that a stated confidence gets by the
    group's own standard deviation (docs/algorithms.md#4-advantages).
    """
    normalization = normalization_of_the_confidence(options, reads)
    if normalization is None or normalization[1] != "std":
        return None
    name, _ = normalization
    others = "mean does not"
    if name == "advantage_normalization_confidence":
        others = "objective.preset=dcpo_proper does not"
    return (
        f"objective.{name}=std (preset {options.preset}) divides by the standard deviation of the "
        "group: where the stated confidence does not tell problems apart, this drives it to 0 when "
        f"more groups are all wrong than all right, and to 1 otherwise; {others}"
    )


def _values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric, oldest first."""
    values = []
    for row in rows:
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            values.append(float(value))
    return values


def _last(rows: Rows, name: str, holds: Callable[[float], bool], steps: int = STEPS) -> bool:
    """Return whether a metric was defined, and ``holds`` was true of it, in each of the last
    ``steps``.
    """
    if len(rows) < steps:
        return False
    values = _values(rows[-steps:], name)
    return len(values) == steps and all(map(holds, values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
