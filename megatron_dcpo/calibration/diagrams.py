"""Pictures of calibration: reliability diagrams, confidence histograms, training curves; one run or
several.

Figures are drawn without a display and without global state (no pyplot), so they are safe in a
training process. ``save`` writes PNG and SVG; ``inline_svg`` gives an SVG whose ink is
``currentColor``, for pages with a dark mode.

A run is drawn from ``Bins`` (``metrics.bin_rows``), training curves from the rows of
``metrics.jsonl``.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megatron_dcpo.calibration.metrics import Bins, wilson_interval
from megatron_dcpo.codec import LARGEST
from megatron_dcpo.runtime.text import printable

# Okabe-Ito: told apart with every kind of color vision. The order is the order of runs.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#8C8C8C")
_INK = "#1c1d1f"  # replaced by currentColor in inline SVG
_OVER = "#D55E00"
_UNDER = "#0072B2"
_SHADES = LinearSegmentedColormap.from_list("share", ["#cfe3f1", "#3d8ec2", "#08476f"])
_PLAIN_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#8a8f98",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files, searchable numbers
}


@dataclass(frozen=True)
class Curve:
    """One panel of the training curves: the keys of ``metrics.jsonl`` drawn in it, one line style
    each.
    """

    title: str
    keys: tuple[str, ...]
    percent: bool = False
    log: bool = False


TRAINING_CURVES = (
    Curve(title="Accuracy", keys=("reward/accuracy",), percent=True),
    Curve(title="Mean confidence", keys=("confidence/mean",), percent=True),
    Curve("ECE (solid), PCE (dashed)", ("calibration/ece", "calibration/pce")),
    Curve("AUROC", ("calibration/auroc",)),
    Curve(title="Gradient norm", keys=("grad_norm/total",), log=True),
    Curve("Response length (tokens)", ("length/mean",)),
    Curve(title="Violation rate", keys=("format/violation_rate",), percent=True),
    Curve("Brier score", ("calibration/brier",)),
    Curve("Policy loss", ("loss/policy",)),
    Curve("Entropy, nats a token", ("entropy",)),
    Curve(
        title="KL: reference, engine and trainer (dashed)", keys=("loss/kl", "engine/kl"), log=True
    ),
)


# ------------------------------------------------------------------------------------------ figures


@rc_context(_STYLE)
def reliability_diagram(bins: Bins, title: str = "", note: str = "") -> Figure:
    """Draw accuracy against confidence; bars shaded by their share of the samples, 95 % intervals,
    the diagonal.
    """
    figure = _figure(4.6, 4.4)
    axes = figure.add_subplot()
    draw_reliability(axes=axes, bins=bins, title=title, note=note)
    axes.set_ylabel("Accuracy")
    _share_colorbar(figure, [axes])
    return figure


@rc_context(_STYLE)
def confidence_histogram(bins: Bins, title: str = "") -> Figure:
    """Draw the number of samples per confidence bin, logarithmic, split into correct and wrong."""
    figure = _figure(4.6, 3.2)
    axes = figure.add_subplot()
    draw_histogram(axes, bins, title)
    axes.set_ylabel("Samples")
    axes.legend(loc="upper left", fontsize=8)
    return figure


@rc_context(_STYLE)
def comparison_grid(
    runs: Mapping[str, Bins], notes: Mapping[str, str] | None = None, columns: int = 4
) -> Figure:
    """Draw the reliability diagram over histogram for every run, all on the same axes."""
    columns = max(1, min(columns, len(runs)))
    blocks = math.ceil(len(runs) / columns)
    figure = _figure(2.9 * columns + 0.9, 4.7 * blocks)
    grid = figure.subplots(
        2 * blocks, columns, squeeze=False, height_ratios=[3, 1.25] * blocks, sharex=True
    )
    most = max((int(bins.count.max(initial=0)) for bins in runs.values()), default=1)
    for position, (name, bins) in enumerate(runs.items()):
        row = 2 * (position // columns)
        column = position % columns
        upper = grid[row][column]
        lower = grid[row + 1][column]
        draw_reliability(axes=upper, bins=bins, title=name, note=(notes or {}).get(name, ""))
        draw_histogram(lower, bins, "")
        lower.set_ylim(*_count_range(most))
        upper.set_xlabel("")
        if position == 0:
            lower.legend(loc="upper left", fontsize=8)
        if column == 0:
            upper.set_ylabel("Accuracy")
            lower.set_ylabel("Samples")
        else:
            upper.tick_params(labelleft=False)
            lower.tick_params(labelleft=False)
    for position in range(len(runs), blocks * columns):
        row = 2 * (position // columns)
        column = position % columns
        grid[row][column].set_visible(False)
        grid[row + 1][column].set_visible(False)
    _share_colorbar(figure, list(grid.ravel()))
    return figure


@rc_context(_STYLE)
def run_panel(bins: Bins, title: str = "", note: str = "", most: int | None = None) -> Figure:
    """Draw one run of ``comparison_grid`` alone, for pages that flow. ``most``: the largest bin of
    all runs shown.
    """
    figure = _figure(3.5, 4.6)
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1.15], sharex=True)
    draw_reliability(axes=upper, bins=bins, title=title, note=note)
    draw_histogram(lower, bins, "")
    if most is not None:
        lower.set_ylim(*_count_range(most))
    upper.set(xlabel="", ylabel="Accuracy")
    lower.set_ylabel("Samples")
    return figure


@rc_context(_STYLE)
def curve_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]], curve: Curve) -> Figure:
    """Draw one panel of the training curves alone, without a legend."""
    figure = _figure(4.4, 2.5)
    draw_curve(figure.add_subplot(), runs, curve)
    return figure


@rc_context(_STYLE)
def stopping_figure(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw the accuracy that is kept against the calls that are saved
    (:func:`megatron_dcpo.calibration.turns.stopping_curve`); one line per name.
    """
    figure = _figure(4.4, 3.0)
    axes = figure.add_subplot()
    for position, (name, curve) in enumerate(curves.items()):
        color = PALETTE[position % len(PALETTE)]
        axes.plot(curve["saved"], curve["accuracy"], color=color, marker=".", label=_literal(name))
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="Calls saved", ylabel="Accuracy kept")
    axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.legend(fontsize=8)
    return figure


