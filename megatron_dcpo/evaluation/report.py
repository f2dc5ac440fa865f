"""One self-contained HTML page that compares runs: table, reliability diagrams, training curves, sample responses.

A run is a directory with ``evaluation.json`` (and ``samples.jsonl``) and/or ``metrics.jsonl`` (and ``samples/``), or
one that contains such directories. The page needs no network: styles and SVG pictures are inside, it follows the
reader's light or dark mode and folds to one column on a phone.

The frame of ``report.html``: styles for light and dark, wide and narrow. Filled in by ``string.Template``.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.metrics import Bins
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.data.datasets import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import published
from megatron_dcpo.evaluation.published import Published
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS, HEADLINE, bins_from_json, headline
from megatron_dcpo.judging.confidence import MARKER

LABELS = {
    "accuracy": "Accuracy",
    "ece": "ECE",
    "pce": "PCE",
    "brier": "Brier",
    "auroc": "AUROC",
    "mean_confidence": "Mean conf.",
    "violation_rate": "Violations",
    "n": "n",
}
_BEST = {"accuracy": max, "ece": min, "pce": min, "brier": min, "auroc": max, "violation_rate": min}
_PERCENT = {"accuracy", "mean_confidence", "violation_rate"}
_NOTED = ("accuracy", "ece", "pce", "auroc")
_SAMPLES_SHOWN = 6


@dataclass(frozen=True)
class Run:
    """What was found of one run. ``evaluation``: evaluation.json; ``metrics``: rows; ``samples``: judged responses."""

    name: str
    path: Path
    evaluation: Mapping[str, Any] | None
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]


# ------------------------------------------------------------------------------------------------ finding runs


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at or below ``paths``, in the order given, subdirectories by name.

    A training run without an evaluation of its own takes the one evaluation below it, if there is exactly one.
    """
    found: list[Run] = []
    for given in paths:
        root = Path(given)
        if not root.is_dir():
            raise UserError(f"{root}: no such run directory")
        below = [
            directory for directory in (root, *sorted(d for d in root.rglob("*") if d.is_dir())) if _is_run(directory)
        ]
        if not below:
            raise UserError(f"{root}: neither evaluation.json nor metrics.jsonl in it or below")
        adopted = _adopted(below)
        found += [
            read_run(directory, adopted.get(directory), _run_name(root, directory))
            for directory in below
            if directory not in adopted.values()
        ]
    return _distinct(found)


def read_run(path: Path, evaluation_path: Path | None = None, name: str | None = None) -> Run:
    """Read a run; its evaluation may lie in a directory of its own."""
    evaluated = evaluation_path or path
    evaluation_file, metrics_file = evaluated / "evaluation.json", path / "metrics.jsonl"
    evaluation = _read_json(evaluation_file) if evaluation_file.exists() else None
    rows = [row for _, row in read_json_lines(metrics_file, allow_truncated=True)] if metrics_file.exists() else []
    files = [evaluated / "samples.jsonl", *sorted((path / "samples").glob("*.jsonl"))[-1:]]
    samples = next(
        ([row for _, row in read_json_lines(file, allow_truncated=True)] for file in files if file.exists()), []
    )
    return Run(name or path.name, path, evaluation, rows, samples)


def _is_run(path: Path) -> bool:
    return (path / "evaluation.json").exists() or (path / "metrics.jsonl").exists()


def _adopted(directories: Sequence[Path]) -> dict[Path, Path]:
    """Training directory -> the only evaluation directory below it."""
    adopted = {}
    for parent in directories:
        if (parent / "evaluation.json").exists():
            continue
        children = [child for child in directories if parent in child.parents]
        if len(children) == 1 and not (children[0] / "metrics.jsonl").exists():
            adopted[parent] = children[0]
    return adopted


