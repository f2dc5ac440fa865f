"""Train several methods from one policy, evaluate all on the same problems, draw one picture.

Used by ``examples/quickstart/run.py`` and ``examples/smollm2/run.py``. Everything is done by the
same commands a user types (they are printed); trainings run two at a time, one core each.

Leaves in ``out``: reliability.png, report.html, summary.json, and for every row a directory with
evaluation.json, samples.jsonl, metrics.jsonl, checkpoints and the trained policy in Hugging Face
format. An interrupted comparison continues where it was killed, if it is made of the same:
made_of.json has the options, and digests of the policy, the data and the methods' files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_dcpo.evaluation.model_files import digest_of_files, files_of
from megatron_dcpo.evaluation.scoring import LOOKUP, headline

# GRPO's policy with a confidence fitted on its log-probs, and what the regression reads. The last
# one is the baseline: a stated confidence has to know more than log-prob, length and task.
RECALIBRATED = {"grpo_recalibrated": "response", "grpo_recalibrated_task": "task"}
# the responses that it is fitted on; not below the run, whose report they are no part of
FITTED = "fitted"
INPUTS = "made_of.json"
TITLES = {
    "base": "before RL",
    "grpo": "GRPO",
    "dcpo": "DCPO",
    "dcpo_proper": "DCPO, proper score",
    "rlcr": "RLCR",
    "grpo_recalibrated": "GRPO, recalibrated",
    "grpo_recalibrated_task": "the same, with the task",
}
# of the printed table, which fits into 80 columns; summary.json has all metrics
SHOWN = {
    "accuracy": "acc.",
    "ece": "ECE",
    "brier": "Brier",
    "auroc": "AUROC",
    "auroc_within": "kinds",
    "auroc_within_problem": "prob.",
    "skill": "skill",
    "mean_confidence": "conf.",
}
# in the log of a training: step 16/250 ... 0:04:10 left
_STEP = re.compile(r"step (\d+/\d+) .*?(?:([\d:]+) left)?$", re.MULTILINE)
console = Console(stderr=True)


@dataclass(frozen=True)
class Comparison:
    """What is compared: ``METHOD.yaml`` in ``folder`` for each of ``methods``, from ``policy``, on
    ``heldout`` (JSON lines).

    ``train``: problems of the training, of which the first ``fitted`` give the responses that the
    recalibration of GRPO is fitted on; 0: none. ``sampling``: options of ``dcpo evaluate``.
    ``overrides``: options for every training.
    """

    folder: Path
    out: Path
    policy: Path
    methods: tuple[str, ...]
    seed: int
    heldout: Path
    train: Path
    fitted: int
    sampling: tuple[str, ...]
    overrides: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        if "grpo" not in self.methods or not self.fitted:
            return ("base", *self.methods)
        return ("base", *self.methods, *RECALIBRATED)

    def train_method(self, method: str) -> None:
        run = self.out / method
        if (
            run / "policy"
        ).is_dir():  # finished: written anew it would be another model to the evaluation
            return
        self._call(
            run,
            "train",
            "--config",
            str(self.folder / f"{method}.yaml"),
            f"run_dir={run}",
            f"seed={self.seed}",
            "model.transformer_impl=local",  # also on a GPU, with and without Transformer Engine
            "--resume",
            "auto",
            *self.overrides,
        )

    def evaluate(self, name: str) -> None:
        run = self.out / name
        model = self.policy if name == "base" else run / "policy"
        self._sample(
            model, f"heldout={self.heldout}", run, "--confidence", "verbal,token,consistency"
        )

    def recalibrate(self) -> None:
        """Fit confidences on GRPO's responses to training problems and put each in the place of the
        stated one.
        """
        fitted = self.out / FITTED
        self._sample(
            self.out / "grpo" / "policy", f"train={self.train}", fitted, "--limit", str(self.fitted)
        )
        for name, features in RECALIBRATED.items():
            run = self.out / name
            calibrator = str(run / "calibrator.npz")
            self._call(
                run,
                "calibrate",
                "--features",
                features,
                "--samples",
                str(fitted / "samples.jsonl"),
                "--held-out",
                "0",
                "--out",
                calibrator,
            )
            self._call(
                run,
                "evaluate",
                "--samples",
                str(self.out / "grpo" / "samples.jsonl"),
                "--calibrator",
                calibrator,
                "--confidence",
                "posthoc",
                "--out",
                str(run),
            )

    def _sample(self, model: Path, benchmark: str, out: Path, *options: str) -> None:
        arguments = ("--model", str(model), "--benchmarks", benchmark, "--out", str(out))
        self._call(out, "evaluate", *arguments, "--repeats", "8", *options, *self.sampling)

    def report(self) -> None:
        runs = (str(self.out / name) for name in self.rows)
        self._call(self.out / "base", "report", *runs, "--out", str(self.out / "report.html"))

    def _call(self, run: Path, *arguments: str) -> None:
        """``python -m megatron_dcpo ...`` in a process of its own, its output in
        ``run/log.txt``.
        """
        run.mkdir(parents=True, exist_ok=True)
        console.print(
            f"[dim]dcpo {' '.join(_short(a) for a in arguments)}[/dim]",
            soft_wrap=True,
            highlight=False,
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (run / "log.txt").open("a") as log:
            process = subprocess.run(
                [sys.executable, "-m", "megatron_dcpo", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        if process.returncode:
            tail = "\n".join((run / "log.txt").read_text().splitlines()[-5:])
            raise SystemExit(
                f"dcpo {arguments[0]} failed for {run.name} (status {process.returncode}):\n{tail}"
            )


def compare(comparison: Comparison, workers: int) -> None:
    """Run everything that is missing, ``workers`` processes at a time, and show it."""
    out, started = comparison.out, time.monotonic()
    start_over_unless_interrupted(comparison)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(run_one, comparison, name) for name in (*comparison.methods, "base")]
        try:
            wait(jobs, out, comparison.methods)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # the trainings save what they have
            raise SystemExit(
                "interrupted; the same command continues where this one stopped"
            ) from None
    summary = summarize(comparison)
    comparison.report()
    draw(out, summary)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary, f"Held-out problems, {summary['base']['n']} responses")
    console.print(
        f"\n{time.monotonic() - started:.0f} s.  The picture: "
        f"[bold]{out / 'reliability.png'}[/bold]"
    )
    console.print(f"The whole page: {out / 'report.html'}")


def start_over_unless_interrupted(comparison: Comparison) -> None:
    """Keep what an interrupted comparison of the same seed has; remove what a finished one, or one
    of another seed, left. End if the interrupted one was made of something else.
    """
    out, seed = comparison.out, comparison.seed
    marker = out / "seed.txt"
    if marker.is_file():
        if marker.read_text() != str(seed) or (out / "summary.json").is_file():
            for name in (*comparison.rows, FITTED):
                shutil.rmtree(out / name, ignore_errors=True)
            (out / "summary.json").unlink(missing_ok=True)
            (out / INPUTS).unlink(missing_ok=True)
        else:
            check_inputs(comparison)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(str(seed))
    (out / INPUTS).write_text(
        json.dumps(known_inputs(out) | inputs_of(comparison), indent=1) + "\n"
    )


def inputs_of(comparison: Comparison) -> dict[str, str]:
    """Return what the results are made of besides the seed, by name."""
    inputs = {
        "options": " ".join(comparison.overrides),
        "sampling": " ".join(comparison.sampling),
        "fitted": str(comparison.fitted),
    }
    for name in ("policy", "heldout", "train"):
        path = getattr(comparison, name)
        inputs[name] = f"{path} {digest(path)}"
    for method in comparison.methods:
        inputs[f"{method}.yaml"] = digest(comparison.folder / f"{method}.yaml")
    return inputs


def known_inputs(out: Path) -> dict[str, str]:
    """Return what the results in ``out`` were made of, nothing if it is not known."""
    path = out / INPUTS
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def check_inputs(comparison: Comparison) -> None:
    """End if results that are there were made of something else."""
    out = comparison.out
    if not any((out / name).exists() for name in comparison.rows):
        return
    before = known_inputs(out)
    for name, now in inputs_of(comparison).items():
        method = name.removesuffix(".yaml")
        if method in comparison.methods and not (out / method).exists():
            continue  # another method than those of before
        if before.get(name) != now:
            raise SystemExit(
                f"{out} was begun with {name} {before.get(name, '(not known)')}, now it is {now}; "
                "give another --out, or remove it"
            )


def digest(path: Path) -> str:
    """Return a digest of a file, or of the sizes and times of a model's files."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digest_of_files(files_of(str(path)))


