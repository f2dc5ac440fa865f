"""The quickstart: one over-confident policy, four trainings, one picture. ``make quickstart [SEED=k]`` runs it.

``make quickstart-moe`` (``--experts``): the same from a Qwen3-MoE of four experts, without the adapter, which has no factors
for experts.

GRPO, DCPO (the paper's settings), DCPO-proper and DCPO with an adapter start from the same policy and differ in
``objective`` only; the last trains GRPO's policy, bit for bit, and beside it the adapter that states the confidence. Base
and the four results are evaluated on the same held-out problems. Everything is done by the same commands a user types
(they are printed); trainings run two at a time, one core each.

Leaves in --out: reliability.png, report.html, summary.json, and for base and each training a directory with
evaluation.json, samples.jsonl, metrics.jsonl, checkpoints and the trained policy in Hugging Face format. An interrupted
quickstart continues where it was killed.
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
COLUMNS = {
    "accuracy": "acc.",
    "ece": "ECE",
    "pce": "PCE",
    "brier": "Brier",
    "auroc": "AUROC",
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
        heldout = f"heldout={HERE / 'data' / 'heldout.jsonl'}"
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
        options = ("--repeats", "8", "--confidence", "verbal,token,consistency", "--template", "raw", *sampling)
        self._call(run, "evaluate", "--model", str(model), "--benchmarks", heldout, "--out", str(run), *options)

    def report(self) -> None:
        runs = (str(self.out / name) for name in ("base", *self.methods))
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
    summary = summarise(args.out, METHODS)
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
        for name in ("base", *METHODS):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / "summary.json").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(str(seed))


def run_one(quickstart: Quickstart, name: str) -> None:
    if name != "base":
        quickstart.train(name)
    quickstart.evaluate(name)


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


def summarise(out: Path, methods: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The held-out numbers of stated (verbal) confidence, read from each evaluation.json."""
    summary = {}
    for name in ("base", *methods):
        result = json.loads((out / name / "evaluation.json").read_text())["benchmarks"]["heldout"]
        verbal = result["verbal"]
        summary[name] = {
            "accuracy": result["accuracy"],
            **{key: verbal[key] for key in ("ece", "pce", "brier", "auroc")},
            "mean_confidence": verbal["mean"],
            "violation_rate": result["violation_rate"],
            "n": result["n"],
        }
    return summary


def draw(out: Path, summary: dict[str, dict[str, float]]) -> None:
    """``reliability.png``: stated confidence against accuracy, before training and after."""
    from megatron_dcpo.calibration.diagrams import comparison_grid, save
    from megatron_dcpo.evaluation.scoring import bins_from_json

    titles = {"base": "before RL", "grpo": "GRPO", "dcpo": "DCPO", "dcpo_proper": "DCPO, proper score"}
    bins, notes = {}, {}
    for name, title in titles.items():
        if name not in summary:
            continue
        evaluation = json.loads((out / name / "evaluation.json").read_text())
        bins[title] = bins_from_json(evaluation["benchmarks"]["heldout"]["verbal"]["bins"])
        notes[title] = f"accuracy {summary[name]['accuracy']:.2f}\nECE {summary[name]['ece']:.3f}"
    save(comparison_grid(bins, notes, columns=len(bins)), out / "reliability.png")


def show(summary: dict[str, dict[str, float]]) -> None:
    caption = "acc.: accuracy; conf.: mean stated confidence; viol.: share of responses without a valid one"
    table = Table(title="Held-out problems, stated confidence", caption=caption)
    table.add_column("", no_wrap=True)
    for heading in (*COLUMNS.values(), "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in COLUMNS), str(row["n"]))
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