def _run_name(root: Path, directory: Path) -> str:
    return root.resolve().name if directory == root else str(directory.relative_to(root))


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Names that occur twice get their parent directory in front."""
    names = [run.name for run in runs]
    return [
        Run(f"{run.path.resolve().parent.name}/{run.name}", run.path, run.evaluation, run.metrics, run.samples)
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    if not isinstance(value, dict) or "overall" not in value or "benchmarks" not in value:
        raise UserError(f"{path}: not an evaluation (no 'overall' and 'benchmarks'); write it with dcpo evaluate")
    return value


# ------------------------------------------------------------------------------------------------ the numbers


def comparison(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """``HEADLINE`` per run: of the evaluation, or of the last logged training step where there is none."""
    return {run.name: summary_of(run) for run in runs}


def summary_of(run: Run, kind: str = "verbal", benchmark: str | None = None) -> dict[str, Any]:
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


def kinds_of(runs: Sequence[Run]) -> list[str]:
    scores = [run.evaluation["overall"] for run in runs if run.evaluation is not None]
    return [kind for kind in CONFIDENCE_KINDS if any(kind in overall for overall in scores)]


def benchmarks_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs if run.evaluation for name in run.evaluation["benchmarks"]))


# ------------------------------------------------------------------------------------------------ the page


def write_report(
    runs: Sequence[Run], path: str | Path, title: str = "Accuracy and calibration", against: Sequence[Published] = ()
) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_report(runs, title, against), encoding="utf-8")
    return target


def render_report(
    runs: Sequence[Run], title: str = "Accuracy and calibration", against: Sequence[Published] = ()
) -> str:
    """The page as one string. ``against``: published numbers to set beside."""
    beside = published.render(published.compare({run.name: run.evaluation for run in runs}, against))
    sections = [_tables(runs), beside, _reliability(runs), _coverage(runs), _curves(runs), _samples(runs)]
    return Template(PAGE).substitute(
        title=html.escape(title),
        runs=html.escape(", ".join(run.name for run in runs)),
        body="\n".join(section for section in sections if section),
        data=_embedded(comparison(runs)),
    )


def _tables(runs: Sequence[Run]) -> str:
    """The headline table, and behind a fold one per benchmark and kind of confidence when there are several."""
    kinds, benchmarks = kinds_of(runs), benchmarks_of(runs)
    first = kinds[0] if kinds else "verbal"
    parts = ["<section><h2>Comparison</h2>", _table({run.name: summary_of(run, first) for run in runs})]
    trained_only = [run.name for run in runs if run.evaluation is None]
    if trained_only:
        names = html.escape(", ".join(trained_only))
        parts.append(f'<p class="hint">Not evaluated, last training step shown: {names}.</p>')
    named = f" on {html.escape(', '.join(benchmarks))}" if benchmarks else ""
    parts.append(
        f'<p class="hint">{first.capitalize()} confidence{named}. ECE and PCE: 20 equal-width bins, over parsed '
    )
    parts.append("confidences; the best value of each column is bold.</p>")
    sets = {frozenset(run.evaluation["benchmarks"]) for run in runs if run.evaluation}
    if len(sets) > 1:
        parts.append('<p class="hint">The runs were evaluated on different benchmarks: compare them per benchmark.</p>')
    for benchmark in [None, *benchmarks] if len(benchmarks) > 1 else [None]:
        for kind in kinds:
            if benchmark is None and kind == first:
                continue
            rows = {run.name: summary_of(run, kind, benchmark) for run in runs if _has(run, kind, benchmark)}
            if not rows:
                continue
            place = benchmark or ("All benchmarks" if len(benchmarks) > 1 else benchmarks[0])
            name = html.escape(f"{place}, {kind} confidence")
            parts.append(f"<details><summary>{name}</summary>{_table(rows)}</details>")
    return "\n".join([*parts, "</section>"])


def _has(run: Run, kind: str, benchmark: str | None) -> bool:
    if run.evaluation is None:
        return False
    scores = run.evaluation["benchmarks"].get(benchmark) if benchmark else run.evaluation["overall"]
    return scores is not None and kind in scores


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    best = {key: _best(key, [row.get(key) for row in rows.values()]) for key in HEADLINE}
    head = "".join(f"<th>{LABELS[key]}</th>" for key in HEADLINE)
    lines = [f'<div class="scroll"><table><thead><tr><th>Run</th>{head}</tr></thead><tbody>']
    for name, row in rows.items():
        cells = "".join(
            f"<td{' class=best' if best[key] is not None and row.get(key) == best[key] else ''}>"
            f"{format_value(key, row.get(key))}</td>"
            for key in HEADLINE
        )
        lines.append(f"<tr><th>{published.breakable(name)}</th>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _best(key: str, values: Sequence[Any]) -> float | None:
    defined = [value for value in values if _is_number(value)]
    return _BEST[key](defined) if key in _BEST and len(defined) > 1 else None


def format_value(key: str, value: Any) -> str:
    """A table cell: percentages with one decimal, errors with three, a dash for undefined."""
    if not _is_number(value):
        return "–"
    if key in _PERCENT:
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if key == "n" else f"{value:.3f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reliability(runs: Sequence[Run]) -> str:
    """One panel per run and kind of confidence, on shared axes."""
    kinds, benchmarks = kinds_of(runs), benchmarks_of(runs)
    parts = [f"<h3>{kind.capitalize()} confidence</h3>{_panels(runs, kind)}" for kind in kinds]
    if len(benchmarks) > 1:
        for name in benchmarks:
            heading = html.escape(f"{name}, {kinds[0]} confidence")
            parts.append(f"<details><summary>{heading}</summary>{_panels(runs, kinds[0], name)}</details>")
    if not parts:
        return ""
    caption = (
        "Bars: accuracy of the samples in a confidence bin, darker with a larger share of all samples, with 95 % "
        "Wilson intervals. Dots: the bin's mean confidence; an orange gap down to the bar is over-confidence, a blue "
        "one under-confidence. Below: samples per bin (logarithmic), green the correct ones."
    )
    return f'<section><h2>Reliability</h2><p class="hint">{caption}</p>{"".join(parts)}</section>'


def _panels(runs: Sequence[Run], kind: str, benchmark: str | None = None) -> str:
    """Reliability diagram over histogram of every run that has this kind of confidence, on shared axes."""
    bins: dict[str, Bins] = {}
    notes: dict[str, str] = {}
    for run in runs:
        if run.evaluation is None or not _has(run, kind, benchmark):
            continue
        scores = run.evaluation["benchmarks"][benchmark] if benchmark else run.evaluation["overall"]
        bins[run.name] = bins_from_json(scores[kind]["bins"])
        values = summary_of(run, kind, benchmark)
        notes[run.name] = ", ".join(f"{LABELS[key]} {format_value(key, values[key])}" for key in _NOTED)
    most = max((int(b.count.max(initial=1)) for b in bins.values()), default=1)
    cards = []
    for name, rows in bins.items():
        picture = diagrams.inline_svg(
            diagrams.run_panel(rows, _short(name), most=most), f"{name} {benchmark or 'overall'} {kind} reliability"
        )
        cards.append(f"<figure>{picture}<figcaption>{notes[name]}</figcaption></figure>")
    return f'<div class="grid panels">{"".join(cards)}</div>'


def _short(name: str, width: int = 30) -> str:
    """A name that fits over a panel: its middle is what is left out."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width // 2) :]}"


