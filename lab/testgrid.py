"""The cells of the test: every method on several pretrainings of a policy, sampled on problems that
chose no setting.

What a method changes stands in ``METHODS`` as overrides of one recipe. A cell is trained by the
commands a user types and leaves the judged responses of its draws; ``pack`` puts them into one
archive, from which `testtables.py` computes everything. A finished cell has a ``cell.json`` and is
kept, also if the recipe changes later; an interrupted one continues.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.results import read_archive, write_archive
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.runtime.files import write_atomically

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples" / "lab"

PROPER = ("objective.preset=dcpo_proper", "objective.entropy_coef_confidence=0.02")
BRIER_LAM0 = ("objective.calibration_loss=brier", "objective.lam=0")
INFORMATIVE = ("rollout.filter_groups=reasoning", "rollout.max_refills=3")
# draws until nearly every step has its 32 informative groups
REFILLED = ("rollout.filter_groups=reasoning", "rollout.max_refills=6", "rollout.oversample=3")
DISTILLED = "objective.distill_coef_reasoning=1"
UNREWARDED = (f"objective.name={EXAMPLES / 'confidence_unrewarded.py'}:METHOD", *PROPER)
COUPLED, MEAN = "objective.name=coupled", "objective.advantage_normalization=mean"


@dataclass(frozen=True)
class Method:
    """Describe a row of the tables; ``confidence`` is the kind it is scored on. ``trained``: False
    for the base policy.
    """

    title: str
    overrides: tuple[str, ...] = ()
    confidence: str = "confidence"
    trained: bool = True


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "base": Method("base", trained=False),
        "grpo": Method("GRPO", ("objective.name=grpo",)),
        "dcpo": Method("DCPO"),
        "dcpo_proper": Method("DCPO-proper", PROPER),
        "dcpo_reasoning": Method(
            "DCPO, confidence not trained", ("objective.weight_confidence=0",)
        ),
        "rlcr_authors": Method(
            "RLCR, authors' settings", ("objective.name=rlcr", "objective.variant=original")
        ),
        "ccgspg_unclipped": Method(
            "CCGSPG, gradients not clipped",
            ("objective.name=ccgspg", "optimizer.clip_grad=0"),
            "token",
        ),
        # from coupled to decoupled with everything else equal: L1 or Brier, divided by the group's
        # std or not
        "coupled": Method("coupled", (COUPLED,)),
        "coupled_mean": Method("coupled, mean only", (COUPLED, MEAN)),
        "dcpo_mean": Method("DCPO, mean only", (MEAN,)),
        "coupled_brier": Method("coupled, Brier, lambda 0", (COUPLED, *BRIER_LAM0)),
        "dcpo_brier": Method("DCPO, Brier, lambda 0", BRIER_LAM0),
        "coupled_brier_mean": Method(
            "coupled, Brier, lambda 0, mean only", (COUPLED, *BRIER_LAM0, MEAN)
        ),
        "dcpo_brier_mean": Method("DCPO, Brier, lambda 0, mean only", (*BRIER_LAM0, MEAN)),
        # at equal informative groups (lab/price.py)
        "grpo_informative": Method(
            "GRPO, informative groups", ("objective.name=grpo", *INFORMATIVE)
        ),
        "dcpo_proper_informative": Method(
            "DCPO-proper, informative groups", (*PROPER, *INFORMATIVE)
        ),
        "rlcr_informative": Method(
            "RLCR, authors' settings, informative groups",
            ("objective.name=rlcr", "objective.variant=original", *INFORMATIVE),
        ),
        # with a teacher (lab/distilled.py)
        "distilled": Method("reasoning distilled", (*PROPER, DISTILLED)),
        "distilled_both": Method(
            "both distilled", (*UNREWARDED, DISTILLED, "objective.distill_coef_confidence=1")
        ),
        "distilled_alone": Method(
            "confidence left alone", (*PROPER, DISTILLED, "objective.weight_confidence=0")
        ),
        "imitation": Method("imitation"),
        # equalised (lab/price.py)
        "grpo_refilled": Method("GRPO, groups equalised", ("objective.name=grpo", *REFILLED)),
        "dcpo_proper_refilled": Method("DCPO-proper, groups equalised", (*PROPER, *REFILLED)),
    }
)
METHODS_OF_THE_TEST = ("grpo", "dcpo", "dcpo_proper", "rlcr_authors")


@dataclass(frozen=True)
class Cell:
    """Name one method on one starting policy ("large.2": its second pretraining) with one seed."""

    policy: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.method}/seed{self.seed}"


def cells(policies: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return all cells: the first method on every policy, then the next one. Raises
    :class:`UserError`.
    """
    for name in methods:
        if name not in METHODS:
            raise UserError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    return [
        Cell(policy, method, seed) for seed in seeds for method in methods for policy in policies
    ]


