"""The runs that a report compares: directories with an evaluation, a training, or both."""

from __future__ import annotations

import logging
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dcpo import codec
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.foreign import read_any
from megatron_dcpo.evaluation.run_description import options
from megatron_dcpo.evaluation.samples import SETTINGS, Sample, sample_of
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS, confidences_of, score_samples
from megatron_dcpo.runtime.run_records import CONFIG
from megatron_dcpo.runtime.text import read_json_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedRun:
    """The files of one run: the content of ``evaluation.json``, the rows of ``metrics.jsonl``,
    judged responses, and the ``settings`` that the evaluation sampled with.
    """

    name: str
    path: Path
    evaluation: Mapping[str, Any] | None
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def name_in_files(benchmark: str) -> str:
    """Return what stands for a benchmark in the names of files: its name in a ``samples.jsonl`` may
    be any text.
    """
    return re.sub(r"[^\w.-]", "_", benchmark)[:100]


def find_runs(
    paths: Sequence[str | Path], columns: Mapping[str, str] | None = None
) -> list[EvaluatedRun]:
    """Return the runs at or below ``paths``, in the order given, subdirectories by name. A file is
    a run of its own: samples of ours, or a log of somebody else's, whose ``columns`` are named. No
    two runs have the same name.

    A training run without its own evaluation takes the one evaluation below it, if there is
    exactly one.
    """
    runs: list[EvaluatedRun] = []
    for named in paths:
        root = Path(named)
        if root.is_file():
            runs.append(run_of_file(root, columns))
            continue
        if not root.is_dir():
            raise UserError(f"{root}: no such run directory")
        directories = (root, *sorted(d for d in root.rglob("*") if d.is_dir()))
        below = [directory for directory in directories if _is_run(directory)]
        if not below:
            raise UserError(f"{root}: neither evaluation.json nor metrics.jsonl in it or below")
        adopted = _adopted(below)
        for directory in below:
            if directory in adopted.values():
                continue
            name = str(directory.relative_to(root))
            if directory == root:
                name = root.resolve().name
            runs.append(read_run(directory, adopted.get(directory), name))
    return _distinct(runs)


def run_of_file(path: Path, columns: Mapping[str, str] | None = None) -> EvaluatedRun:
    """Return the samples in a file as a run, scored by the stated confidence and by every other one
    that they have. Raises :class:`UserError` as :func:`megatron_dcpo.evaluation.foreign.read_any`
    does.
    """
    samples = read_any(path, columns)
    kinds = [kind for kind in CONFIDENCE_KINDS if kind == "verbal" or _any_has(samples, kind)]
    rows = []
    for sample in samples:
        row = codec.to_row(
            sample.prompt, sample.response, sample.judgement, sample.measures, sample.origin
        )
        rows.append(json_ready(row))
    evaluation = score_samples(samples, kinds, path.name, resamples=1000, seed=0)
    return EvaluatedRun(path.stem, path, evaluation, metrics=(), samples=rows)


def _any_has(samples: Sequence[Sample], kind: str) -> bool:
    """Return whether a sample has a kind of confidence."""
    return any(confidence is not None for confidence in confidences_of(samples, kind))


def with_kinds(run: EvaluatedRun, kinds_by: str) -> EvaluatedRun:
    """Return an evaluated run with its samples scored again within the kinds that ``kinds_by``
    names; a run without an evaluation as it is.

    Raises :class:`UserError` if its samples are gone, or if no problem has a kind by ``kinds_by``.
    """
    if run.evaluation is None:
        return run
    try:
        samples = [sample_of(row) for row in run.samples]
    except ValueError as error:
        raise UserError(f"{run.path}: not a sample of dcpo evaluate ({error})") from None
    if len(samples) != run.evaluation["overall"]["n"]:
        raise UserError(
            f"--kinds {kinds_by}: {run.path} does not hold the samples of its evaluation any more, "
            "by which its kinds are known"
        )
    scored = [kind for kind in CONFIDENCE_KINDS if kind in run.evaluation["overall"]]
    with_intervals = "ci95" in run.evaluation["overall"]
    again = score_samples(
        samples, scored, resamples=1000 if with_intervals else 0, seed=0, kinds_by=kinds_by
    )
    del again["model"]
    return replace(run, evaluation={**run.evaluation, **again})


def unevaluated(path: Path) -> str:
    """Return what the numbers of a run are that was never evaluated, and how to evaluate it."""
    policy = path / "policy"
    numbers = "its numbers are of the last training step's responses"
    if is_supervised(path):
        numbers = "supervised training has only losses"
    how = f"evaluate it by {how_to_evaluate(path)}"
    if not policy.is_dir():
        how = f"its policy is in {policy} when it has ended, for dcpo evaluate"
    return f"never evaluated; {numbers}; {how}"


