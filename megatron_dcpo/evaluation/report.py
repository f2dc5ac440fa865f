"""One self-contained HTML page that compares runs: tables, reliability diagrams, training curves
and sample responses.

A run is a directory with ``evaluation.json`` (and ``samples.jsonl``) and/or ``metrics.jsonl`` (and
``samples/``), or one that contains such directories. The page needs no network: its styles and SVG
pictures are embedded. It follows the reader's light or dark mode and folds to one column on a
phone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.metrics import Bins
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.evaluation import run_description
from megatron_dcpo.evaluation.alike import AlikeRuns, benchmarks_of, evaluated_alike
from megatron_dcpo.evaluation.headline import (
    HEADLINE,
    METRICS,
    Ends,
    format_value,
    is_number,
    mixed_problems,
)
from megatron_dcpo.evaluation.runs import EvaluatedRun, find_runs
from megatron_dcpo.evaluation.scoring import (
    BASELINES,
    CONFIDENCE_KINDS,
    bins_from_json,
    headline,
)
from megatron_dcpo.evaluation.shown_rollouts import LOOKED_FOR, ShownRollouts, rollouts_of
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.run_records import read_warnings
from megatron_dcpo.runtime.text import encodable
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTED = ("accuracy", "ece", "pce", "auroc", "auroc_within", "auroc_within_problem")
_TURN_NOTED = ("n", "accuracy", "ece", "brier", "auroc")
_MOST_KINDS_SHOWN = 20
_PROMPT_BLIND = "(prompt-blind)"  # a row that is no run

# What a file of another form raises on the way through a report.
OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


# -------------------------------------------------------------------------------------- the numbers


def comparison(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, Any]]:
    """Return the ``HEADLINE`` values of each run's evaluation, or of its last logged training step
    if it has no evaluation. An evaluation with a calibrator has a second row, for the recalibrated
    confidence, and every evaluation a last one, for the fitted lookup of its kinds of problem.
    """
    return {row.name: summary_of(row.run, row.kind) for row in _rows_of(runs, "verbal")}


class _Row(NamedTuple):
    """A row of a table of results: a run, scored by one kind of confidence."""

    name: str
    run: EvaluatedRun
    kind: str


def _rows_of(runs: Sequence[EvaluatedRun], kind: str) -> list[_Row]:
    """Return the rows of the runs' headline table: each run by ``kind``, again by its recalibrated
    confidence if it has one, and by its baselines. A run that has no ``kind`` but a recalibrated
    confidence has no row for ``kind``.
    """
    rows = []
    for run in runs:
        recalibrated = kind != "posthoc" and _has(run, "posthoc", None)
        if recalibrated and not _has(run, kind, None):
            rows.append(_Row(run.name, run, "posthoc"))
        else:
            rows.append(_Row(run.name, run, kind))
            if recalibrated:
                rows.append(_Row(f"{run.name}, recalibrated", run, "posthoc"))
        rows += _baseline_rows(run, None)
    return rows


def _with_baselines(runs: Sequence[EvaluatedRun], kind: str, benchmark: str | None) -> list[_Row]:
    """Return a row of each run by ``kind``, each followed by the rows of its baselines."""
    rows = []
    for run in runs:
        rows += [_Row(run.name, run, kind), *_baseline_rows(run, benchmark)]
    return rows


def _baseline_rows(run: EvaluatedRun, benchmark: str | None) -> list[_Row]:
    """Return the rows of the baselines that a run was scored with; none of a fitted lookup in an
    evaluation of an earlier release, which left out each problem alone.
    """
    scores = _scores(run, benchmark) or {}
    return [
        _Row(f"{run.name}, {kind}", run, kind)
        for kind in BASELINES
        if "skill" in scores.get(kind, {})
    ]


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
    """Return the kinds of confidence that at least one run has been scored with."""
    scored: set[str] = set()
    for run in runs:
        if run.evaluation is not None:
            scored.update(run.evaluation["overall"])
    return [kind for kind in CONFIDENCE_KINDS if kind in scored]


# ----------------------------------------------------------------------------------------- the page


def write_report(
    runs: Sequence[EvaluatedRun],
    path: str | Path,
    title: str = "Accuracy and calibration",
) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = encodable(render_report(runs, title))
    write_atomically(target, page)
    return target


def write_report_of_run(directory: Path) -> None:
    """Write ``report.html`` of one training into its directory."""
    runs = find_runs([str(directory)])
    write_report(runs, directory / "report.html", directory.absolute().name)


@dataclass(frozen=True)
class Followed:
    """A run that trains while its page is looked at: the page says its ``state`` and asks every few
    ``seconds`` for another one than that of ``tag``.
    """

    state: str
    tag: str
    seconds: int


def render_report(
    runs: Sequence[EvaluatedRun],
    title: str = "Accuracy and calibration",
    followed: Followed | None = None,
) -> str:
    """Return the page as one string (``report.html.j2``)."""
    environment = pages()
    environment.filters["breakable"] = lambda name: re.split(r"(?<=[_/-])", name)
    kinds = kinds_of(runs)
    benchmarks = benchmarks_of(runs)
    trained = {run.name: run.metrics for run in runs if run.metrics}
    paths = {run.name: run.path for run in runs}
    legend = []
    for index, name in enumerate(trained):
        legend.append((name, diagrams.PALETTE[index % len(diagrams.PALETTE)]))
    origins = []
    warnings = {}
    for run in runs:
        steps = len(run.metrics)
        model = str((run.evaluation or {}).get("model") or "")
        origins.append(run_description.origin(run.name, run.path, steps, model))
        messages = read_warnings(run.path)
        if messages:
            warnings[run.name] = messages
    return environment.get_template("report.html.j2").render(
        title=title,
        runs=[run.name for run in runs],
        tables=_tables(runs),
        first_kind=kinds[0] if kinds else "verbal",
        origins=origins,
        configured=run_description.configured(paths),
        differences=run_description.differences(paths),
        warnings=warnings,
        panels=_panels(runs, kinds, benchmarks),
        coverage=_coverage(runs, kinds),
        stopping=_stopping(runs),
        legend=legend,
        curves=_curves(trained),
        rollouts={run.name: _rollouts(run) for run in runs if run.samples},
        looked_for=LOOKED_FOR,
        state=followed.state if followed else "",
        followed=followed.tag if followed else "",
        seconds=followed.seconds if followed else 0,
        data=_embedded(comparison(runs)),
    )


def pages() -> Environment:
    """Return the templates of this subpackage."""
    loader = PackageLoader("megatron_dcpo.evaluation", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)


class _Picture(NamedTuple):
    svg: Markup
    caption: str = ""


def _svg(figure: Figure, name: str) -> Markup:
    """Return the picture as trusted HTML: matplotlib escapes every text of a run in it."""
    return Markup(diagrams.inline_svg(figure, name))


def _curves(trained: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[_Picture]:
    """Return the training and validation curves, with all runs in each picture."""
    known = (*diagrams.TRAINING_CURVES, *diagrams.validation_curves(trained))
    pictures = []
    for curve in diagrams.logged_curves(trained, known):
        figure = diagrams.curve_figure(trained, curve)
        pictures.append(_Picture(_svg(figure, curve.title)))
    return pictures


def _tables(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """Return the tables of results. Runs that were evaluated alike share a headline table, and one
    table per benchmark and kind of confidence if there are several. The runs that were only trained
    come last.
    """
    tables: list[dict[str, Any]] = []
    for group in evaluated_alike(runs):
        tables += _tables_of_group(group)
    trained = [run for run in runs if run.evaluation is None]
    if trained:
        title = (
            "Not evaluated: last training step, as training samples (on a benchmark: dcpo evaluate "
            "--model RUN/policy --as-trained RUN/config.yaml)"
        )
        rows = _cells(_rows_of(trained, "verbal"), None)
        tables.append(_table(title, rows, is_open=True))
    return tables


def _table(
    name: str,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    is_open: bool = False,
    labels: Sequence[str] = (),
    note: str = "",
) -> dict[str, Any]:
    """Return a table for the page, by default with the headline's columns; the note is below it."""
    columns = labels or [METRICS[key].label for key in HEADLINE]
    return {"name": name, "open": is_open, "rows": rows, "labels": columns, "note": note}


