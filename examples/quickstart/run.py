"""The quickstart: one over-confident policy, three trainings, one picture. ``make quickstart [SEED=k]`` runs it.

``make quickstart-moe`` (``--experts``): the same from a Qwen3-MoE of four experts.

GRPO, DCPO (the paper's settings) and DCPO-proper start from the same policy and differ in ``objective`` only. Base and the
three results are evaluated on the same held-out problems. Two rows need no training: GRPO, recalibrated, is GRPO's policy
whose confidence is a logistic regression on its log-probs, fitted on responses to training problems; the lookup says of
every problem how often GRPO is right on others of its kind. Everything is done by the same commands a user types (they are
printed); trainings run two at a time, one core each.

Leaves in --out: reliability.png, report.html, summary.json, and for every row a directory with evaluation.json,
samples.jsonl, metrics.jsonl, checkpoints and the trained policy in Hugging Face format. An interrupted quickstart continues
where it was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
METHODS = ("grpo", "dcpo", "dcpo_proper")
RECALIBRATED = "grpo_recalibrated"
TRAINING_PROBLEMS = 500  # whose responses the recalibration is fitted on, 8 each
COLUMNS = {
    "accuracy": "acc.",
    "ece": "ECE",
    "pce": "PCE",
    "brier": "Brier",
    "auroc": "AUROC",
    "skill": "skill",
    "mean_confidence": "conf.",
    "violation_rate": "viol.",
}
console = Console(stderr=True)


@dataclass(frozen=True)
class Quickstart:
    """Where and how: the output directory, the policy to start from, the methods, the seed of training, and overrides for
    every training."""

    out: Path
    policy: Path
    methods: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...]

    def train(self, method: str) -> None:
        run = self.out / method
        config = HERE / f"{method}.yaml"
        self._call(
            run,
            "train",
            "--config",
            str(config),
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
        self._sample(model, "heldout", run, "--confidence", "verbal,token,consistency")

    def recalibrate(self) -> None:
        """Fit a confidence on GRPO's responses to training problems and put it in the place of the stated one."""
        run, fitted = self.out / RECALIBRATED, self.out / RECALIBRATED / "fitted"
        self._sample(self.out / "grpo" / "policy", "train", fitted, "--limit", str(TRAINING_PROBLEMS))
        calibrator = str(run / "calibrator.npz")
        samples = ("--samples", str(fitted / "samples.jsonl"), "--held-out", "0")
        self._call(run, "calibrate", "--kind", "logistic", *samples, "--out", calibrator)
        samples = ("--samples", str(self.out / "grpo" / "samples.jsonl"), "--calibrator", calibrator)
        self._call(run, "evaluate", *samples, "--confidence", "posthoc", "--out", str(run))

    def _sample(self, model: Path, problems: str, out: Path, *options: str) -> None:
        # The policy is sampled as it was trained: temperature 1, nothing cut off.
        sampling = (
            "--temperature",
            "1.0",
            "--top-p",
            "1.0",
            "--top-k",
            "0",
            "--max-tokens",
            "32",
            "--batch-size",
            "512",
            "--engine",
            "transformers",
        )
        benchmark = f"{problems}={HERE / 'data' / problems}.jsonl"
        options = ("--repeats", "8", "--template", "raw", *options, *sampling)
        self._call(out, "evaluate", "--model", str(model), "--benchmarks", benchmark, "--out", str(out), *options)

    def report(self) -> None:
        runs = (str(self.out / name) for name in ("base", *self.methods, RECALIBRATED))
        self._call(self.out / "base", "report", *runs, "--out", str(self.out / "report.html"))

    def _call(self, run: Path, *arguments: str) -> None:
        """``python -m megatron_dcpo ...`` in a process of its own, its output in ``run/log.txt``."""
        run.mkdir(parents=True, exist_ok=True)
        console.print(f"[dim]dcpo {' '.join(_short(a) for a in arguments)}[/dim]", soft_wrap=True, highlight=False)
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
            raise SystemExit(f"dcpo {arguments[0]} failed for {run.name} (status {process.returncode}):\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the trainings")
    parser.add_argument("--experts", action="store_true", help="start from a mixture of experts")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options for all trainings")
    args = parser.parse_args()
    policy = HERE / "moe" / "policy" if args.experts else HERE / "policy"
    start_over_unless_interrupted(args.out, args.seed)
    start = (f"model.path={policy}",) if args.experts else ()
    quickstart = Quickstart(args.out, policy, METHODS, args.seed, (*start, *args.overrides))

    started = time.monotonic()
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = [pool.submit(run_one, quickstart, name) for name in ("base", *METHODS)]
        wait(jobs, args.out, METHODS)
    summary = summarize(args.out, METHODS)
    quickstart.report()
    draw(args.out, summary)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary)
    console.print(f"\n{time.monotonic() - started:.0f} s.  The picture: [bold]{args.out / 'reliability.png'}[/bold]")
    console.print(f"The whole page: {args.out / 'report.html'}")


