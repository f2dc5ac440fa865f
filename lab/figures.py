"""The figures of the lab: each function draws one counterpart of a figure of the paper from published cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lab.grid import MAIN, METHODS
from lab.results import curves, interval, row_title, values_by_row
from lab.tables import SWEEP_ROWS
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure

Cells = Sequence[dict[str, Any]]
SMOOTH = 10  # steps of the moving average of training curves


def colour(method: str) -> str:
    fixed = {"base": "#8C8C8C", "grpo": PALETTE[1], "dcpo": PALETTE[0], "dcpo_proper": PALETTE[2], "rlcr": PALETTE[3]}
    fixed |= {
        "coupled": PALETTE[5],
        "dcpo_i": PALETTE[4],
        "dcpo_g": PALETTE[6],
        "ccgspg": "#5b4636",
        "confclass": "#b3a100",
        "posthoc": "#d62728",
        "adapter": PALETTE[1],  # GRPO's policy
        "rlcr_authors": PALETTE[3],
    }
    return fixed.get(method.split("_token")[0].split("_verbal")[0], "#444444")


def draw_curves(axes: Axes, cells: Cells, methods: Sequence[str], metric: str, label: str, log: bool = False) -> None:
    """Mean over seeds and its range, over steps, smoothed over ``SMOOTH`` steps."""
    for method in methods:
        found = curves(cells, method, metric)
        if not found.size or not np.isfinite(found).any():
            continue
        kernel = np.ones(min(SMOOTH, found.shape[1])) / min(SMOOTH, found.shape[1])
        smooth = np.array([np.convolve(row, kernel, mode="valid") for row in found])
        steps = np.arange(len(kernel), found.shape[1] + 1)
        axes.plot(steps, smooth.mean(0), color=colour(method), label=METHODS[method].title, lw=1.4)
        axes.fill_between(steps, smooth.min(0), smooth.max(0), color=colour(method), alpha=0.15, lw=0)
    axes.set(xlabel="step", ylabel=label)
    if log:
        axes.set_yscale("log")


def confidence_over_steps(cells: Cells, path: Path) -> None:
    methods = ("grpo", "rlcr", "coupled", "dcpo", "dcpo_proper")
    with figure(path, columns=3) as (confidence, accuracy, pce):
        draw_curves(confidence, cells, methods, "confidence/mean", "mean stated confidence")
        draw_curves(accuracy, cells, methods, "reward/accuracy", "training accuracy")
        draw_curves(pce, cells, methods, "calibration/pce", "PCE")
        confidence.legend()


def gradient_norms(cells: Cells, path: Path) -> None:
    methods = ("grpo", "rlcr", "dcpo_i", "dcpo", "dcpo_proper")
    with figure(path, columns=3) as (total, blocks, cosine):
        draw_curves(total, cells, methods, "grad_norm/total", "gradient norm", log=True)
        total.legend()
        for method in ("dcpo", "dcpo_proper"):
            for block, style in (("reasoning", "-"), ("confidence", "--")):
                _probed(blocks, cells, method, f"grad_norm/{block}", style, f"{METHODS[method].title}, {block}")
        for method in methods:
            name = "grad_cosine/reasoning_confidence"
            _probed(cosine, cells, method, name, "-", METHODS[method].title)
        blocks.set(yscale="log", xlabel="step", ylabel="gradient norm by block")
        cosine.set(xlabel="step", ylabel="cosine of the two blocks' gradients")
        blocks.legend()


def _probed(axes: Axes, cells: Cells, method: str, metric: str, style: str, label: str) -> None:
    """A metric that is measured every few steps only."""
    found = curves(cells, method, metric)
    if found.size:
        measured = np.isfinite(found).all(0)
        axes.plot(
            np.nonzero(measured)[0] + 1, found[:, measured].mean(0), style, color=colour(method), label=label, lw=1.2
        )


def lengths(cells: Cells, path: Path) -> None:
    with figure(path) as (axes,):
        draw_curves(axes, cells, ("grpo", "rlcr", "coupled", "dcpo", "dcpo_proper"), "length/mean", "response tokens")
        axes.legend()


def violations(cells: Cells, path: Path) -> None:
    with figure(path) as (axes,):
        methods = ("grpo", "rlcr", "coupled", "dcpo", "dcpo_proper")
        draw_curves(axes, cells, methods, "format/violation_rate", "share without a valid confidence")
        axes.legend()


def reliability(cells: Cells, path: Path) -> None:
    """Accuracy against confidence in 20 bins, all seeds pooled; the area of a point is its share of the responses."""
    methods = ("base", "grpo", "rlcr", "dcpo", "dcpo_proper")
    with figure(path, columns=len(methods), width=2.7, height=2.9) as panels:
        for axes, method in zip(panels, methods, strict=True):
            count, confidence, correct = pooled_bins(cells, method, METHODS[method].confidence)
            filled = count > 0
            axes.plot([0, 1], [0, 1], ":", color="#777777", lw=1)
            x, y = confidence[filled] / count[filled], correct[filled] / count[filled]
            axes.scatter(x, y, s=6 + 300 * count[filled] / count.sum(), color=colour(method), alpha=0.75, lw=0)
            axes.set(xlim=(-0.05, 1.06), ylim=(-0.05, 1.06), xlabel="confidence", title=METHODS[method].title)
        panels[0].set_ylabel("accuracy")


def histogram(cells: Cells, path: Path) -> None:
    methods = ("base", "grpo", "rlcr", "dcpo", "dcpo_proper")
    with figure(path, columns=len(methods), width=2.7, height=2.6) as panels:
        for axes, method in zip(panels, methods, strict=True):
            count, _, _ = pooled_bins(cells, method, "verbal")
            share = count / max(count.sum(), 1)
            axes.bar((np.arange(len(share)) + 0.5) / len(share), share, width=0.9 / len(share), color=colour(method))
            axes.set(yscale="log", ylim=(1e-4, 1), xlim=(0, 1), xlabel="stated confidence", title=METHODS[method].title)
        panels[0].set_ylabel("share of responses")


def pooled_bins(cells: Cells, method: str, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, sum of confidences and number right per bin, [20] each, over all seeds of the main policy."""
    bins = [c["scores"][kind]["bins"] for c in cells if c["method"] == method and c["family"] == "qwen3"]
    keys = ("count", "confidence_sum", "correct_sum")
    empty = np.zeros(20)
    count, confidence, correct = (np.sum([b[key] for b in bins], axis=0) if bins else empty for key in keys)
    return count, confidence, correct


