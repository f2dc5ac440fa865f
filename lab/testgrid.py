"""The grid of the test: every method on several pretrainings of a policy, sampled on problems that chose no setting.

A cell is trained as in `runner.py` and leaves, for each row of the tables that it gives, the judged responses of ``DRAWS``;
``pack`` puts them into one archive, from which `testtables.py` computes everything.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.grid import METHODS, Cell
from lab.results import problem_of, read_archive, write_archive
from lab.runner import SAMPLING, Lab, commit, relative
from megatron_dcpo.data.datasets import read_json_lines
from megatron_dcpo.runtime.files import write_atomically

logger = logging.getLogger(__name__)

PAPERS_DECODING = ("--template", "raw", "--temperature", "0.7", "--top-p", "0.8", "--top-k", "20")


@dataclass(frozen=True)
class Draw:
    """Responses to the first 1,200 problems of each of ``files``."""

    files: tuple[str, ...]
    repeats: int
    sampling: tuple[str, ...] = SAMPLING


# choosing: validation problems, for every choice of a setting, and labelled training problems, for what is fitted afterwards
DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        "test": Draw(("test", "ood"), 8),
        "choosing": Draw(("heldout", "train"), 4),
        "decoding": Draw(("test",), 4, PAPERS_DECODING),
    }
)
METHODS_OF_THE_TEST = ("adapter_tokens", "adapter", "dcpo_proper", "dcpo", "rlcr_authors", "adapter_text")
# row: options of its evaluation. A cell with an adapter leaves GRPO's policy, bit for bit (tests/system): without the
# adapter it is GRPO's row.
ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {name: {name: (), "grpo": ("--no-adapter",)} for name in ("adapter", "adapter_tokens")}
)
CURVES = (
    "reward/accuracy", "calibration/ece", "calibration/brier", "calibration/auroc", "entropy_reasoning", "length/mean",
)  # fmt: skip
EVERY = 10  # steps of one point of a published curve


def cells(policies: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells: the first method on every policy, then the next one."""
    return [Cell(policy, method, seed) for seed in seeds for method in methods for policy in policies]


@dataclass(frozen=True)
class HeldOutLab(Lab):
    """The cells of the test below ``out``; all ``draws`` of the methods in ``ROWS``, the test's of others."""

    draws: Mapping[str, Draw] = field(default_factory=lambda: DRAWS)

    def run_cell(self, cell: Cell) -> dict[str, Any]:
        """Train and sample one cell, what is there already left out; writes and returns its ``cell.json``."""
        run, began = self.directory(cell), time.monotonic()
        self._discard_other_recipe(cell)
        commands = [self.train_command(cell)] if METHODS[cell.method].kind == "train" else []
        if commands and not (run / "policy" / "model.safetensors").is_file():
            self._call(run, commands[0])
        for name in self.draws if cell.method in ROWS else ("test",):
            for row, options in ROWS.get(cell.method, {cell.method: ()}).items():
                out = run / "responses" / row / name
                commands.append([*self.draw_command(cell, out, self.draws[name]), *options])
                if not (out / "evaluation.json").is_file():
                    self._call(run, commands[-1])
        record = {
            "family": cell.family, "method": cell.method, "seed": cell.seed,
            "recipe": self.fingerprint(cell), "commit": commit(), "seconds": round(time.monotonic() - began, 1),
            "commands": [f"dcpo {' '.join(relative(part, self.out) for part in command)}" for command in commands],
        }  # fmt: skip
        write_atomically(run / "cell.json", json.dumps(record, indent=1) + "\n")
        return record

    def draw_command(self, cell: Cell, out: Path, draw: Draw) -> list[str]:
        """``dcpo evaluate`` of a trained cell; every cell of a seed samples with the same seed."""
        files, problems = ",".join(draw.files), self.scale.heldout
        command = self._sample_command(cell, files, out, problems, draw.repeats, "verbal,token", cell.seed)
        return [*command[: -len(SAMPLING)], *draw.sampling]


# ------------------------------------------------------------------------------------------------ what is published
COLUMNS = ("problem", "correct", "confidence", "answer", "logprob", "token", "tokens")


def pack(grid: Path, archive: Path) -> int:
    """Every trained or sampled cell of ``grid`` into ``archive``: its record, its curve, what has been sampled; how many.

    Cells that the archive has already are replaced, others stay.
    """
    files = read_archive(archive) if archive.is_file() else {}
    runs = {path.parents[1] for path in grid.glob("cells/*/*/*/policy/model.safetensors")}
    runs |= {path.parent for path in grid.glob("cells/*/*/*/responses")}
    for run in sorted(runs):
        family, method, seed = run.parts[-3:]
        name = f"{family}/{{}}/{seed.removeprefix('seed')}"
        if (run / "cell.json").is_file():
            files[f"{name.format(method)}/cell.json"] = (run / "cell.json").read_bytes()
        if (run / "metrics.jsonl").is_file():
            files[f"{name.format(method)}/curve.csv"] = curve(run / "metrics.jsonl")
        for evaluation in run.glob("responses/*/*/evaluation.json"):
            samples = evaluation.with_name("samples.jsonl")
            row, draw = samples.parent.parent.name, samples.parent.name
            for part, rows in responses(samples).items():
                files[f"{name.format(row)}/{draw if draw == 'decoding' else part}.csv"] = rows
    write_archive(archive, files)
    return len(runs)


def responses(samples: Path) -> dict[str, bytes]:
    """``{file of problems: CSV}`` with ``COLUMNS``: number of the problem in its file, right (0/1), confidence (empty:
    malformed), answer, log-prob of the reasoning in nats, geometric mean of the tokens' probabilities, number of tokens."""
    tables: dict[str, io.StringIO] = {}
    for _, s in read_json_lines(samples):
        if s["benchmark"] not in tables:
            tables[s["benchmark"]] = io.StringIO(",".join(COLUMNS) + "\n")
            tables[s["benchmark"]].seek(0, io.SEEK_END)
        said, logprob, token = (
            "" if s.get(key) is None else f"{s[key]:.4g}"
            for key in ("confidence", "reasoning_logprob", "token_confidence")
        )
        line = (problem_of(s), int(s["correct"]), said, s["answer"], logprob, token, s["num_tokens"])
        csv.writer(tables[s["benchmark"]], lineterminator="\n").writerow(line)
    return {name: table.getvalue().encode() for name, table in tables.items()}


def curve(metrics: Path) -> bytes:
    """CSV of ``CURVES``: the mean over every ``EVERY`` steps."""
    rows = [row for _, row in read_json_lines(metrics)]
    lines = [",".join(("step", *CURVES))]
    for start in range(0, len(rows) - EVERY + 1, EVERY):
        block = rows[start : start + EVERY]
        values = [np.mean([np.nan if r.get(key) is None else r[key] for r in block]) for key in CURVES]
        lines.append(",".join((str(block[-1]["step"]), *(f"{value:.4g}" for value in values))))
    return ("\n".join(lines) + "\n").encode()
