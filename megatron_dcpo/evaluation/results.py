"""What an evaluation leaves in its directory: scores, samples, a report and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.metrics import Bins
from megatron_dcpo.evaluation.report import summary_of, write_report
from megatron_dcpo.evaluation.runs import EvaluatedRun, name_in_files, read_run
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.evaluation.scoring import bins_from_json, scored_kinds
from megatron_dcpo.runtime.files import write_atomically


def write_evaluation(
    directory: str | Path, evaluation: Mapping[str, Any], samples: Sequence[Sample], title: str = ""
) -> None:
    """Write ``evaluation.json``, ``samples.jsonl``, ``report.html``, and ``diagrams/`` per
    benchmark and kind of confidence.
    """
    root = Path(directory)
    pictures = root / "diagrams"
    root.mkdir(parents=True, exist_ok=True)
    write_samples(samples, root / "samples.jsonl")
    text = json.dumps(evaluation, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(root / "evaluation.json", text + "\n")
    run = read_run(root)
    names: list[str | None] = [*evaluation["benchmarks"]]
    if len(names) != 1:
        names = [None, *names]
    for benchmark in names:
        scores = evaluation["overall"]
        if benchmark:
            scores = evaluation["benchmarks"][benchmark]
        _draw(scores, run, benchmark, pictures)
    if len(evaluation["benchmarks"]) > 1:
        _draw_grids(evaluation["benchmarks"], pictures)
    if not title:
        title = f"Evaluation of {evaluation['model'] or run.name}"
    write_report([run], root / "report.html", title)


def _draw(
    scores: Mapping[str, Any], run: EvaluatedRun, benchmark: str | None, pictures: Path
) -> None:
    """Draw the reliability diagram and the histogram of every kind of confidence, and the
    accuracy-coverage curves of all kinds.
    """
    name = benchmark or "overall"
    file = name_in_files(name)
    curves = {}
    for kind in scored_kinds(scores):
        values = summary_of(run, kind, benchmark)
        bins = bins_from_json(scores[kind]["bins"])
        notes = []
        for key in ("ece", "pce"):
            if values[key] is not None:
                notes.append(f"{key.upper()} {values[key]:.3f}")
        heading = f"{name}, {kind} confidence"
        reliability = diagrams.reliability_diagram(bins, heading, "\n".join(notes))
        diagrams.save(reliability, pictures / f"reliability_{file}_{kind}")
        histogram = diagrams.confidence_histogram(bins, heading)
        diagrams.save(histogram, pictures / f"confidence_{file}_{kind}")
        curve = scores[kind].get("curve", {})
        if curve.get("coverage"):
            curves[kind] = curve
    if curves:
        coverage = diagrams.coverage_figure(curves, name)
        diagrams.save(coverage, pictures / f"coverage_{file}")


def _draw_grids(benchmarks: Mapping[str, Mapping[str, Any]], pictures: Path) -> None:
    """Draw a picture per kind of confidence, with all benchmarks side by side on the same axes."""
    bins_of_kind: dict[str, dict[str, Bins]] = {}
    for name, scores in benchmarks.items():
        for kind in scored_kinds(scores):
            bins = bins_from_json(scores[kind]["bins"])
            bins_of_kind.setdefault(kind, {})[name] = bins
    for kind, bins_of_benchmark in bins_of_kind.items():
        grid = diagrams.comparison_grid(bins_of_benchmark)
        diagrams.save(grid, pictures / f"grid_{kind}")
