"""One self-contained HTML page that compares runs: table, reliability diagrams, training curves,
sample responses.

A run is a directory with ``evaluation.json`` (and ``samples.jsonl``) and/or ``metrics.jsonl`` (and
``samples/``), or one that contains such directories. The page needs no network: styles and SVG
pictures are inside, it follows the reader's light or dark mode and folds to one column on a phone.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.metrics import Bins
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.evaluation import published, run_description
from megatron_dcpo.evaluation.published import Published
from megatron_dcpo.evaluation.runs import EvaluatedRun
from megatron_dcpo.evaluation.scoring import (
    BETTER,
    CONFIDENCE_KINDS,
    HEADLINE,
    bins_from_json,
    headline,
)
from megatron_dcpo.runtime.run_records import read_warnings
from megatron_dcpo.runtime.text import encodable
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "accuracy": "Accuracy",
    "ece": "ECE",
    "pce": "PCE",
    "brier": "Brier",
    "auroc": "AUROC",
    "skill": "Skill",
    "mean_confidence": "Mean conf.",
    "violation_rate": "Violations",
    "n": "n",
}
_PERCENT = {"accuracy", "mean_confidence", "violation_rate"}
_NOTED = ("accuracy", "ece", "pce", "auroc")
_SAMPLES_SHOWN = 6


# -------------------------------------------------------------------------------------- the numbers


def comparison(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, Any]]:
    """Return ``HEADLINE`` per run: of the evaluation, or of the last logged training step where
    there is none.
    """
    return {run.name: summary_of(run) for run in runs}


def summary_of(
    run: EvaluatedRun, kind: str = "verbal", benchmark: str | None = None
) -> dict[str, Any]:
    if run.evaluation is not None:
        return headline(run.evaluation, kind, benchmark)
    last = run.metrics[-1] if run.metrics else {}
    keys = {
        "accuracy": "reward/accuracy",
        "mean_confidence": "confidence/mean",
        "violation_rate": "format/violation_rate",
        "n": "",
    }
    return {name: last.get(keys.get(name, f"calibration/{name}")) for name in HEADLINE}


def kinds_of(runs: Sequence[EvaluatedRun]) -> list[str]:
    scores = [run.evaluation["overall"] for run in runs if run.evaluation is not None]
    return [
        kind for kind in CONFIDENCE_KINDS if any(kind in overall for overall in scores)
    ]


def benchmarks_of(runs: Sequence[EvaluatedRun]) -> list[str]:
    return list(
        dict.fromkeys(
            name
            for run in runs
            if run.evaluation
            for name in run.evaluation["benchmarks"]
        )
    )


# ----------------------------------------------------------------------------------------- the page


def write_report(
    runs: Sequence[EvaluatedRun],
    path: str | Path,
    title: str = "Accuracy and calibration",
    against: Sequence[Published] = (),
) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(encodable(render_report(runs, title, against)), encoding="utf-8")
    return target


def render_report(
    runs: Sequence[EvaluatedRun],
    title: str = "Accuracy and calibration",
    against: Sequence[Published] = (),
) -> str:
    """Return the page as one string (``report.html.j2``). ``against``: published numbers to set
    beside.
    """
    environment = pages()
    environment.filters["breakable"] = lambda name: re.split(r"(?<=[_/-])", name)
    environment.filters["four_digits"] = lambda value: (
        "–" if value is None else f"{value:.4g}"
    )
    kinds, benchmarks = kinds_of(runs), benchmarks_of(runs)
    trained, paths = (
        {run.name: run.metrics for run in runs if run.metrics},
        {run.name: run.path for run in runs},
    )
    colors = (diagrams.PALETTE[i % len(diagrams.PALETTE)] for i in range(len(trained)))
    return environment.get_template("report.html.j2").render(
        title=title,
        runs=[run.name for run in runs],
        labels=[LABELS[key] for key in HEADLINE],
        tables=_tables(runs),
        first_kind=kinds[0] if kinds else "verbal",
        origins=[
            run_description.origin(run.name, run.path, len(run.metrics)) for run in runs
        ],
        configured=run_description.configured(paths),
        differences=run_description.differences(paths),
        warnings={
            run.name: found for run in runs if (found := read_warnings(run.path))
        },
        published=published.compare(
            {run.name: run.evaluation for run in runs}, against
        ),
        panels=_panels(runs, kinds, benchmarks),
        coverage=_coverage(runs, kinds),
        legend=list(zip(trained, colors, strict=True)),
        curves=[
            _Picture(_svg(diagrams.curve_figure(trained, curve), curve.title))
            for curve in diagrams.logged_curves(
                trained,
                (*diagrams.TRAINING_CURVES, *diagrams.validation_curves(trained)),
            )
        ],
        samples={run.name: _samples(run) for run in runs if run.samples},
        data=_embedded(comparison(runs)),
    )


def pages() -> Environment:
    """Return the templates of this subpackage."""
    loader = PackageLoader("megatron_dcpo.evaluation", "")
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )


class _Picture(NamedTuple):
    svg: Markup
    caption: str = ""


def _svg(figure: Figure, name: str) -> Markup:
    """Return the picture as HTML of our own: what it says of a run is escaped by matplotlib."""
    return Markup(diagrams.inline_svg(figure, name))


def _tables(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """Return the tables of results: runs evaluated alike together, a headline and one per benchmark
    and kind of confidence where there are several; at last those that were only trained.
    """
    tables: list[dict[str, Any]] = []
    for alike in dict.fromkeys(run.alike for run in runs if run.evaluation is not None):
        group = [run for run in runs if run.alike == alike]
        kinds, benchmarks = kinds_of(group), benchmarks_of(group)
        first = kinds[0] if kinds else "verbal"
        title = "; ".join(filter(None, (", ".join(benchmarks), alike[-1])))
        tables.append({"name": title, "open": True, "rows": _cells(group, first, None)})
        for benchmark in [None, *benchmarks] if len(benchmarks) > 1 else [None]:
            for kind in kinds:
                having = [run for run in group if _has(run, kind, benchmark)]
                if having and (benchmark is not None or kind != first):
                    place = benchmark or (
                        "All benchmarks" if len(benchmarks) > 1 else benchmarks[0]
                    )
                    name = f"{place}, {kind} confidence"
                    tables.append(
                        {
                            "name": name,
                            "open": False,
                            "rows": _cells(having, kind, benchmark),
                        }
                    )
    if trained := [run for run in runs if run.evaluation is None]:
        title = "Not evaluated: last training step, as training samples"
        tables.append(
            {"name": title, "open": True, "rows": _cells(trained, "verbal", None)}
        )
    return tables


def _has(run: EvaluatedRun, kind: str, benchmark: str | None) -> bool:
    if run.evaluation is None:
        return False
    scores = (
        run.evaluation["benchmarks"].get(benchmark)
        if benchmark
        else run.evaluation["overall"]
    )
    return scores is not None and kind in scores


def _cells(
    runs: Sequence[EvaluatedRun], kind: str, benchmark: str | None
) -> dict[str, list[dict[str, Any]]]:
    """Return, per run, the text of each headline value with the half width of its 95 % interval,
    and whether it is the best of its column: better than every other one by more than their
    intervals.
    """
    rows = {run.name: summary_of(run, kind, benchmark) for run in runs}
    intervals = {run.name: intervals_of(run, kind, benchmark) for run in runs}
    best = {key: separable_best(key, rows, intervals) for key in HEADLINE}
    return {
        name: [
            {
                "text": format_value(key, row.get(key), intervals[name].get(key)),
                "best": best[key] == name,
            }
            for key in HEADLINE
        ]
        for name, row in rows.items()
    }


Ends = tuple[float, float]  # of a 95 % interval


def intervals_of(
    run: EvaluatedRun, kind: str, benchmark: str | None
) -> dict[str, Ends]:
    """Return the 95 % intervals of an evaluation's headline values, where it has them."""
    if run.evaluation is None:
        return {}
    scores = (
        run.evaluation["benchmarks"][benchmark]
        if benchmark
        else run.evaluation["overall"]
    )
    found = scores.get("ci95") or {}
    both = {**found.get(kind, {}), "accuracy": found.get("accuracy")}
    return {
        key: tuple(ends)
        for key, ends in both.items()
        if ends and all(map(_is_number, ends))
    }


