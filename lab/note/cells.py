"""The stages of a pretraining: GRPO, frozen answers, a policy that learns to state a number behind
their notes, and the numbers of every arm. What is finished is kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.fitted import logistic_curve
from lab.note.arms import ARMS, CONTROLLED, stacked
from lab.note.reading import (
    Lesson,
    Loss,
    Policy,
    Reader,
    cross_entropy,
    fitted,
    pairs_within_problems,
)
from lab.note.transcripts import (
    ERROR_RATE,
    LEARNED,
    PARTS,
    REPEATS,
    SHIFTED_RATE,
    TO_FIT,
    Transcripts,
    read,
    write_problems,
)
from lab.results import read_archive, write_archive
from lab.testgrid import PROPER, Cell, Draw, Lab, commit
from lab.world2 import GRAPHS
from megatron_dcpo.calibration import brier
from megatron_dcpo.runtime.files import write_atomically

logger = logging.getLogger(__name__)

PRETRAININGS = tuple(f"graphs.{number}" for number in range(1, 6))
TRIED = "graphs.9"  # in no table
STEPS = 2000  # of what is stated
STATED_RATES = (2e-4, 1e-3)  # learning rates to choose from
READER_RATES = (1e-3, 3e-3)
STATED_RATE = 2e-4  # what the try has settled
READER_RATE = 3e-3
DECIMALS = 4
NUMBERS = "numbers.json"  # of every arm, in the directory of a cell
Change = Callable[[Transcripts], Transcripts]


@dataclass(frozen=True)
class Study:
    """Hold the cells below ``out``; ``problems`` to fit and ``steps`` are fewer in a test."""

    out: Path
    steps: int = STEPS
    rl_steps: int = 300
    problems: int = TO_FIT
    learned: int = LEARNED

    @property
    def data(self) -> Path:
        """Return where the problems are."""
        return self.out / "data"

    def lab(self, parts: Sequence[str] = PARTS) -> Lab:
        """Return what trains with GRPO and samples."""
        return Lab(
            self.out.resolve(),
            jobs=1,
            steps=self.rl_steps,
            problems=self.problems,
            recipe=GRAPHS / "recipe.yaml",
            data=self.data.resolve(),
            max_tokens=40,
            draws=MappingProxyType({part: Draw(part, REPEATS[part]) for part in parts}),
        )

    def run(self, pretrainings: Sequence[str]) -> None:
        """Run every stage of pretrainings that is not finished. No score of an arm is computed."""
        write_problems(self.data)
        for name in pretrainings:
            cell = Cell(name, "grpo", 1)
            self.lab().run([cell])
            run = self.lab().directory(cell)
            if (run / NUMBERS).is_file():
                continue
            started = datetime.now(UTC).isoformat(timespec="seconds")
            stated = self.train_stated(run, STATED_RATE)
            rows = {"commit": commit(), "started": started, **self.numbers(run, stated)}
            write_atomically(run / NUMBERS, json.dumps(rows) + "\n")
            logger.info("%s: numbers of %d arms", name, len(rows["arms"]))

    def settle(self) -> dict[str, dict[str, float]]:
        """Return the Brier scores of learning rates on the last graphs to fit of the pretraining
        that is in no table.
        """
        write_problems(self.data)
        cell = Cell(TRIED, "grpo", 1)
        self.lab(("fit",)).run([cell])
        run = self.lab().directory(cell)
        fit, rest = self.fit_and_rest(run)
        correct = rest.records.correct
        found: dict[str, dict[str, float]] = {"stated": {}, "reader": {}}
        for rate in STATED_RATES:
            written = Policy(self.train_stated(run, rate)).written(rest.asking)
            found["stated"][f"{rate:g}"] = brier(_filled(written, fit), correct)
        for rate in READER_RATES:
            reader = fitted(run / "policy", _lesson(fit, cross_entropy), rate)
            found["reader"][f"{rate:g}"] = brier(_sigmoid(reader.logits(rest.asking)), correct)
        write_atomically(run / "settled.json", json.dumps(found, indent=1) + "\n")
        return found

    def transcripts(self, run: Path, part: str, error_rate: float = ERROR_RATE) -> Transcripts:
        """Return the answers of a cell with their notes."""
        samples = run / "responses" / part / "samples.jsonl"
        return read(samples, self.data / f"{part}.jsonl", part, error_rate)

    def fit_and_rest(self, run: Path) -> tuple[Transcripts, Transcripts]:
        """Return the answers to the graphs that gradients learn from, and to the others."""
        fit = self.transcripts(run, "fit")
        learned = fit.records.problem < self.learned
        return fit.chosen(learned), fit.chosen(~learned)

    def train_stated(self, run: Path, learning_rate: float) -> Path:
        """Train what states a number behind the notes; return its policy."""
        out = run / f"stated_{learning_rate:g}"
        policy = out / "policy"
        if not (policy / "model.safetensors").is_file():
            out.mkdir(exist_ok=True)
            fit, _ = self.fit_and_rest(run)
            write_atomically(out / "transcripts.jsonl", _rows(fit))
            self.lab().call(out, self.stated_command(run, out, learning_rate))
        return policy

    def stated_command(self, run: Path, out: Path, learning_rate: float) -> list[str]:
        """Return ``dcpo train`` of what is stated. The prompt is a transcript, and the confidence
        is all that is sampled.
        """
        return [
            *("train", "--config", str(GRAPHS / "recipe.yaml"), "--resume", "auto"),
            *(f"run_dir={out}", f"model.path={run / 'policy'}"),
            *(f"data.path={out / 'transcripts.jsonl'}", "data.max_prompt_length=96"),
            *("data.prompts_per_step=64", "rollout.group_size=4"),
            *("rollout.max_response_length=12", f"judging.verifier={_VERDICT}:verify"),
            *PROPER,
            "objective.weight_reasoning=0",
            *(f"optimizer.lr={learning_rate:g}", f"training.steps={self.steps}"),
            *("training.save_interval=500", "model.transformer_impl=local", "seed=1"),
        ]

    def numbers(self, run: Path, stated: Path) -> dict[str, Any]:
        """Return what every arm says of the answers to the test."""
        fit, rest = self.fit_and_rest(run)
        test = self.transcripts(run, "test")
        frozen = Policy(run / "policy")
        whole = frozen.seen(self.transcripts(run, "fit"))
        seen_rest = frozen.seen(rest)
        of_test = {
            "arms": frozen.seen(test),
            "shifted": frozen.seen(self.transcripts(run, "test", SHIFTED_RATE)),
        }
        found: dict[str, Any] = {
            "problem": test.records.problem.tolist(),
            "kind": test.records.kind.tolist(),
            "correct": test.records.correct.astype(int).tolist(),
            "box": list(test.box),
            "note": list(test.note),
            **{name: {} for name in of_test},
        }
        for name, arm in ARMS.items():
            states = arm(whole)
            for where, of in of_test.items():
                found[where][name] = states(of)
        logger.info("%s: arms without gradients", run)
        rows, places = first_right_and_wrong(test)
        swapped = _Swapped(test.chosen(rows), places)
        found["swaps"] = {"problem": swapped.before.records.problem.tolist()}
        writer = Policy(stated)
        reader = fitted(run / "policy", _lesson(fit, cross_entropy), READER_RATE)
        number_of: Mapping[str, Callable[[Transcripts], np.ndarray]] = {
            "stated": lambda of: _filled(writer.written(of.asking), fit),
            "reader": lambda of: _sigmoid(reader.logits(of.asking)),
        }
        for name, states_of in number_of.items():
            stack = stacked(seen_rest, states_of(rest))
            for where, of in of_test.items():
                found[where][name] = states_of(of.transcripts)
                found[where][f"bar + {name}"] = stack(of, found[where][name])
            found["swaps"][name] = [states_of(swapped.before), states_of(swapped.after)]
        found["arms"]["stated, temperature 1"] = _filled(writer.written(test.asking, seed=1), fit)
        found["unread"] = float(np.isnan(writer.written(test.asking)).mean())
        pairs = fitted(run / "policy", _lesson(fit, pairs_within_problems), READER_RATE)
        curve = _curve(pairs, rest)
        for where, of in of_test.items():
            found[where]["reader, pairs"] = curve(of.transcripts)
        found["controls"] = {
            name: self._controlled(run, frozen, change) for name, change in CHANGES.items()
        }
        return _short(found)

    def _controlled(self, run: Path, frozen: Policy, change: Change) -> dict[str, np.ndarray]:
        """Return what some arms say of the test if the notes are others, in fit and test."""
        whole = frozen.seen(change(self.transcripts(run, "fit")))
        test = frozen.seen(change(self.transcripts(run, "test")))
        found = {name: ARMS[name](whole)(test) for name in CONTROLLED}
        fit, _ = self.fit_and_rest(run)
        reader = fitted(run / "policy", _lesson(change(fit), cross_entropy), READER_RATE)
        return {**found, "reader": _sigmoid(reader.logits(test.transcripts.asking))}

    def pack(self, archive: Path) -> int:
        """Put the numbers of every finished pretraining of the study into ``archive``; return how
        many it has.
        """
        files = read_archive(archive) if archive.is_file() else {}
        for name in PRETRAININGS:
            numbers = self.lab().directory(Cell(name, "grpo", 1)) / NUMBERS
            if numbers.is_file():
                files[f"{name}.json"] = numbers.read_bytes()
        write_archive(archive, files)
        return len(files)


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "another problem's note": Transcripts.with_notes_of_another_problem,
        "no note": Transcripts.without_notes,
    }
)
_VERDICT = Path(__file__).with_name("verdict.py")


class _Swapped:
    """Answers in front of their notes, and with the answers of other ``places``."""

    def __init__(self, before: Transcripts, places: np.ndarray) -> None:
        self.before = before
        self.after = before.with_answers_of(places)


def first_right_and_wrong(transcripts: Transcripts) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the first right answers to the M problems that are mixed and then of
    their first wrong ones, [2 M], and which of these rows has the other answer to the problem.
    """
    records = transcripts.records
    rights, wrongs = [], []
    for problem in np.unique(records.problem):
        rows = np.flatnonzero(records.problem == problem)
        is_right = records.correct[rows] == 1
        if is_right.any() and not is_right.all():
            rights.append(rows[is_right][0])
            wrongs.append(rows[~is_right][0])
    count = len(rights)
    return np.array([*rights, *wrongs]), np.roll(np.arange(2 * count), count)


