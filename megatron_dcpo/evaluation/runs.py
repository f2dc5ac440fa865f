"""The runs that a report compares: directories with an evaluation, a training, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dcpo import codec
from megatron_dcpo.data.files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import run_description
from megatron_dcpo.evaluation.samples import SETTINGS
from megatron_dcpo.runtime.text import read_json_object


@dataclass(frozen=True)
class EvaluatedRun:
    """The files of one run. ``evaluation``: evaluation.json; ``metrics``: rows; ``samples``: judged
    responses.
    """

    name: str
    path: Path
    evaluation: Mapping[str, Any] | None
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # how the evaluation was sampled

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return what runs must have in common to stand in one table: benchmarks and sampling."""
        if self.evaluation is None:
            return ()
        return (
            *sorted(self.evaluation["benchmarks"]),
            run_description.sampling_text(self.settings, self.evaluation),
        )


def find_runs(paths: Sequence[str | Path]) -> list[EvaluatedRun]:
    """Return the runs at or below ``paths``, in the order given, subdirectories by name.

    A training run without an evaluation of its own takes the one evaluation below it, if there is
    exactly one.
    """
    runs: list[EvaluatedRun] = []
    for given in paths:
        root = Path(given)
        if not root.is_dir():
            raise UserError(f"{root}: no such run directory")
        directories = (root, *sorted(d for d in root.rglob("*") if d.is_dir()))
        below = [
            d
            for d in directories
            if (d / "evaluation.json").exists() or (d / "metrics.jsonl").exists()
        ]
        if not below:
            raise UserError(
                f"{root}: neither evaluation.json nor metrics.jsonl in it or below"
            )
        adopted = _adopted(below)
        runs += [
            read_run(
                directory,
                adopted.get(directory),
                root.resolve().name
                if directory == root
                else str(directory.relative_to(root)),
            )
            for directory in below
            if directory not in adopted.values()
        ]
    return _distinct(runs)


def read_run(
    path: Path, evaluation_path: Path | None = None, name: str | None = None
) -> EvaluatedRun:
    """Read a run; its evaluation may lie in a directory of its own."""
    evaluated = evaluation_path or path
    evaluation_file, metrics_file = (
        evaluated / "evaluation.json",
        path / "metrics.jsonl",
    )
    evaluation = _read_json(evaluation_file) if evaluation_file.exists() else None
    rows = (
        [row for _, row in read_json_lines(metrics_file, allow_truncated=True)]
        if metrics_file.exists()
        else []
    )
    samples: list[dict[str, Any]] = []
    for file in (
        evaluated / "samples.jsonl",
        *sorted((path / "samples").glob("*.jsonl"))[-1:],
    ):
        if file.exists():
            samples = _sample_rows(file)
            break
    settings = (
        read_json_object(evaluated / SETTINGS)
        if (evaluated / SETTINGS).is_file()
        else {}
    )
    return EvaluatedRun(name or path.name, path, evaluation, rows, samples, settings)


def _sample_rows(path: Path) -> list[dict[str, Any]]:
    """Return the judged answers in a file as rows. A page shows whatever they hold."""
    rows = []
    for where, row in read_json_lines(path, allow_truncated=True):
        try:
            rows.append(codec.current(row))
        except ValueError as error:
            raise UserError(f"{where}: not a judged answer ({error})") from None
    return rows


def _adopted(directories: Sequence[Path]) -> dict[Path, Path]:
    """Return training directory -> the only evaluation directory below it."""
    adopted = {}
    for parent in directories:
        if (parent / "evaluation.json").exists():
            continue
        children = [child for child in directories if parent in child.parents]
        if len(children) == 1 and not (children[0] / "metrics.jsonl").exists():
            adopted[parent] = children[0]
    return adopted


def _distinct(runs: Sequence[EvaluatedRun]) -> list[EvaluatedRun]:
    """Return the runs under distinct names: those that occur twice get their parent directory in
    front.
    """
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.resolve().parent.name}/{run.name}")
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def _read_json(path: Path) -> dict[str, Any]:
    value = read_json_object(path)
    if not all(isinstance(value.get(part), dict) for part in ("overall", "benchmarks")):
        raise UserError(
            f"{path}: not an evaluation (no 'overall' and 'benchmarks'); write it with dcpo "
            "evaluate"
        )
    return value