def separable_best(
    key: str,
    rows: Mapping[str, Mapping[str, Any]],
    intervals: Mapping[str, Mapping[str, Ends]],
) -> str | None:
    """Return the run whose value is better than every other one's with intervals that do not
    overlap; None without one.
    """
    if (
        key not in BETTER
        or len(rows) < 2
        or any(key not in of_run for of_run in intervals.values())
    ):
        return None
    best = BETTER[key](rows[name][key] for name in rows)
    (name, *equal) = [name for name in rows if rows[name][key] == best]
    low, high = intervals[name][key]
    others = [intervals[other][key] for other in rows if other != name]
    apart = all(high < other[0] or low > other[1] for other in others)
    return name if apart and not equal else None


def format_value(key: str, value: object, ends: Ends | None = None) -> str:
    """Return a table cell: percentages with one decimal, errors with three, a dash for undefined;
    ``ends`` as ± half their distance.
    """
    if not _is_number(value):
        return "–"
    if key == "n":
        return f"{value:,.0f}"
    half = None if ends is None else (ends[1] - ends[0]) / 2
    if key in _PERCENT:
        return f"{100 * value:.1f}%" + ("" if half is None else f" ± {100 * half:.1f}")
    return f"{value:.3f}" + ("" if half is None else f" ± {half:.3f}")


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of JSON is a finite number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _panels(
    runs: Sequence[EvaluatedRun], kinds: Sequence[str], benchmarks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the reliability diagrams of all runs: per kind of confidence overall, then of the
    first kind per benchmark.
    """
    shown: list[tuple[str, str | None]] = [(kind, None) for kind in kinds]
    if len(benchmarks) > 1:
        shown += [(kinds[0], name) for name in benchmarks]
    return [
        {
            "kind": kind,
            "benchmark": benchmark,
            "pictures": _reliability(runs, kind, benchmark),
        }
        for kind, benchmark in shown
    ]


def _reliability(
    runs: Sequence[EvaluatedRun], kind: str, benchmark: str | None
) -> list[_Picture]:
    """Return the reliability diagram over histogram of every run that has this kind of confidence,
    on shared axes.
    """
    bins: dict[str, Bins] = {}
    notes: dict[str, str] = {}
    for run in runs:
        if run.evaluation is None or not _has(run, kind, benchmark):
            continue
        scores = (
            run.evaluation["benchmarks"][benchmark]
            if benchmark
            else run.evaluation["overall"]
        )
        bins[run.name] = bins_from_json(scores[kind]["bins"])
        values = summary_of(run, kind, benchmark)
        notes[run.name] = ", ".join(
            f"{LABELS[key]} {format_value(key, values[key])}" for key in _NOTED
        )
    most = max((int(b.count.max(initial=1)) for b in bins.values()), default=1)
    return [
        _Picture(
            _svg(
                diagrams.run_panel(rows, _short(name), most=most),
                f"{name} {benchmark or 'overall'} {kind} reliability",
            ),
            notes[name],
        )
        for name, rows in bins.items()
    ]


def _short(name: str, width: int = 30) -> str:
    """Return a name that fits over a panel: its middle is what is left out."""
    return (
        name
        if len(name) <= width
        else f"{name[: width // 2 - 1]}…{name[-(width // 2) :]}"
    )


def _coverage(runs: Sequence[EvaluatedRun], kinds: Sequence[str]) -> list[_Picture]:
    """Return the accuracy of the most confident share of the samples, one picture per kind of
    confidence, all runs overlaid.
    """
    pictures = []
    for kind in kinds:
        scored = {
            run.name: run.evaluation["overall"].get(kind, {})
            for run in runs
            if run.evaluation is not None
        }
        curves = {
            name: scores["curve"]
            for name, scores in scored.items()
            if scores.get("curve", {}).get("coverage")
        }
        if curves:
            aurc = ", ".join(
                f"{name} {format_value('aurc', scored[name].get('aurc'))}"
                for name in curves
            )
            figure = diagrams.coverage_figure(curves, f"{kind} confidence")
            pictures.append(_Picture(_svg(figure, f"coverage {kind}"), f"AURC: {aurc}"))
    return pictures


def _samples(run: EvaluatedRun) -> list[dict[str, str]]:
    """Return what the page shows of a few responses of a run."""
    marker = (run.evaluation or {}).get("marker", CONFIDENCE_TAG)
    shown = []
    for row in choose_samples(run.samples):
        reasoning, confidence = _two_blocks(row, marker)
        stated = (
            f"says {row['confidence']:.2f}"
            if _is_number(row.get("confidence"))
            else row.get("status", "no confidence")
        )
        shown.append(
            {
                "verdict": "correct" if row.get("correct") else "wrong",
                "stated": str(stated),
                "key": str(row.get("category") or f"key {row.get('ground_truth', '')}"),
                "problem": str(row.get("problem") or ""),
                "reasoning": reasoning,
                "confidence": confidence,
            }
        )
    return shown


def choose_samples(
    samples: Sequence[Mapping[str, Any]], count: int = _SAMPLES_SHOWN
) -> list[Mapping[str, Any]]:
    """Return over-confident mistakes, doubted and sure correct answers, malformed ones, in turns;
    no problem twice.
    """
    stated = [row for row in samples if _is_number(row.get("confidence"))]
    by_confidence = sorted(stated, key=lambda row: -row["confidence"])
    wrong = [row for row in by_confidence if not row.get("correct")]
    right = [row for row in by_confidence if row.get("correct")]
    malformed = [row for row in samples if row.get("confidence") is None]
    queues = [deque(rows) for rows in (wrong, reversed(right), right, malformed)]
    chosen: list[Mapping[str, Any]] = []
    problems = set()
    while any(queues) and len(chosen) < count:
        for queue in queues:
            while queue:
                row = queue.popleft()
                problem = row.get("prompt_id", id(row))
                if problem not in problems and len(chosen) < count:
                    problems.add(problem)
                    chosen.append(row)
                    break
    return chosen


def _two_blocks(row: Mapping[str, Any], marker: str) -> tuple[str, str]:
    """Return the reasoning and the confidence block of a response: as the trainer split it, or for
    an evaluation split at the last marker.
    """
    blocks = {"reasoning": "", "confidence": ""}
    for text, block, _ in row.get("pieces") or ():
        blocks["confidence" if block == "confidence" else "reasoning"] += str(text)
    if any(blocks.values()):
        return blocks["reasoning"], blocks["confidence"]
    text = str(row.get("text") or "")
    at = text.rfind(marker)
    return (text[:at], text[at:]) if at >= 0 else (text, "")


def _embedded(value: object) -> Markup:
    """Return JSON for a script element: it must not be able to close the element."""
    return Markup(
        json.dumps(json_ready(value), allow_nan=False).replace("<", "\\u003c")
    )