def _lesson(fit: Transcripts, loss: Loss) -> Lesson:
    records = fit.records
    return Lesson(texts=fit.asking, correct=records.correct, problem=records.problem, loss=loss)


def _curve(reader: Reader, rest: Transcripts) -> Callable[[Transcripts], np.ndarray]:
    """Return the numbers of a reader by a logistic curve that is fitted on the ``rest``."""
    curve = logistic_curve(reader.logits(rest.asking)[:, None], rest.records.correct)
    return lambda of: curve(reader.logits(of.asking)[:, None])


def _filled(written: np.ndarray, fit: Transcripts) -> np.ndarray:
    """Return numbers, the share of right answers where one cannot be read."""
    return np.where(np.isnan(written), fit.records.correct.mean(), written)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-logits.astype(np.float64)))
    return found


def _rows(fit: Transcripts) -> str:
    """Return the lines of the data set of transcripts; the policy writes the tag itself."""
    names = zip(fit.records.problem.tolist(), fit.index.tolist(), strict=True)
    lines = [
        json.dumps({"id": f"{problem}-{index}", "problem": f"{text}\n", "answer": str(int(right))})
        for (problem, index), text, right in zip(names, fit.texts, fit.records.correct, strict=True)
    ]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> Any:
    """Return the same structure with arrays as lists of ``DECIMALS`` decimals."""
    if isinstance(value, np.ndarray):
        return np.round(value.astype(np.float64), DECIMALS).tolist()
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value