def _tables_of_group(alike: AlikeRuns) -> list[dict[str, Any]]:
    """Return the headline table and the detailed tables of runs that were evaluated alike."""
    group = alike.runs
    benchmarks = alike.benchmarks
    kinds = kinds_of(group)
    first = kinds[0] if kinds else "verbal"
    is_marked = not alike.other_problems
    headline_rows = _cells(_rows_of(group, first), None, is_marked)
    note = "; ".join([*alike.other_problems, *_mixed_problems(alike)])
    tables = [_table(alike.title, headline_rows, is_open=True, note=note)]
    several = len(benchmarks) > 1
    choices: list[str | None] = [None]
    if several:
        choices += benchmarks
    for benchmark in choices:
        for kind in kinds:
            if benchmark is None and kind == first:
                continue  # the headline table
            scored = [run for run in group if _has(run, kind, benchmark)]
            if not scored:
                continue
            if benchmark is not None:
                scope = benchmark
            elif several:
                scope = "All benchmarks"
            else:
                scope = benchmarks[0]
            name = f"{scope}, {kind} confidence"
            rows = _with_baselines(scored, kind, benchmark)
            tables.append(_table(name, _cells(rows, benchmark, is_marked)))
        tables += _passes(group, benchmark, len(benchmarks))
        if benchmark is not None:
            tables += _by_kind(group, benchmark)
        elif len(benchmarks) == 1:
            tables += _by_kind(group, benchmarks[0])
    return tables


