"""What a run shows while it trains: a bar on a terminal, otherwise a line in the log for
each step.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_dcpo.runtime.run_records import seconds_left

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)


class Progress:
    """The progress of a run of ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.bar: Bar | None = None

    @contextmanager
    def shown(self, done: int) -> Iterator[None]:
        """Show a bar, if stderr is a terminal; ``done`` steps are finished."""
        if not sys.stderr.isatty():
            yield
            return
        self.bar = _bar(self.steps, completed=done)
        try:
            yield
        finally:
            self.bar.stop()

    def show(self, step: int, line: str, speed: str, details: str, note: str = "") -> None:
        """Show a step: a ``line`` of its metrics and its ``speed``, and in the log the
        ``details`` between them and a ``note`` at the end.
        """
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, completed=step, line=f"{line}  {speed}")
            return
        logger.info("step %d/%d  %s  %s  %s%s", step, self.steps, line, details, speed, note)

    def log_step(self, step: int, metrics: Mapping[str, Any], left: str) -> None:
        """Show the row of a step of RL, and what is ``left`` of the time."""
        self.show(
            step,
            line=(
                f"acc {metrics['reward/accuracy']:.3f}  {_score(metrics)}"
                f"conf {metrics['confidence/mean']:.3f}  "
                f"ECE {metrics['calibration/ece']:.3f}  AUROC {metrics['calibration/auroc']:.3f}  "
                f"length {metrics['length/mean']:.0f}"
            ),
            speed=f"{metrics['tokens/s/step']:,.0f} tokens/s",
            details=f"loss {metrics['loss/policy']:+.4f}  {metrics['time/step']:.2f} s",
            note=left,
        )

    def log_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show accuracy and ECE of every benchmark that was validated, if any was."""
        line = validation_line(metrics)
        if line:
            logger.info("step %d  held out: %s", step, line)


def time_left(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Return how long the ``steps`` that are left will take, in words; "" if it is not known."""
    seconds = seconds_left(rows, steps)
    return f"  {timedelta(seconds=round(seconds))} left" if seconds else ""


def _score(metrics: Mapping[str, Any]) -> str:
    """Return the mean score of a verifier that gives partial credit, in words; "" without one."""
    score = metrics.get("verifier/score")
    if score is None or abs(score - metrics["reward/accuracy"]) < 1e-9:
        return ""
    return f"score {score:.3f}  "


def validation_line(metrics: Mapping[str, Any]) -> str:
    """Return the accuracy and ECE of every benchmark that was validated, in words."""
    parts = []
    for key in metrics:
        if key.startswith("evaluation/") and key.endswith("/accuracy"):
            name = key.split("/")[1]
            accuracy = _shown(metrics[f"evaluation/{name}/accuracy"])
            ece = _shown(metrics[f"evaluation/{name}/ece"])
            parts.append(f"{name} acc {accuracy}  ECE {ece}")
    return "; ".join(parts)


def _shown(value: float | None) -> str:
    """Return a metric in three decimals; a dash if it is not defined, which a file says by null."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _bar(total: int, completed: int) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(12),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[line]}"),
        console=Console(stderr=True),
    )
    bar.add_task("train", total=total, completed=completed, line="")
    bar.start()
    return bar
