"""What a training says when it has ended: where the policy is, what has changed, what is next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dcpo.evaluation.card import write_card
from megatron_dcpo.evaluation.runs import how_to_evaluate
from megatron_dcpo.runtime.run_records import ADAPTER
from megatron_dcpo.training.progress import validation_line
from megatron_dcpo.training.records import logged_rows

_STEPS = 10  # that are averaged at the begin and at the end
# of a step's responses in RL, and of a step's tokens in supervised training
_OF_STEPS: Mapping[str, str] = {
    "reward/accuracy": "accuracy of the responses",
    "verifier/score": "their score",
    "calibration/ece": "ECE of their confidences",
    "loss": "loss",
}


def outcome(run_dir: Path) -> list[str]:
    """Return the lines on a run that has ended, from its ``metrics.jsonl``; none without it."""
    rows = logged_rows(run_dir / "metrics.jsonl")
    if not rows:
        return []
    lines = [f"done: {run_dir}, step {rows[-1]['step']}"]
    lines += _changes(rows)
    validated = [validation_line(row) for row in rows]
    held_out = [line for line in validated if line]
    if len(held_out) > 1:
        lines.append(f"held out, first: {held_out[0]}")
    if held_out:
        lines.append(f"held out, last: {held_out[-1]}")
    policy = run_dir / "policy"
    if policy.is_dir():
        lines.append(f"the trained policy: {policy}")
        lines.append(f"evaluate it: {how_to_evaluate(run_dir)}")
    lines.append(f"look at it: dcpo report {run_dir}")
    return lines


def _changes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the metrics of a step differ between the first and the last steps."""
    lines = []
    for name, title in _OF_STEPS.items():
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        values = [value for value in values if value == value]  # NaN is not known
        steps = min(_STEPS, len(values) // 2)
        if not steps:
            continue
        first = fmean(values[:steps])
        last = fmean(values[-steps:])
        span = f"the first and the last {steps} steps" if steps > 1 else "the first and last step"
        lines.append(f"{title}, {span}: {first:.3f}, {last:.3f}")
    return lines


def write_cards(run_dir: Path) -> None:
    """Write a model card for the trained policy, and for its adapter if it has one."""
    for name in ("policy", ADAPTER):
        if (run_dir / name).is_dir():
            write_card(run_dir, run_dir / name)
