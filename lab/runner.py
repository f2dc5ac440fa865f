"""Running the grid: every cell by the commands a user types, cached, several at a time.

A finished cell has a ``cell.json``; a killed one continues from its last checkpoint. A cell whose recipe has changed since
is run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.grid import METHODS, Cell, Method
from megatron_dcpo.errors import UserError

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples" / "lab"
SAMPLING = ("--template", "raw", "--temperature", "1", "--top-p", "1", "--top-k", "0")  # as it was trained


@dataclass(frozen=True)
class Scale:
    """How much of everything: ``full`` is the published lab, ``smoke`` shows in minutes that all of it runs."""

    steps: int = 500
    heldout: int = 1200
    repeats: int = 4
    classifier_problems: int = 250
    classifier_repeats: int = 20
    classifier_epochs: int = 20
    overrides: tuple[str, ...] = ()


FULL = Scale()
SMOKE = Scale(
    steps=3,
    heldout=16,
    repeats=2,
    classifier_problems=24,
    classifier_repeats=4,
    classifier_epochs=1,
    overrides=("data.prompts_per_step=8", "training.micro_batch_size=64"),
)


@dataclass(frozen=True)
class Lab:
    """A directory of cells, and how they are run."""

    out: Path
    scale: Scale = FULL
    jobs: int = 2
    recipe: Path = EXAMPLES / "recipe.yaml"
    data: Path = EXAMPLES / "data"
    max_tokens: int = 32

    def directory(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.name

    def finished(self, cell: Cell) -> bool:
        path = self.directory(cell) / "cell.json"
        return path.is_file() and json.loads(path.read_text())["recipe"] == self.fingerprint(cell)

    def fingerprint(self, cell: Cell) -> str:
        """What a cell's numbers depend on besides the code."""
        if not has_policy(cell.family):
            build = f"sh examples/lab/make_policies.sh {cell.family}"
            raise UserError(f"{EXAMPLES / cell.family} holds no policy; build it with: {build}")
        policy = EXAMPLES / cell.family / "policy" / "model.safetensors"
        recipe = self.recipe.read_text() + (REPOSITORY / "examples/quickstart/dcpo.yaml").read_text()
        digest = hashlib.blake2b(policy.read_bytes(), digest_size=8)
        digest.update(repr((METHODS[cell.method], self.scale, recipe)).encode())
        return digest.hexdigest()

    # ------------------------------------------------------------------------------------------ commands
    def train_command(self, cell: Cell) -> list[str]:
        """``dcpo train`` of a cell: the recipe, what the method changes, where it starts."""
        method = METHODS[cell.method]
        start = self.directory(cell.needs) / "policy" if cell.needs else EXAMPLES / cell.family / "policy"
        return [
            *("train", "--config", str(self.recipe), "--resume", "auto"),
            f"run_dir={self.directory(cell)}",
            f"seed={cell.seed}",
            f"model.path={start}",
            f"data.path={self.data / 'train.jsonl'}",
            "model.transformer_impl=local",  # also on a GPU, with and without Transformer Engine
            f"training.steps={max(1, round(self.scale.steps * method.share_of_steps))}",
            *method.overrides,
            *self.scale.overrides,
        ]

    def evaluate_command(self, cell: Cell) -> list[str]:
        """``dcpo evaluate`` of a cell's policy on the held-out problems, with the cell's seed."""
        run, kinds = self.directory(cell), "verbal,token,consistency"
        return self._sample_command(cell, "heldout", run, self.scale.heldout, self.scale.repeats, kinds, cell.seed)

    def confclass_commands(self, cell: Cell) -> list[list[str]]:
        """Sample the start on training problems, fit the classifier, apply it to the start's held-out responses."""
        run, scale = self.directory(cell), self.scale
        problems, repeats, predictor = scale.classifier_problems, scale.classifier_repeats, str(run / "confclass.npz")
        sample = self._sample_command(cell, "train", run / "fit", problems, repeats, "token", 1000 + cell.seed)
        fit = ["calibrate", "--samples", str(run / "fit" / "samples.jsonl"), "--out", predictor]
        fit += ["--seed", str(cell.seed), "--epochs", str(scale.classifier_epochs)]
        return [[*sample, "--features"], fit, [*self.evaluate_command(cell), "--posthoc", predictor]]

    def _sample_command(
        self, cell: Cell, part: str, out: Path, problems: int, repeats: int, kinds: str, seed: int
    ) -> list[str]:
        trained = self.directory(cell) if METHODS[cell.method].kind == "train" else None
        if trained is None and cell.needs:
            trained = self.directory(cell.needs)
        model = trained / "policy" if trained else EXAMPLES / cell.family / "policy"
        benchmarks = ",".join(f"{name}={self.data / name}.jsonl" for name in part.split(","))
        return [
            *("evaluate", "--model", str(model), "--benchmarks", benchmarks),
            *("--out", str(out), "--limit", str(problems), "--repeats", str(repeats), "--confidence", kinds),
            *("--max-tokens", str(self.max_tokens), "--batch-size", "1200", "--seed", str(seed), "--resamples", "0"),
            *("--engine", "transformers"),
            *SAMPLING,
        ]

    # ------------------------------------------------------------------------------------------ running
    def run(self, cells: Sequence[Cell]) -> None:
        """Run what is not finished, ``jobs`` at a time, in order. A cell that fails stops only those that start from it.

        Raises :class:`UserError` at the end if any failed.
        """
        missing = [cell for cell in cells if not self.finished(cell)]
        logger.info("%d of %d cells to run", len(missing), len(cells))
        ready = {cell: threading.Event() for cell in cells}
        for cell in set(cells) - set(missing):
            ready[cell].set()
        failed: dict[Cell, str] = {}

        def one(number: int, cell: Cell) -> None:
            try:
                if cell.needs:
                    ready[cell.needs].wait()
                    if cell.needs in failed:
                        raise UserError(f"it starts from {cell.needs.name}, which failed")
                record = self.run_cell(cell)
                shown = summary_line(record) if "scores" in record else f"{cell.name}, {record['seconds']:.0f} s"
                logger.info("[%d/%d] %s", number, len(missing), shown)
            except UserError as error:
                failed[cell] = str(error)
                logger.error("[%d/%d] %s: %s", number, len(missing), cell.name, error)
            finally:
                ready[cell].set()

        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(one, number, cell) for number, cell in enumerate(missing, start=1)]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # interrupted: start nothing more
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            raise UserError(f"{len(failed)} cells failed, the first {next(iter(failed)).name}; their log.txt says why")

    def run_cell(self, cell: Cell) -> dict[str, Any]:
        """Train and evaluate one cell; writes and returns its ``cell.json``."""
        run, method, began = self.directory(cell), METHODS[cell.method], time.monotonic()
        self._discard_other_recipe(cell)
        commands = self._commands(cell, method)
        for command in commands:
            self._call(run, command)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        evaluation = json.loads((run / "evaluation.json").read_text())["benchmarks"]["heldout"]
        kinds = ["verbal", "token", *(["posthoc"] if method.kind == "confclass" else [])]
        record = {
            "family": cell.family,
            "method": cell.method,
            "seed": cell.seed,
            "recipe": self.fingerprint(cell),
            "commit": commit(),
            "commands": [f"dcpo {' '.join(relative(part, self.out) for part in command)}" for command in commands],
            "seconds": round(time.monotonic() - began, 1),
            **{key: evaluation[key] for key in ("accuracy", "n", "mean_length", "violation_rate", "violations")},
            "scores": {
                kind: {key: evaluation[kind][key] for key in ("ece", "pce", "brier", "auroc", "mean", "bins")}
                for kind in kinds
            },
        }
        (run / "cell.json").write_text(json.dumps(record, indent=1) + "\n")
        return record

    def _commands(self, cell: Cell, method: Method) -> list[list[str]]:
        if method.kind == "confclass":
            return self.confclass_commands(cell)
        return ([self.train_command(cell)] if method.kind == "train" else []) + [self.evaluate_command(cell)]

    def _discard_other_recipe(self, cell: Cell) -> None:
        """Remove what another recipe left, keep what an interrupted run of this one has."""
        run = self.directory(cell)
        marker = run / "recipe.txt"
        if run.exists() and not (marker.is_file() and marker.read_text() == self.fingerprint(cell)):
            shutil.rmtree(run)
        run.mkdir(parents=True, exist_ok=True)
        marker.write_text(self.fingerprint(cell))

    def _call(self, run: Path, command: Sequence[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (run / "log.txt").open("a") as log:
            status = subprocess.run(
                [sys.executable, "-m", "megatron_dcpo", *command], stdout=log, stderr=subprocess.STDOUT, env=environment
            ).returncode
        if status:
            tail = " | ".join((run / "log.txt").read_text().splitlines()[-3:])
            raise UserError(f"dcpo {command[0]} failed (status {status}) in {run}: {tail}")


def has_policy(family: str) -> bool:
    """Whether the starting policy of a family has been built."""
    return (EXAMPLES / family / "policy" / "model.safetensors").is_file()


def summary_line(record: dict[str, Any]) -> str:
    """A finished cell in a line."""
    shown = record["scores"][METHODS[record["method"]].confidence]
    auroc = float("nan") if shown["auroc"] is None else shown["auroc"]
    return (
        f"{record['family']}/{record['method']}/seed{record['seed']}: accuracy {record['accuracy']:.3f} "
        f"ECE {shown['ece']:.3f} AUROC {auroc:.3f}, {record['seconds']:.0f} s"
    )


def commit() -> str:
    """The commit of the code, with ``+`` where files differ from it; "" outside a git checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


def relative(argument: str, out: Path) -> str:
    """An argument with paths as one would type them in the repository, the lab's directory as ``OUT``."""
    return argument.replace(str(out), "OUT").replace(str(REPOSITORY) + os.sep, "")