def start_over_unless_interrupted(out: Path, seed: int) -> None:
    """Keep what an interrupted quickstart of the same seed has; remove what a finished or different one left."""
    marker = out / "seed.txt"
    if marker.is_file() and (marker.read_text() != str(seed) or (out / "summary.json").is_file()):
        for name in ("base", *METHODS, RECALIBRATED):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / "summary.json").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(str(seed))


def run_one(quickstart: Quickstart, name: str) -> None:
    if name != "base":
        quickstart.train(name)
    quickstart.evaluate(name)
    if name == "grpo":
        quickstart.recalibrate()


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
        line = "   ".join(f"{m} {_steps(out / m)}" for m in methods)
        if line != shown and (console.is_terminal or time.monotonic() - said > 30):
            console.print(line, end="\r" if console.is_terminal else "\n", highlight=False)
            shown, said = line, time.monotonic()
    for job in jobs:
        job.result()


def summarize(out: Path, methods: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the held-out numbers of every row, read from its evaluation.json: of the stated (verbal) confidence, or of the
    one that stands in its place."""
    summary = {}
    for name, kind in {
        **dict.fromkeys(("base", *methods), "verbal"),
        RECALIBRATED: "posthoc",
        "lookup": "lookup",
    }.items():
        source = "grpo" if name == "lookup" else name
        result = json.loads((out / source / "evaluation.json").read_text())["benchmarks"]["heldout"]
        scores = result[kind]
        summary[name] = {
            "accuracy": result["accuracy"],
            **{key: scores[key] for key in ("ece", "pce", "brier", "auroc")},
            "skill": scores.get("skill", 0.0),  # of the lookup by definition 0
            "mean_confidence": scores["mean_confidence"],
            "violation_rate": result["violation_rate"] if kind == "verbal" else 0.0,
            "n": result["n"],
        }
    return summary


def draw(out: Path, summary: dict[str, dict[str, float]]) -> None:
    """``reliability.png``: stated confidence against accuracy, before training and after."""
    from megatron_dcpo.calibration.diagrams import comparison_grid, save
    from megatron_dcpo.evaluation.scoring import bins_from_json

    titles = {"base": "before RL", "grpo": "GRPO", "dcpo": "DCPO", "dcpo_proper": "DCPO, proper score"}
    titles[RECALIBRATED] = "GRPO, recalibrated"
    bins, notes = {}, {}
    for name, title in titles.items():
        if name not in summary:
            continue
        evaluation = json.loads((out / name / "evaluation.json").read_text())
        kind = "posthoc" if name == RECALIBRATED else "verbal"
        bins[title] = bins_from_json(evaluation["benchmarks"]["heldout"][kind]["bins"])
        notes[title] = f"accuracy {summary[name]['accuracy']:.2f}\nECE {summary[name]['ece']:.3f}"
    save(comparison_grid(bins, notes, columns=len(bins)), out / "reliability.png")


def show(summary: dict[str, dict[str, float]]) -> None:
    caption = (
        "acc.: accuracy; skill: 1 - Brier / Brier of the lookup; conf.: mean confidence; viol.: share without a valid one. "
        "lookup: GRPO's accuracy on other problems of the same kind, what a calibrated confidence has to beat"
    )
    table = Table(
        title=f"Held-out problems, {summary['base']['n']} responses", caption=caption, box=None, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in COLUMNS))
    Console().print(table)


def _steps(run: Path) -> str:
    path = run / "metrics.jsonl"
    return f"step {len(path.read_text().splitlines())}" if path.is_file() else "-"


def _short(argument: str) -> str:
    """Paths relative to here, so that the printed command can be typed."""
    cwd = str(Path.cwd()) + os.sep
    return argument.replace(cwd, "")


if __name__ == "__main__":
    main()