def _coverage(runs: Sequence[Run]) -> str:
    """Accuracy of the most confident share of the samples, one picture per kind of confidence, all runs overlaid."""
    figures = []
    for kind in kinds_of(runs):
        scored = {run.name: run.evaluation["overall"].get(kind, {}) for run in runs if run.evaluation is not None}
        curves = {name: scores["curve"] for name, scores in scored.items() if scores.get("curve", {}).get("coverage")}
        if curves:
            aurc = ", ".join(f"{name} {format_value('aurc', scored[name].get('aurc'))}" for name in curves)
            picture = diagrams.inline_svg(diagrams.coverage_figure(curves, f"{kind} confidence"), f"coverage {kind}")
            figures.append(f"<figure>{picture}<figcaption>AURC: {html.escape(aurc)}</figcaption></figure>")
    if not figures:
        return ""
    hint = "Accuracy if only the most confident share of the samples is answered. A flat line: the confidence says nothing."
    grid = f'<div class="grid curves">{"".join(figures)}</div>'
    return f'<section><h2>Accuracy and coverage</h2><p class="hint">{hint}</p>{grid}</section>'


def _curves(runs: Sequence[Run]) -> str:
    trained = {run.name: run.metrics for run in runs if run.metrics}
    curves = diagrams.logged_curves(trained)
    if not curves:
        return ""
    legend = "".join(
        f'<span><i style="background:{diagrams.PALETTE[i % len(diagrams.PALETTE)]}"></i>{html.escape(name)}</span>'
        for i, name in enumerate(trained)
    )
    figures = "".join(
        f"<figure>{diagrams.inline_svg(diagrams.curve_figure(trained, curve), curve.title)}</figure>"
        for curve in curves
    )
    return f'<section><h2>Training</h2><p class="legend">{legend}</p><div class="grid curves">{figures}</div></section>'


def _samples(runs: Sequence[Run]) -> str:
    """A few responses per run: the most confident wrong ones first, then correct and malformed ones."""
    parts = []
    for run in runs:
        if run.samples:
            marker = (run.evaluation or {}).get("marker", MARKER)
            cards = "".join(_sample(row, marker) for row in choose_samples(run.samples))
            parts.append(f"<details><summary>{html.escape(run.name)}</summary>{cards}</details>")
    if not parts:
        return ""
    hint = (
        '<p class="hint">The most confident mistakes, the least confident and the most confident correct answers, and '
        'malformed ones. <span class="reasoning">Reasoning</span> and <mark>confidence</mark> blocks as trained.</p>'
    )
    return f"<section><h2>Sample responses</h2>{hint}{''.join(parts)}</section>"


def choose_samples(samples: Sequence[Mapping[str, Any]], count: int = _SAMPLES_SHOWN) -> list[Mapping[str, Any]]:
    """Telling ones: over-confident mistakes, doubted and sure correct answers, malformed ones; no problem twice."""
    stated = [row for row in samples if _is_number(row.get("confidence"))]
    by_confidence = sorted(stated, key=lambda row: -row["confidence"])
    wrong = [row for row in by_confidence if not row.get("correct")]
    right = [row for row in by_confidence if row.get("correct")]
    malformed = [row for row in samples if row.get("confidence") is None]
    queues = [wrong, right[::-1], right, malformed]
    chosen: list[Mapping[str, Any]] = []
    problems = set()
    while any(queues) and len(chosen) < count:
        for queue in queues:
            while queue:
                row = queue.pop(0)
                problem = row.get("prompt_id", id(row))
                if problem not in problems and len(chosen) < count:
                    problems.add(problem)
                    chosen.append(row)
                    break
    return chosen


