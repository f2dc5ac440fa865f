"""``test_curves.png``: the training of four methods on the test's pretrainings, from ``test_records.tar.xz`` alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from lab.results import read_archive
from lab.testtables import TITLES
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure

# an adapter's accuracy is GRPO's: its policy was trained by the same steps, bit for bit
SHOWN = {
    "adapter_tokens": PALETTE[1],
    "dcpo": PALETTE[0],
    "dcpo_proper_digits": PALETTE[2],
    "rlcr_authors": PALETTE[3],
}
PANELS = {"reward/accuracy": "training accuracy", "calibration/ece": "ECE", "calibration/auroc": "AUROC"}


def draw_curves(archive: Path, path: Path, family: str = "large") -> None:
    """Draw means over a family's pretrainings, every ten steps, on the prompts of training; of the confidence's also the
    range."""
    runs = by_method(read_archive(archive), family)
    with figure(path, columns=len(PANELS), width=4.4) as panels:
        for axes, (column, label) in zip(panels, PANELS.items(), strict=True):
            for method, color in SHOWN.items():
                if method in runs:
                    _draw(axes, runs[method], column, TITLES[method], color)
            axes.set(xlabel="step", ylabel=label)
        if runs:
            panels[-1].legend(loc="lower right", fontsize=6.5)


def by_method(files: Mapping[str, bytes], family: str) -> dict[str, list[list[dict[str, str]]]]:
    """Return ``{method: [one run: [one row of curve.csv]]}`` of the first seed on each pretraining of ``family``."""
    runs: dict[str, list[list[dict[str, str]]]] = {}
    for name, content in sorted(files.items()):
        policy, method, seed, file = name.split("/")
        if file == "curve.csv" and seed == "1" and policy.partition(".")[0] == family:
            runs.setdefault(method, []).append(list(csv.DictReader(io.StringIO(content.decode()))))
    return runs


def _draw(axes: Axes, runs: list[list[dict[str, str]]], column: str, title: str, color: str) -> None:
    points = min(len(run) for run in runs)
    values = np.array([[float(row[column]) for row in run[:points]] for run in runs])
    steps = [int(row["step"]) for row in runs[0][:points]]
    axes.plot(steps, values.mean(0), color=color, label=title, lw=1.4)
    if "calibration" in column:
        axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