@rc_context(_STYLE)
def coverage_figure(curves: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """Draw the accuracy of the most confident samples against their share; one line per name."""
    figure = _figure(4.4, 3.0)
    axes = figure.add_subplot()
    for position, (name, curve) in enumerate(curves.items()):
        color = PALETTE[position % len(PALETTE)]
        axes.plot(
            curve["coverage"], curve["accuracy"], color=color, linewidth=1.7, label=_literal(name)
        )
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1.02),
        xlabel="Share answered, most confident first",
        ylabel="Accuracy",
    )
    axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.set_title(_literal(title), loc="left")
    axes.legend(loc="lower left", fontsize=8)
    return figure


def logged_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], curves: Sequence[Curve] = TRAINING_CURVES
) -> list[Curve]:
    """Return the curves for which at least one run has logged a defined value."""
    logged = []
    for curve in curves:
        counts = [len(series(rows, key)[0]) for rows in runs.values() for key in curve.keys]
        if any(counts):
            logged.append(curve)
    return logged


def validation_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Curve]:
    """Return the curves of the held-out problems on which any of the runs was validated."""
    names: dict[str, None] = {}
    for rows in runs.values():
        for row in rows:
            for key in row:
                if key.startswith("evaluation/"):
                    names[key.split("/")[1]] = None
    curves = []
    for name in names:
        prefix = f"evaluation/{name}/"
        curves += [
            Curve(title=f"{name}: accuracy", keys=(prefix + "accuracy",), percent=True),
            Curve(
                title=f"{name}: mean confidence", keys=(prefix + "mean_confidence",), percent=True
            ),
            Curve(
                title=f"{name}: ECE (solid), Brier (dashed)",
                keys=(prefix + "ece", prefix + "brier"),
            ),
            Curve(title=f"{name}: AUROC", keys=(prefix + "auroc",)),
        ]
    return curves