def _mixed_problems(alike: AlikeRuns) -> list[str]:
    """Return a line for each run and benchmark: of how many problems its scores within problems
    are.
    """
    lines = []
    for run in alike.runs:
        scored = {name: _scores(run, name) or {} for name in alike.benchmarks}
        lines += [f"{run.name}, {line}" for line in mixed_problems(scored)]
    return lines


def _by_kind(group: Sequence[EvaluatedRun], benchmark: str) -> list[dict[str, Any]]:
    """Return the table of a benchmark's accuracy, of all its problems and by their kind, under that
    of always giving the most frequent answer; none if no run has it.
    """
    scored = {run.name: _scores(run, benchmark) or {} for run in group}
    kinds: dict[str, None] = {}
    for scores in scored.values():
        kinds.update(dict.fromkeys(scores.get("by_kind", {})))
    if not any("prompt_blind" in scores for scores in scored.values()):
        return []
    shown = list(kinds)[:_MOST_KINDS_SHOWN]
    accuracies: dict[str, list[float | None]] = {}
    blind: list[float | None] = [None] * (1 + len(shown))
    for name, scores in scored.items():
        by_kind = scores.get("by_kind", {})
        parts = [scores, *(by_kind.get(kind, {}) for kind in shown)]
        accuracies[name] = [part.get("accuracy") for part in parts]
        for column, part in enumerate(parts):
            if blind[column] is None:
                blind[column] = part.get("prompt_blind", {}).get("accuracy")
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, values in {_PROMPT_BLIND: blind, **accuracies}.items():
        texts = [format_value("accuracy", value) for value in values]
        rows[name] = [{"text": text, "best": False} for text in texts]
    title = f"{benchmark}, accuracy by kind, and of always giving the most frequent answer"
    return [_table(title, rows, labels=["all problems", *shown])]


def _passes(
    group: Sequence[EvaluatedRun], benchmark: str | None, benchmarks: int
) -> list[dict[str, Any]]:
    """Return the table of pass@k of a benchmark, or of all of them; none if no run has it."""
    scored = {run.name: _scores(run, benchmark) or {} for run in group}
    sizes: set[str] = set()
    for scores in scored.values():
        sizes.update(scores.get("pass_at_k", {}))
    if not sizes:
        return []
    columns = sorted(sizes, key=int)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, scores in scored.items():
        values = scores.get("pass_at_k", {})
        ends_of = (scores.get("ci95") or {}).get("pass_at_k", {})
        rows[name] = []
        for k in columns:
            text = format_value("accuracy", values.get(k), ends_of.get(k))
            rows[name].append({"text": text, "best": False})
    scope = "All benchmarks, " if benchmark is None and benchmarks > 1 else ""
    if benchmark is not None:
        scope = f"{benchmark}, "
    labels = [f"pass@{k}" for k in columns]
    return [_table(f"{scope}pass@k", rows, labels=labels)]