def how_to_evaluate(path: Path) -> str:
    """Return the command that evaluates the policy of a run."""
    words = ["dcpo", "evaluate", "--model", str(path / "policy")]
    if not is_supervised(path):
        words += ["--as-trained", str(path / CONFIG)]
    words += ["--benchmarks", _benchmarks_of(path) or "NAME=FILE", "--out", str(path / "eval")]
    return shlex.join(words)


def _benchmarks_of(path: Path) -> str:
    """Return the held-out problems that a run's configuration names, nothing if it names none."""
    benchmarks = options(path).get("evaluation.benchmarks") or ""
    return benchmarks if isinstance(benchmarks, str) else ",".join(benchmarks)


def is_supervised(path: Path) -> bool:
    """Return whether a run directory is that of ``dcpo sft``."""
    config = path / CONFIG
    return config.is_file() and "\n  examples_per_step:" in config.read_text()


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("evaluation.json", "metrics.jsonl"))


def read_run(
    path: Path, evaluation_path: Path | None = None, name: str | None = None
) -> EvaluatedRun:
    """Read a run, whose evaluation may be in another directory, ``evaluation_path``."""
    evaluated = evaluation_path or path
    evaluation_file = evaluated / "evaluation.json"
    evaluation = None
    if evaluation_file.exists():
        evaluation = _read_json(evaluation_file)
    metrics_file = path / "metrics.jsonl"
    metrics = []
    if metrics_file.exists():
        for _, row in read_json_lines(metrics_file, allow_truncated=True):
            metrics.append(row)
    newest_samples = sorted((path / "samples").glob("*.jsonl"))[-1:]
    samples: list[dict[str, Any]] = []
    for file in (evaluated / "samples.jsonl", *newest_samples):
        if file.exists():
            samples = _sample_rows(file)
            break
    settings: Mapping[str, Any] = {}
    if isinstance(evaluation, dict) and isinstance(evaluation.get("sampled"), dict):
        settings = evaluation["sampled"]
    if (evaluated / SETTINGS).is_file():
        settings = read_json_object(evaluated / SETTINGS)
    return EvaluatedRun(
        name=name or path.name,
        path=path,
        evaluation=evaluation,
        metrics=metrics,
        samples=samples,
        settings=settings,
    )


def _sample_rows(path: Path) -> list[dict[str, Any]]:
    """Return the judged answers in a file as rows. They are not checked any further."""
    rows = []
    for where, row in read_json_lines(path, allow_truncated=True):
        try:
            codec.check_version(row)
        except ValueError as error:
            raise UserError(f"{where}: not a judged answer ({error})") from None
        rows.append(row)
    return rows


def _adopted(directories: Sequence[Path]) -> dict[Path, Path]:
    """Map each training directory to the evaluation directory below it, if there is just one."""
    adopted = {}
    for parent in directories:
        if (parent / "evaluation.json").exists():
            continue
        children = [child for child in directories if parent in child.parents]
        if len(children) == 1 and not (children[0] / "metrics.jsonl").exists():
            adopted[parent] = children[0]
    return adopted


def _distinct(runs: Sequence[EvaluatedRun]) -> list[EvaluatedRun]:
    """Return the runs under distinct names: those that share one get a parent directory more in
    front of it until they differ, at last their full paths. Of a run that was named twice the first
    is kept, and said.
    """
    by_path: dict[Path, EvaluatedRun] = {}
    for run in runs:
        path = run.path.resolve()
        if path in by_path:
            logger.warning("%s was named twice; the report has it once", run.path)
        by_path.setdefault(path, run)
    parents = dict.fromkeys(by_path, 0)
    while True:
        names = {path: _name_with(run, parents[path]) for path, run in by_path.items()}
        counts = Counter(names.values())
        shared = [path for path, name in names.items() if counts[name] > 1]
        if not shared:
            return [replace(run, name=names[path]) for path, run in by_path.items()]
        for path in shared:
            parents[path] += 1


def _name_with(run: EvaluatedRun, parents: int) -> str:
    """Return the name of a run, which is the end of its path, with so many directories more; its
    full path where there are no more.
    """
    if not parents:
        return run.name
    path = run.path.resolve()
    above = path.parts[1 : len(path.parts) - len(Path(run.name).parts)]  # without the root
    if parents > len(above):
        return str(path)
    return "/".join((*above[-parents:], run.name))


def _read_json(path: Path) -> dict[str, Any]:
    value = read_json_object(path)
    if not all(isinstance(value.get(part), dict) for part in ("overall", "benchmarks")):
        raise UserError(
            f"{path}: not an evaluation (no 'overall' and 'benchmarks'); write it with "
            "dcpo evaluate"
        )
    return value