# ------------------------------------------------------------------------------------------- panels


def draw_reliability(axes: Axes, bins: Bins, title: str = "", note: str = "") -> None:
    """Draw bars of accuracy per bin, a tick at the bin's mean confidence, Wilson intervals, the
    diagonal. The intervals take all answers as independent, also those to one problem.
    """
    filled = bins.count > 0
    width = np.diff(bins.edges)[filled]
    center = bins.edges[:-1][filled] + width / 2
    share = bins.count[filled] / max(int(bins.count.sum()), 1)
    accuracy = bins.accuracy[filled]
    confidence = bins.confidence[filled]
    axes.bar(center, accuracy, 0.94 * width, color=_SHADES(np.sqrt(share)))
    low, high = wilson_interval(bins.correct_sum[filled], bins.count[filled])
    errors = np.clip([accuracy - low, high - accuracy], 0.0, None)
    axes.errorbar(
        center, accuracy, errors, fmt="none", ecolor=_INK, elinewidth=0.9, capsize=1.8, alpha=0.75
    )
    over = confidence > accuracy
    for mask, color in ((over, _OVER), (~over, _UNDER)):
        axes.scatter(confidence[mask], confidence[mask], s=11, color=color, zorder=3, linewidths=0)
        axes.vlines(
            confidence[mask],
            accuracy[mask],
            confidence[mask],
            color=color,
            linewidth=1.1,
            alpha=0.55,
        )
    axes.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), linewidth=1.0, color=_INK, alpha=0.65)
    axes.set(xlim=(0, 1), ylim=(0, 1.0), xlabel="Confidence")
    axes.set_aspect("equal")
    axes.set_title(_literal(title), loc="left")
    if note:
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 2}
        axes.text(
            0.035,
            0.965,
            _literal(note),
            transform=axes.transAxes,
            va="top",
            fontsize=8.5,
            linespacing=1.35,
            color="black",
            bbox=paper,
        )
    if not filled.any():
        axes.text(
            0.5,
            0.5,
            "no parsed confidence",
            transform=axes.transAxes,
            ha="center",
            va="center",
            alpha=0.6,
        )


def draw_histogram(axes: Axes, bins: Bins, title: str = "") -> None:
    """Draw counts per bin on a log axis: all samples, and in front of them the correct ones."""
    width = np.diff(bins.edges)
    center = bins.edges[:-1] + width / 2
    axes.bar(center, bins.count, 0.94 * width, color="#b4bac2", label="all")
    axes.bar(center, bins.correct_sum, 0.94 * width, color=PALETTE[2], label="correct")
    axes.set(xlim=(0, 1), ylim=_count_range(int(bins.count.max(initial=1))), xlabel="Confidence")
    # after the limits, because autoscaling would warn about empty histograms
    axes.set_yscale("log", nonpositive="clip")
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(_literal(title), loc="left")