@dataclass(frozen=True)
class Draw:
    """Describe which problems are sampled: the first ones of ``file``, with ``repeats`` responses
    each.
    """

    file: str
    repeats: int
    sampling: tuple[str, ...] = (
        "--temperature",
        "1",
        "--top-p",
        "1",
        "--top-k",
        "0",
    )  # as it was trained


# choosing: the validation problems, for every choice of a setting and for what is fitted. FINAL:
# problems no choice saw
DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        "test": Draw("test", 8),
        "choosing": Draw("heldout", 4),
        "decoding": Draw("test", 4, ("--temperature", "0.7", "--top-p", "0.8", "--top-k", "20")),
    }
)
FINAL = MappingProxyType(
    {name: replace(d, file=d.file.replace("test", "final")) for name, d in DRAWS.items()}
)


@dataclass(frozen=True)
class Lab:
    """Train and sample cells below ``out``, ``jobs`` at a time; GRPO, or ``all_methods``, in every
    draw.
    """

    out: Path
    jobs: int = 2
    steps: int = 500
    problems: int = 1200
    overrides: tuple[str, ...] = ()
    recipe: Path = EXAMPLES / "recipe.yaml"
    data: Path = EXAMPLES / "data"
    max_tokens: int = 32
    draws: Mapping[str, Draw] = field(default_factory=lambda: DRAWS)
    all_methods: bool = False

    def directory(self, cell: Cell) -> Path:
        """Return where a cell's run and responses are."""
        return self.out / "cells" / cell.name

    def policy(self, cell: Cell) -> Path:
        """Return the starting policy of a cell. Raises :class:`UserError` where it has not been
        built.
        """
        policy = EXAMPLES / cell.policy / "policy"
        if not (policy / "model.safetensors").is_file():
            raise UserError(
                f"{policy} is missing; build it with: sh examples/lab/make_policies.sh "
                f"{cell.policy}"
            )
        return policy

    def train_command(self, cell: Cell) -> list[str]:
        """Return ``dcpo train`` of a cell: the recipe, where it starts, what the method changes."""
        return [
            *("train", "--config", str(self.recipe), "--resume", "auto"),
            *(
                f"run_dir={self.directory(cell)}",
                f"seed={cell.seed}",
                f"training.steps={self.steps}",
            ),
            *(f"model.path={self.policy(cell)}", f"data.path={self.data / 'train.jsonl'}"),
            "model.transformer_impl=local",  # also on a GPU, with and without Transformer Engine
            *METHODS[cell.method].overrides,
            *self.overrides,
        ]

    def sample_command(self, cell: Cell, out: Path, draw: Draw) -> list[str]:
        """Return ``dcpo evaluate`` of a cell; every cell of a seed samples with the same seed."""
        model = (
            self.directory(cell) / "policy" if METHODS[cell.method].trained else self.policy(cell)
        )
        return [
            *("evaluate", "--model", str(model)),
            *("--benchmarks", f"{draw.file}={self.data / draw.file}.jsonl", "--out", str(out)),
            *(
                "--limit",
                str(self.problems),
                "--repeats",
                str(draw.repeats),
                "--confidence",
                "verbal,token",
            ),
            *(
                "--max-tokens",
                str(self.max_tokens),
                "--batch-size",
                "1200",
                "--seed",
                str(cell.seed),
            ),
            *("--resamples", "0", "--engine", "transformers", "--template", "raw", *draw.sampling),
        ]

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells that are not finished, in order. A cell that fails stops no other. Raises
        :class:`UserError`.
        """
        missing = [cell for cell in cells if not (self.directory(cell) / "cell.json").is_file()]
        logger.info("%d of %d cells to run", len(missing), len(cells))

        def one(cell: Cell) -> str:
            try:
                logger.info("%s: %.0f s", cell.name, self.run_cell(cell)["seconds"])
            except UserError as error:
                logger.error("%s: %s", cell.name, error)
                return f"{cell.name}: {error}"
            return ""

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                failed = list(filter(None, pool.map(one, missing)))
            except BaseException:  # interrupted: start nothing more
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            raise UserError(f"{len(failed)} cells failed, the first {failed[0]}")

    def run_cell(self, cell: Cell) -> dict[str, Any]:
        """Train and sample one cell, what is there already left out; write and return its
        ``cell.json``.
        """
        run, began = self.directory(cell), time.monotonic()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        run.mkdir(parents=True, exist_ok=True)
        if METHODS[cell.method].trained and not (run / "policy" / "model.safetensors").is_file():
            self.call(run, self.train_command(cell))
        for name in self.draws if cell.method == "grpo" or self.all_methods else ("test",):
            out = run / "responses" / name
            if not (out / "evaluation.json").is_file():
                self.call(run, self.sample_command(cell, out, self.draws[name]))
        record = asdict(cell) | {
            "commit": commit(),
            "started": started,
            "seconds": round(time.monotonic() - began, 1),
            **totals(run / "metrics.jsonl"),
        }
        write_atomically(run / "cell.json", json.dumps(record, indent=1) + "\n")
        return record

    def call(self, run: Path, command: Sequence[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (run / "log.txt").open("a") as log:
            status = subprocess.run(
                [sys.executable, "-m", "megatron_dcpo", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            ).returncode
        if status:
            tail = " | ".join((run / "log.txt").read_text().splitlines()[-3:])
            raise UserError(f"dcpo {command[0]} failed (status {status}) in {run}: {tail}")


def totals(metrics: Path) -> dict[str, float]:
    """Return the informative groups that a training learned from and the responses it sampled;
    nothing for a policy that was not trained, or not by RL.
    """
    if not metrics.is_file():
        return {}
    *_, (_, last) = read_json_lines(metrics)
    names = ("informative_groups", "responses")
    return {name: last[key] for name in names if (key := f"rollout/{name}_total") in last}


def commit() -> str:
    """Return the commit of the code, with ``+`` where files differ from it; "" outside a git
    checkout.
    """
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


COLUMNS = ("problem", "correct", "confidence", "answer", "logprob", "token", "tokens")
CURVES = (
    "reward/accuracy",
    "calibration/ece",
    "calibration/brier",
    "calibration/auroc",
    "confidence/mean",
    "length/mean",
)
STEPS_PER_POINT = 10  # of a published curve


def pack(grid: Path, archive: Path) -> int:
    """Put every sampled cell of ``grid`` into ``archive``, in the place of what it has of them;
    return how many.
    """
    files = read_archive(archive) if archive.is_file() else {}
    runs = sorted(path.parent for path in grid.glob("cells/*/*/*/cell.json"))
    for run in runs:
        name = "/".join((*run.parts[-3:-1], run.name.removeprefix("seed")))
        files[f"{name}/cell.json"] = (run / "cell.json").read_bytes()
        if (run / "metrics.jsonl").is_file():
            files[f"{name}/curve.csv"] = curve(run / "metrics.jsonl")
        for evaluation in run.glob("responses/*/evaluation.json"):
            part = {"choosing": "heldout"}.get(evaluation.parent.name, evaluation.parent.name)
            files[f"{name}/{part}.csv"] = responses(evaluation.with_name("samples.jsonl"))
    write_archive(archive, files)
    return len(runs)


def responses(samples: Path) -> bytes:
    """Return CSV with ``COLUMNS``: number of the problem in its file, right (0/1), confidence
    (empty: malformed), answer, log-prob of the reasoning in nats, geometric mean of the tokens'
    probabilities, number of tokens.
    """
    writer = csv.writer(table := io.StringIO(), lineterminator="\n")
    writer.writerow(COLUMNS)
    for sample in read_samples(samples):
        writer.writerow(
            (
                int(sample.prompt.prompt_id.rsplit("/", 1)[1]),
                int(sample.correct),
                _short(sample.judgement.confidence),
                sample.judgement.answer,
                _short(sample.measures.reasoning_logprob),
                _short(sample.measures.token_confidence),
                sample.judgement.length,
            )
        )
    return table.getvalue().encode()


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def curve(metrics: Path) -> bytes:
    """Return CSV of ``CURVES``: the mean over every ``STEPS_PER_POINT`` steps."""
    rows = [row for _, row in read_json_lines(metrics)]
    lines = [",".join(("step", *CURVES))]
    for start in range(0, len(rows) - STEPS_PER_POINT + 1, STEPS_PER_POINT):
        block = rows[start : start + STEPS_PER_POINT]
        values = [
            np.mean([np.nan if r.get(key) is None else r[key] for r in block]) for key in CURVES
        ]
        lines.append(",".join((str(block[-1]["step"]), *(f"{value:.4g}" for value in values))))
    return ("\n".join(lines) + "\n").encode()
