"""Transcripts: a graph, a frozen policy's answer, and the note that the environment writes behind
it.
"""

from __future__ import annotations

import json
import random
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.fitted import LEAST_LOGPROB, Records
from lab.world2 import GRAPHS
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.evaluation.samples import Sample, read_samples

FIT_SEED = 20261129
TO_FIT = 3000
LEARNED = 2400  # of them: what learns by gradients learns on these
PARTS = ("fit", "test")
REPEATS = MappingProxyType({"fit": 4, "test": 8})
ERROR_RATE = 0.2
SHIFTED_RATE = 0.4
OPENS = " ~"  # a note
ASKS = "\n<conf>"  # for a confidence
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class Transcripts:
    """Hold N judged answers in the order of the problems, and the number of the note behind each;
    "" is no note. ``answer`` ends with the box, ``box`` is what stands in it.
    """

    part: str
    records: Records
    index: np.ndarray
    question: tuple[str, ...]
    answer: tuple[str, ...]
    box: tuple[str, ...]
    note: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def before_note(self) -> list[str]:
        """Return question and answer."""
        return [q + a for q, a in zip(self.question, self.answer, strict=True)]

    @property
    def texts(self) -> list[str]:
        """Return all that a reader sees, without the line that asks for a confidence."""
        opened = [OPENS + number if number else "" for number in self.note]
        return [text + note for text, note in zip(self.before_note, opened, strict=True)]

    @property
    def asking(self) -> list[str]:
        """Return the texts with the tag behind which the confidence stands."""
        return [text + ASKS for text in self.texts]

    def chosen(self, rows: np.ndarray) -> Transcripts:
        """Return some of the rows, by number or by a mask."""
        numbers = np.arange(len(self))[rows]
        records = self.records
        return replace(
            self,
            records=Records(
                problem=records.problem[numbers],
                kind=records.kind[numbers],
                correct=records.correct[numbers],
                confidence=records.confidence[numbers],
                logprob=records.logprob[numbers],
                tokens=records.tokens[numbers],
            ),
            index=self.index[numbers],
            question=tuple(self.question[n] for n in numbers),
            answer=tuple(self.answer[n] for n in numbers),
            box=tuple(self.box[n] for n in numbers),
            note=tuple(self.note[n] for n in numbers),
        )

    def without_notes(self) -> Transcripts:
        """Return the same answers without a note."""
        return replace(self, note=("",) * len(self))

    def with_notes_of_another_problem(self) -> Transcripts:
        """Return the same answers, each with the note of the same answer to the next problem."""
        notes = dict(zip(self._names(self.records.problem), self.note, strict=True))
        problems = np.unique(self.records.problem)
        following = dict(zip(problems, np.roll(problems, -1), strict=True))
        others = np.array([following[problem] for problem in self.records.problem])
        return replace(self, note=tuple(notes[name] for name in self._names(others)))

    def with_answers_of(self, rows: np.ndarray) -> Transcripts:
        """Return the same questions and notes behind the answers of other ``rows`` [N]."""
        return replace(
            self,
            answer=tuple(self.answer[n] for n in rows),
            box=tuple(self.box[n] for n in rows),
        )

    def _names(self, problems: np.ndarray) -> list[tuple[int, int]]:
        return list(zip(problems.tolist(), self.index.tolist(), strict=True))


@dataclass(frozen=True)
class Seen:
    """Hold transcripts and what the frozen policy shows of them in one prefill: the log-prob of
    the note's digits, that of the note's number in the place of the box, and the last state [N, H]
    behind the tag. Where there is no note, or no box, the log-prob is ``LEAST_LOGPROB``.
    """

    transcripts: Transcripts
    note_logprob: np.ndarray
    box_logprob: np.ndarray
    state: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        """Return the verdicts [N]."""
        return self.transcripts.records.correct

    @property
    def agrees(self) -> np.ndarray:
        """Return whether the note's number stands in the box, [N, 1]."""
        of_note = np.array(self.transcripts.note)
        return (of_note == np.array(self.transcripts.box))[:, None]


@cache
def world() -> dict[str, Any]:
    """Return the names of the second world's script."""
    return runpy.run_path(str(GRAPHS / "graphs.py"))


def write_problems(out: Path) -> None:
    """Write the problems of the study below ``out``: those to train and to test on, which are the
    second world's, and the graphs to fit on, of which no split of it has one.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (out / f"{split}.jsonl").write_bytes((GRAPHS / f"{split}.jsonl").read_bytes())
    names = world()
    rng = random.Random(FIT_SEED)
    seen = {
        names["key"](problem) for split in names["SPLITS"] for problem in names["read_split"](split)
    }
    lines = []
    while len(lines) < TO_FIT:
        problem = names["draw_problem"](rng)
        if names["key"](problem) in seen:
            continue
        seen.add(names["key"](problem))
        text, answer, kind = names["question"](problem)
        name = f"fit-{len(lines):04d}"
        lines.append(json.dumps({"id": name, "problem": text, "answer": answer, "type": kind}))
    (out / "fit.jsonl").write_text("\n".join(lines) + "\n")


def note(truth: str, name: str, error_rate: float) -> str:
    """Return the number that the environment writes behind the answer ``name``: the true one, or
    with probability ``error_rate`` the same with one digit changed. What is wrong at one rate is
    wrong in the same way at a higher one.
    """
    rng = random.Random(f"note {name}")
    is_wrong = rng.random() < error_rate
    changed: str = world()["corrupt"](truth, rng)
    return changed if is_wrong else truth


def read(samples: Path, problems: Path, part: str, error_rate: float = ERROR_RATE) -> Transcripts:
    """Return the answers of an evaluation with notes behind them."""
    rows = [row for _, row in read_json_lines(problems)]
    found = sorted(read_samples(samples), key=_place)
    of_rows = [rows[_place(sample)[0]] for sample in found]
    answers = [answer_of(sample.response.text) for sample in found]
    names = [f"{part}/{number}/{index}" for number, index in map(_place, found)]
    records = Records(
        problem=np.array([_place(sample)[0] for sample in found]),
        kind=np.array([row["type"] for row in of_rows]),
        correct=np.array([float(sample.correct) for sample in found]),
        confidence=np.full(len(found), np.nan),
        logprob=_logprobs(found),
        tokens=np.array([float(sample.judgement.length) for sample in found]),
    )
    return Transcripts(
        part=part,
        records=records,
        index=np.array([_place(sample)[1] for sample in found]),
        question=tuple(row["problem"] for row in of_rows),
        answer=tuple(text for text, _ in answers),
        box=tuple(box for _, box in answers),
        note=tuple(
            note(row["answer"], name, error_rate) for row, name in zip(of_rows, names, strict=True)
        ),
    )


def answer_of(text: str) -> tuple[str, str]:
    """Return a response up to the end of the last box before its confidence, and what stands in the
    box; without a box the line, and "".
    """
    reasoning, _, _ = text.partition("<conf>")
    boxes = list(_BOX.finditer(reasoning))
    if not boxes:
        return reasoning.rstrip("\n"), ""
    return reasoning[: boxes[-1].end()], boxes[-1][1]


def _place(sample: Sample) -> tuple[int, int]:
    """Return the number of the problem in its file, and the index of the answer."""
    return int(sample.prompt.prompt_id.rsplit("/", 1)[1]), sample.response.sample_index


def _logprobs(samples: Sequence[Sample]) -> np.ndarray:
    values = [sample.measures.reasoning_logprob for sample in samples]
    return np.array([LEAST_LOGPROB if value is None else value for value in values])