def draw_curve(axes: Axes, runs: Mapping[str, Sequence[Mapping[str, Any]]], curve: Curve) -> None:
    """Draw all runs overlaid; thin raw values under a running mean."""
    for position, (name, rows) in enumerate(runs.items()):
        color = PALETTE[position % len(PALETTE)]
        for key, style in zip(curve.keys, ("-", (0, (4, 2))), strict=False):
            steps, values = series(rows, key)
            axes.plot(steps, values, linestyle=style, color=color, linewidth=0.7, alpha=0.28)
            label = _literal(name) if key == curve.keys[0] else None
            axes.plot(
                steps,
                _running_mean(values),
                linestyle=style,
                marker="o" if len(steps) == 1 else "",  # a line of one point is invisible
                color=color,
                linewidth=1.7,
                label=label,
            )
    axes.set_title(_literal(curve.title), loc="left", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("Step")
    if curve.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        _keep_within_0_and_1(axes)
    if curve.log and _all_positive(axes):
        axes.set_yscale("log")


def _keep_within_0_and_1(axes: Axes) -> None:
    """Cut what matplotlib adds beyond 0 % and 100 %, unless there are such values; a constant gets
    an axis of its own width.
    """
    low, high = axes.dataLim.intervaly
    if not 0 <= low <= high <= 1:
        return
    margin = max(0.05 * (high - low), 0.01)
    # a line on the axis itself is half hidden
    axes.set_ylim(max(low - margin, -0.004), min(high + margin, 1.004))


# ------------------------------------------------------------------------------------------- output


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write ``path`` as PNG (150 dpi) and SVG; the suffix of ``path`` is ignored."""
    base = Path(path).with_suffix("")
    base.parent.mkdir(parents=True, exist_ok=True)
    written = [base.with_suffix(".png"), base.with_suffix(".svg")]
    with rc_context(_STYLE):
        figure.savefig(written[0], dpi=150, facecolor="white")
        figure.set_layout_engine("none")  # it is laid out now
        figure.savefig(written[1], metadata={"Date": None}, facecolor="white")
    return written


def inline_svg(figure: Figure, label: str) -> str:
    """Return the figure as an ``<svg>`` element for HTML: transparent, with ink in
    ``currentColor``, scaling to its container.

    ``label`` becomes the accessible name and keeps the ids of several figures on one page apart.
    """
    buffer = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": label}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    prefix = re.sub(r"\W+", "-", label)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    name = html.escape(label)
    return svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


# -------------------------------------------------------------------------------------- small parts


def _literal(text: str) -> str:
    """Return a name as matplotlib must show it: no mathematics, whatever dollar signs it holds, and
    no control characters.
    """
    return printable(text, lines=True).replace("$", r"\$")


def _figure(width: float, height: float) -> Figure:
    """Return a figure of that size in inches, with its own canvas."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _share_colorbar(figure: Figure, axes: list[Axes]) -> None:
    """Draw the legend of the bars' shades: the share of samples, on a square-root scale."""
    shades = ScalarMappable(PowerNorm(0.5, 0.0, 1.0), _SHADES)
    bar = figure.colorbar(shades, ax=axes, shrink=0.5, aspect=28, pad=0.02, location="right")
    bar.set_label("Share of samples", fontsize=8.5)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_percent))
    bar.outline.set_visible(False)  # type: ignore[operator]


def _count_range(most: int) -> tuple[float, float]:
    """Return the limits of the log axis: one sample is visible, and so is the top of the largest
    bin.
    """
    return 0.7, max(10.0, 1.6 * most)


def _percent(value: float, _position: int = 0) -> str:
    return f"{100 * value:g}%"


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps [n] and values [n] of one logged key, without missing and undefined values."""
    steps = []
    values = []
    for row in rows:
        value = row.get(key)
        if _can_be_drawn(row.get("step")) and _can_be_drawn(value):
            steps.append(row["step"])
            values.append(value)
    return np.array(steps, float), np.array(values, float)


def _can_be_drawn(value: object) -> bool:
    """Return whether a value of JSON is a number that a float holds; NaN is not."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the centered mean over about a twentieth of the run, shorter at the ends so that
    nothing is invented there.
    """
    half = max(0, len(values) // 40)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(np.minimum(index, len(values) - 1 - index), half)
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def _all_positive(axes: Axes) -> bool:
    return all((np.asarray(line.get_ydata()) > 0).all() for line in axes.get_lines())


@contextmanager
def saved_figure(
    path: Path, columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.3
) -> Iterator[list[Axes]]:
    """Open a figure of ``columns`` x ``rows`` axes, saved as ``path`` when the block ends."""
    with rc_context(_PLAIN_STYLE):
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(drawn)
        yield list(np.atleast_1d(drawn.subplots(rows, columns)).ravel())
        drawn.savefig(path, dpi=110, metadata={"Software": None})
