"""Pictures: they are drawn for every odd input, state what they should, and leave the global style
alone.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.metrics import Bins, bin_rows


def some_bins(seed: int = 0) -> Bins:
    generator = np.random.default_rng(seed)
    c = generator.random(300)
    return bin_rows(c, generator.random(300) < c)


@pytest.mark.parametrize(
    "bins",
    [
        some_bins(),
        bin_rows([], []),
        bin_rows([1.0], [1]),
        bin_rows([0.0, 0.0], [0, 1]),
        bin_rows([None], [1]),
    ],
)
def test_every_figure_draws_any_bins(bins: Bins, tmp_path: Path) -> None:
    for name, figure in {
        "reliability": diagrams.reliability_diagram(bins, "a", "note"),
        "histogram": diagrams.confidence_histogram(bins, "a"),
        "panel": diagrams.run_panel(bins, "a", most=10),
        "grid": diagrams.comparison_grid({"a": bins, "b": some_bins(1)}, {"a": "note"}),
    }.items():
        png, svg = diagrams.save(figure, tmp_path / name)
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 2000
        ElementTree.parse(svg)


def test_bar_heights_are_accuracies() -> None:
    bins = bin_rows([0.52, 0.53, 0.98, 0.99], [1, 0, 1, 1])
    axes = diagrams.reliability_diagram(bins).axes[0]
    heights = {round(p.get_x() + p.get_width() / 2, 3): p.get_height() for p in axes.patches}
    assert heights == {0.525: 0.5, 0.975: 1.0}


def test_grid_shares_its_axes() -> None:
    figure = diagrams.comparison_grid(
        {name: some_bins(i) for i, name in enumerate("abcde")}, columns=4
    )
    histograms = [axes for axes in figure.axes if axes.get_yscale() == "log" and axes.get_visible()]
    assert len(histograms) == 5
    assert len({axes.get_ylim() for axes in histograms}) == 1


def test_curves_are_those_that_were_logged() -> None:
    rows = [
        {"step": s, "reward/accuracy": s / 10, "calibration/ece": None if s < 3 else 0.2}
        for s in range(10)
    ]
    other = [{"step": s, "reward/accuracy": 0.5, "grad_norm/total": float("nan")} for s in range(5)]
    curves = diagrams.logged_curves({"a": rows, "b": other})
    assert [curve.title for curve in curves] == ["Accuracy", "ECE (solid), PCE (dashed)"]
    assert diagrams.logged_curves({"a": [{"step": 1}]}) == []


def test_running_mean_keeps_lines_and_ends() -> None:
    line = np.arange(100.0)
    assert np.allclose(diagrams._running_mean(line), line)
    assert diagrams._running_mean(np.array([])).shape == (0,)


def test_inline_svg_takes_the_ink_of_the_page() -> None:
    svg = diagrams.inline_svg(diagrams.reliability_diagram(some_bins(), 'a "b" <c>'), 'run "x" <y>')
    assert svg.startswith('<svg role="img" aria-label="run &quot;x&quot; &lt;y&gt;"')
    assert "currentColor" in svg
    assert "#1c1d1f" not in svg
    assert "<metadata>" not in svg
    ElementTree.fromstring(svg)


def test_global_style_is_untouched() -> None:
    before = dict(matplotlib.rcParams)
    diagrams.inline_svg(diagrams.confidence_histogram(some_bins()), "x")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["$x^2$", r"a$\frac{$b", "$$", r"\$5 $", "$\x1b[31m\x00$", "$\\"])
def test_names_are_no_mathematics(name: str, tmp_path: Path) -> None:
    """matplotlib would typeset what stands between two dollar signs, or raise where it cannot."""
    shown = name.replace("\x1b", "\\x1b").replace("\x00", "\\x00")
    rows = [{"step": 1, "reward/accuracy": 0.5}, {"step": 2, "reward/accuracy": 0.6}]
    curve = diagrams.curve_figure({name: rows}, diagrams.logged_curves({name: rows})[0])
    curve.legend()
    for figure in (
        diagrams.reliability_diagram(some_bins(), name, name),
        diagrams.confidence_histogram(some_bins(), name),
        diagrams.comparison_grid({name: some_bins(), "b": some_bins(1)}, {name: name}),
        diagrams.coverage_figure({name: {"coverage": [0.5, 1.0], "accuracy": [1.0, 0.5]}}, name),
        curve,
    ):
        _, svg = diagrams.save(figure, tmp_path / "figure")
        texts = [
            "".join(node.itertext())
            for node in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert shown in texts
        diagrams.inline_svg(figure, name)