def run_one(comparison: Comparison, name: str) -> None:
    if name != "base":
        comparison.train_method(name)
    comparison.evaluate(name)
    if name == "grpo" and comparison.fitted:
        comparison.recalibrate()


def wait(jobs: list[Future[None]], out: Path, methods: tuple[str, ...]) -> None:
    """Show how far the trainings are until all jobs are done. The first failure ends everything."""
    shown, said = "", time.monotonic()
    while not all(job.done() for job in jobs):
        time.sleep(1)
        for job in jobs:
            if job.done() and job.exception() is not None:
                for other in jobs:
                    other.cancel()
                raise job.exception()
        line = "   ".join(f"{method} {_progress(out / method)}" for method in methods)
        if line != shown and (console.is_terminal or time.monotonic() - said > 30):
            end = "\r" if console.is_terminal else "\n"
            console.print(line, end=end, highlight=False, soft_wrap=not console.is_terminal)
            shown, said = line, time.monotonic()
    for job in jobs:
        job.result()


def summarize(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Return the held-out numbers of every row, read from its evaluation.json: of the stated
    (verbal) confidence, or of the one that stands in its place. Behind each policy's row is that of
    its fitted lookup, ``lookup`` for GRPO's and ``METHOD_lookup`` for the others'.
    """
    summary = {}
    for name in comparison.rows:
        evaluation = json.loads((comparison.out / name / "evaluation.json").read_text())
        kind = "posthoc" if name in RECALIBRATED else "verbal"
        summary[name] = headline(evaluation, kind, "heldout")
        if kind == "verbal":
            lookup = "lookup" if name == "grpo" else f"{name}_lookup"
            summary[lookup] = headline(evaluation, LOOKUP, "heldout")
    return summary


def draw(out: Path, summary: dict[str, dict[str, float]]) -> None:
    """``reliability.png``: stated confidence against accuracy, before training and after."""
    from megatron_dcpo.calibration.diagrams import comparison_grid, save
    from megatron_dcpo.evaluation.scoring import bins_from_json

    bins, notes = {}, {}
    for name, title in TITLES.items():
        if name not in summary or name == "grpo_recalibrated_task":
            continue  # the picture has room for five, and this one looks like its neighbor
        evaluation = json.loads((out / name / "evaluation.json").read_text())
        kind = "posthoc" if name in RECALIBRATED else "verbal"
        bins[title] = bins_from_json(evaluation["benchmarks"]["heldout"][kind]["bins"])
        notes[title] = f"accuracy {summary[name]['accuracy']:.2f}\nECE {summary[name]['ece']:.3f}"
    save(comparison_grid(bins, notes, columns=len(bins)), out / "reliability.png")


def means(folders: Sequence[Path], to: Path) -> None:
    """Show the means of several comparisons, and leave them and their summaries in ``to``."""
    summaries = {
        folder.name: json.loads((folder / "summary.json").read_text()) for folder in folders
    }
    first = next(iter(summaries.values()))
    mean: dict[str, dict[str, float]] = {}
    for row, values in first.items():
        mean[row] = {}
        for column in values:
            of_all = [summary[row][column] for summary in summaries.values()]
            mean[row][column] = None if None in of_all else sum(of_all) / len(of_all)
    to.write_text(json.dumps({"mean": mean, **summaries}, indent=1) + "\n")
    n = first["base"]["n"]
    show(mean, f"Held-out problems, {n} responses, means of {len(folders)} seeds")
    console.print(f"As data: {to}")


def show(summary: dict[str, dict[str, float]], title: str) -> None:
    caption = (
        "acc.: accuracy; kinds, prob.: AUROC among problems of one type, and among answers to one "
        "problem; skill: 1 - Brier / Brier of the lookup; conf.: mean confidence. "
        "lookup: GRPO's share of right answers by type of problem, cross-fitted on these answers "
        "(five folds of problems); METHOD_lookup: the same of the other policies"
    )
    if RECALIBRATED.keys() & summary.keys():
        caption += (
            ". grpo_recalibrated: logistic regression on GRPO's log-probs, length and stated "
            "confidence; with _task: on log-prob, length and task, the baseline of a stated "
            "confidence"
        )
    table = Table(
        title=title,
        caption=caption,
        box=None,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in SHOWN.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary.items():
        cells = ["–" if row[column] is None else f"{row[column]:.3f}" for column in SHOWN]
        table.add_row(name, *cells)
    Console().print(table)


def _progress(run: Path) -> str:
    """Return how far a training is, and how long it will take, by the last line of its log."""
    if (run / "evaluation.json").is_file():
        return "done"
    if (run / "policy").is_dir():
        return "is evaluated"
    log = run / "log.txt"
    found = _STEP.findall(log.read_text()) if log.is_file() else []
    if not found:
        return "-"
    steps, left = found[-1]
    return f"step {steps}" + (f", {left} left" if left else "")


def _short(argument: str) -> str:
    """Paths relative to here, so that the printed command can be typed."""
    cwd = str(Path.cwd()) + os.sep
    return argument.replace(cwd, "")