def _sample(row: Mapping[str, Any], marker: str = MARKER) -> str:
    verdict = "correct" if row.get("correct") else "wrong"
    stated = (
        f"says {row['confidence']:.2f}" if _is_number(row.get("confidence")) else row.get("status", "no confidence")
    )
    key = html.escape(str(row.get("category") or f"key {row.get('ground_truth', '')}"))
    problem = html.escape(str(row.get("problem") or ""))
    return (
        f'<article class="{verdict}"><header><b>{verdict}</b> <span>{html.escape(str(stated))}</span>'
        f"<span>{key}</span></header><pre class=problem>{problem}</pre><pre>{_two_blocks(row, marker)}</pre></article>"
    )


def _two_blocks(row: Mapping[str, Any], marker: str) -> str:
    """The response with its confidence block marked: as split by the trainer, else from the last marker on."""
    if "reasoning" in row:
        reasoning, confidence = str(row["reasoning"]), str(row.get("confidence_block") or "")
    else:
        text = str(row.get("response") or "")
        at = text.rfind(marker)
        reasoning, confidence = (text[:at], text[at:]) if at >= 0 else (text, "")
    shown = f'<span class="reasoning">{html.escape(reasoning)}</span>'
    return shown + (f"<mark>{html.escape(confidence)}</mark>" if confidence else "")


def _embedded(value: Any) -> str:
    """JSON inside a script element: it must not be able to close the element."""
    return json.dumps(json_ready(value), allow_nan=False).replace("<", "\\u003c")


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #fff; --ink: #1c1d1f; --soft: #5d636b; --line: #e1e3e6;
  --good: #00795a; --bad: #b64d00; --mark: #fff0c2; --reasoning: #34526b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131517; --card: #1b1e21; --ink: #e7e9ec; --soft: #9aa2ab; --line: #2e3338;
    --good: #3ecf9f; --bad: #ff9a52; --mark: #4a3c10; --reasoning: #a9c8e2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1.2rem 0 0.4rem; color: var(--soft); font-weight: 600; }
.hint, .runs { color: var(--soft); font-size: 0.875rem; margin: 0.3rem 0 0.8rem; max-width: 60rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.925rem; }
th, td { padding: 0.5rem 0.8rem; text-align: right; white-space: nowrap; }
thead th {
  white-space: normal; color: var(--soft); font-weight: 600; font-size: 0.8rem; border-bottom: 1px solid var(--line);
}
tbody tr + tr > * { border-top: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody th { font-weight: 600; }
td.note { text-align: left; white-space: normal; min-width: 15rem; color: var(--bad); }
@media (max-width: 40rem) {
  th, td { padding: 0.4rem 0.5rem; }
  th:first-child { max-width: 8.5rem; min-width: 6rem; white-space: normal; overflow-wrap: anywhere; }
}
td.best { font-weight: 700; color: var(--good); }
.grid { display: grid; gap: 0.9rem; }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(15.5rem, 100%), 1fr)); }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }
figure { margin: 0; padding: 0.6rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
figure svg { display: block; width: 100%; height: auto; max-width: 30rem; margin: 0 auto; }
figcaption {
  color: var(--soft); font-size: 0.78rem; text-align: center; padding-top: 0.3rem; font-variant-numeric: tabular-nums;
}
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 0.3rem 0 0.8rem; font-size: 0.9rem; }
.legend i {
  display: inline-block; width: 1.3rem; height: 0.22rem; border-radius: 2px; margin-right: 0.45rem;
  vertical-align: middle;
}
details { margin: 0.6rem 0; }
summary { cursor: pointer; font-weight: 600; font-size: 0.925rem; padding: 0.3rem 0; }
article {
  background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px;
  padding: 0.7rem 0.9rem; margin: 0.7rem 0;
}
article.correct { border-left-color: var(--good); }
article header { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; font-size: 0.85rem; color: var(--soft); }
article header b { color: var(--bad); }
article.correct header b { color: var(--good); }
pre {
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.5rem 0 0; max-height: 26rem; overflow-y: auto;
  font: 0.84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
pre.problem { color: var(--soft); }
.reasoning { color: var(--reasoning); }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 0.15em; }
</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="runs">$runs</p>
</header>
<main>
$body
</main>
<script type="application/json" id="comparison">$data</script>
</body>
</html>
"""