def _scores(run: EvaluatedRun, benchmark: str | None) -> Mapping[str, Any] | None:
    """Return the scores of a run's evaluation on a benchmark, or on all of them; None if there are
    none.
    """
    if run.evaluation is None:
        return None
    if not benchmark:
        return run.evaluation["overall"]  # type: ignore[no-any-return]
    return run.evaluation["benchmarks"].get(benchmark)  # type: ignore[no-any-return]


def _has(run: EvaluatedRun, kind: str, benchmark: str | None) -> bool:
    scores = _scores(run, benchmark)
    return scores is not None and kind in scores


def _cells(
    table_rows: Sequence[_Row], benchmark: str | None, is_marked: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Return, for each row, the text of each headline value with the half width of its 95 %
    interval, and where the best ``is_marked``, whether it is that of its column: better than all
    others but the baselines, with intervals that do not overlap.
    """
    rows = {}
    intervals = {}
    for name, run, kind in table_rows:
        rows[name] = summary_of(run, kind, benchmark)
        intervals[name] = intervals_of(run, kind, benchmark)
    arms = {row.name: rows[row.name] for row in table_rows if row.kind not in BASELINES}
    of_arms = {name: intervals[name] for name in arms}
    best: dict[str, str | None] = {}
    if is_marked:
        best = {key: separable_best(key, arms, of_arms) for key in HEADLINE}
    table: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        cells: list[dict[str, Any]] = []
        for key in HEADLINE:
            text = format_value(key, row.get(key), intervals[name].get(key))
            cells.append({"text": text, "best": best.get(key) == name})
        table[name] = cells
    return table


def intervals_of(run: EvaluatedRun, kind: str, benchmark: str | None) -> dict[str, Ends]:
    """Return the 95 % intervals of an evaluation's headline values, as far as it has them."""
    scores = _scores(run, benchmark)
    if scores is None:
        return {}
    ci95 = scores.get("ci95") or {}
    candidates = {**ci95.get(kind, {}), "accuracy": ci95.get("accuracy")}
    intervals: dict[str, Ends] = {}
    for key, ends in candidates.items():
        if ends and all(map(is_number, ends)):
            low, high = ends
            intervals[key] = (low, high)
    return intervals


def separable_best(
    key: str, rows: Mapping[str, Mapping[str, Any]], intervals: Mapping[str, Mapping[str, Ends]]
) -> str | None:
    """Return the run whose value is better than that of every other run, with intervals that do not
    overlap; None if there is no such run.
    """
    better = METRICS[key].better
    if better is None or len(rows) < 2:
        return None
    if any(key not in run_intervals for run_intervals in intervals.values()):
        return None
    best = better(rows[name][key] for name in rows)
    (name, *equal) = [name for name in rows if rows[name][key] == best]
    low, high = intervals[name][key]
    others = [intervals[other][key] for other in rows if other != name]
    apart = all(high < other[0] or low > other[1] for other in others)
    return name if apart and not equal else None


def _panels(
    runs: Sequence[EvaluatedRun], kinds: Sequence[str], benchmarks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the reliability diagrams of all runs: one panel per kind of confidence over all
    benchmarks, then one per benchmark for the first kind.
    """
    shown: list[tuple[str, str | None]] = [(kind, None) for kind in kinds]
    if len(benchmarks) > 1:
        shown += [(kinds[0], name) for name in benchmarks]
    panels = []
    for kind, benchmark in shown:
        pictures = _reliability(runs, kind, benchmark)
        panels.append({"kind": kind, "benchmark": benchmark, "pictures": pictures})
    for turn in _turns(runs):
        panels.append({"kind": f"turn {turn}", "benchmark": None, "pictures": _of_turn(runs, turn)})
    return panels


def _by_turn(run: EvaluatedRun) -> Mapping[str, Mapping[str, Any]]:
    """Return the scores of an evaluation's confidences behind earlier answers, by the turn."""
    by_turn: Mapping[str, Mapping[str, Any]]
    by_turn = (_scores(run, None) or {}).get("turns", {}).get("by_turn", {})
    return by_turn


def _turns(runs: Sequence[EvaluatedRun]) -> list[str]:
    return sorted({turn for run in runs for turn in _by_turn(run)}, key=int)


def _of_turn(runs: Sequence[EvaluatedRun], turn: str) -> list[_Picture]:
    """Return the reliability diagram of the confidences behind a turn, of each run."""
    pictures = []
    for run in runs:
        scores = _by_turn(run).get(turn)
        if scores is not None:
            noted = [
                f"{METRICS[key].label} {format_value(key, scores[key])}" for key in _TURN_NOTED
            ]
            figure = diagrams.run_panel(bins_from_json(scores["bins"]), _short(run.name))
            label = f"{run.name} turn {turn} reliability"
            pictures.append(_Picture(_svg(figure, label), ", ".join(noted)))
    return pictures


def _stopping(runs: Sequence[EvaluatedRun]) -> list[_Picture]:
    """Return the picture of what stopping sessions early keeps and saves."""
    curves = {}
    for run in runs:
        turns = (_scores(run, None) or {}).get("turns")
        if turns is not None:
            curves[run.name] = turns["stopping"]
    return [_Picture(_svg(diagrams.stopping_figure(curves), "stopping"))] if curves else []


def _reliability(runs: Sequence[EvaluatedRun], kind: str, benchmark: str | None) -> list[_Picture]:
    """Return a reliability diagram above a histogram, on shared axes, for every run that has this
    kind of confidence.
    """
    bins: dict[str, Bins] = {}
    notes: dict[str, str] = {}
    for run in runs:
        scores = _scores(run, benchmark)
        if scores is None or kind not in scores:
            continue
        bins[run.name] = bins_from_json(scores[kind]["bins"])
        values = summary_of(run, kind, benchmark)
        noted = [f"{METRICS[key].label} {format_value(key, values[key])}" for key in _NOTED]
        notes[run.name] = ", ".join(noted)
    most = max((int(b.count.max(initial=1)) for b in bins.values()), default=1)
    pictures = []
    for name, rows in bins.items():
        figure = diagrams.run_panel(rows, _short(name), most=most)
        label = f"{name} {benchmark or 'overall'} {kind} reliability"
        pictures.append(_Picture(_svg(figure, label), notes[name]))
    return pictures


def _short(name: str, width: int = 30) -> str:
    """Return a name that fits above a panel, without its middle if it is too long."""
    if len(name) <= width:
        return name
    return f"{name[: width // 2 - 1]}…{name[-(width // 2) :]}"


def _coverage(runs: Sequence[EvaluatedRun], kinds: Sequence[str]) -> list[_Picture]:
    """Return accuracy against coverage, from the most confident samples on: one picture per kind of
    confidence, all runs overlaid.
    """
    pictures = []
    for kind in kinds:
        curves: dict[str, Any] = {}
        areas = []
        for run in runs:
            scores = (_scores(run, None) or {}).get(kind, {})
            if scores.get("curve", {}).get("coverage"):
                curves[run.name] = scores["curve"]
                areas.append(f"{run.name} {format_value('aurc', scores.get('aurc'))}")
        if curves:
            figure = diagrams.coverage_figure(curves, f"{kind} confidence")
            caption = f"AURC: {', '.join(areas)}"
            pictures.append(_Picture(_svg(figure, f"coverage {kind}"), caption))
    return pictures


def _rollouts(run: EvaluatedRun) -> ShownRollouts:
    """Return the responses of a run that the page shows."""
    return rollouts_of(run.samples, (run.evaluation or {}).get("marker", CONFIDENCE_TAG))


def _embedded(value: object) -> Markup:
    """Return JSON for a script element, escaped so that it cannot close the element."""
    text = json.dumps(json_ready(value), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