def accuracy_against_ece(cells: Cells, path: Path) -> None:
    """The methods of the paper's tables and ours; not the sweeps."""
    rows = values_by_row(cells, "qwen3")
    shown = [name for name in rows if name.removesuffix("_token").removesuffix("_verbal") in MAIN]
    shapes = {"token": "s", "verbal": "^"}
    with figure(path, columns=2, width=5.6, height=3.8) as panels:
        for axes, metric, label in zip(panels, ("ece", "pce"), ("ECE", "PCE"), strict=True):
            for name in shown:
                x, y = interval(rows[name][metric]), interval(rows[name]["accuracy"])
                shape = shapes.get(name.rsplit("_", 1)[-1], "o")
                axes.errorbar(
                    x.mean,
                    y.mean,
                    xerr=_half(x),
                    yerr=_half(y),
                    fmt=shape,
                    ms=5,
                    lw=1,
                    color=colour(name),
                    label=row_title(name),
                )
            axes.set(xlabel=f"{label} (held out)", ylabel="accuracy (held out)")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def sweep(cells: Cells, path: Path) -> None:
    rows = values_by_row(cells, "qwen3")
    with figure(path, columns=3, width=3.4) as panels:
        for axes, metric in zip(panels, ("accuracy", "ece", "auroc"), strict=True):
            points = {lam: interval(rows[name][metric]) for lam, name in SWEEP_ROWS.items() if name in rows}
            means, halves = [p.mean for p in points.values()], [_half(p) or 0.0 for p in points.values()]
            axes.errorbar(list(points), means, yerr=halves, fmt="o-", color=PALETTE[0], ms=4)
            axes.set(xlabel="lambda", ylabel={"accuracy": "accuracy", "ece": "ECE", "auroc": "AUROC"}[metric])


def _half(value: Any) -> float | None:
    half = value.high - value.mean
    return float(half) if np.isfinite(half) else None


FIGURES: Mapping[str, Callable[[Cells, Path], None]] = {
    "reliability.png": reliability,
    "confidence_over_steps.png": confidence_over_steps,
    "accuracy_against_ece.png": accuracy_against_ece,
    "gradient_norms.png": gradient_norms,
    "confidence_histogram.png": histogram,
    "lengths.png": lengths,
    "violations.png": violations,
    "lambda_sweep.png": sweep,
}
