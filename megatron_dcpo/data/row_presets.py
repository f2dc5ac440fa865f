"""Public sets whose rows take more than names of columns, one entry each: those of the benchmarks,
and Alpaca's. Any other set is read by ``data.columns`` or ``data.row`` (examples/rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron_dcpo.data.row_files import Row
from megatron_dcpo.runtime.plugins import load_part

SHUFFLE_SEED = 0  # of the order of GPQA's options, which have the right one first
_GPQA = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_HERE = "megatron_dcpo.data.row_presets"
_PROGRAMS = "megatron_dcpo.data.code_presets"


class Preset(NamedTuple):
    """A set: a row that has the columns ``signs`` is one of it, unless it has one of ``without``.
    ``reader`` is the import path of a function from a row and its index to values of the schema.
    """

    title: str
    signs: frozenset[str]
    reader: str
    without: frozenset[str] = frozenset()

    def is_form_of(self, row: Row) -> bool:
        return self.signs <= row.keys() and self.without.isdisjoint(row)

    def read(self, row: Row, index: int) -> Mapping[str, object]:
        values: Mapping[str, object] = load_part(self.reader)(row, index)
        return values


def _preset(title: str, signs: str, reader: str, without: str = "") -> Preset:
    columns = frozenset(signs.split(","))
    return Preset(title, columns, reader, frozenset(filter(None, without.split(","))))


# in the order in which they are tried
PRESETS: tuple[Preset, ...] = (
    _preset("Alpaca", "instruction", f"{_HERE}:alpaca", without="problem,question,prompt"),
    _preset("GPQA", "Question,Correct Answer", f"{_HERE}:gpqa"),
    _preset("MMLU-Pro", "question,options,answer_index,category", f"{_HERE}:mmlu_pro"),
    _preset("HotpotQA", "question,answer,supporting_facts", f"{_HERE}:hotpot_qa"),
    _preset("LiveCodeBench", "question_content,public_test_cases", f"{_PROGRAMS}:live_code_bench"),
    _preset("EvalPlus", "plus_input,canonical_solution", f"{_PROGRAMS}:evalplus"),
    _preset("MBPP+", "test_list,test", f"{_PROGRAMS}:mbpp_plus"),
    _preset("MBPP", "test_list,text", f"{_PROGRAMS}:mbpp"),
    _preset("MBPP", "test_list,prompt", f"{_PROGRAMS}:mbpp"),
    _preset("HumanEval", "test,entry_point,canonical_solution", f"{_PROGRAMS}:human_eval"),
    _preset("LeetCodeDataset", "test,entry_point,completion", f"{_PROGRAMS}:leetcode"),
)


def alpaca(row: Row, index: int) -> Mapping[str, object]:
    """Return an instruction with its ``input`` in a new line, as Alpaca's prompt has it."""
    instruction = str(row["instruction"])
    given = str(row.get("input") or "").strip()
    if not given or f" {_words(instruction)}".endswith(f" {_words(given)}"):
        return {"problem": instruction}
    return {"problem": f"{instruction}\n{given}"}


def gpqa(row: Row, index: int) -> Mapping[str, object]:
    """Return a question of GPQA; the place of the right option is drawn by the row's index."""
    options = [row.get(column) for column in _GPQA]
    order = np.random.default_rng([SHUFFLE_SEED, index]).permutation(len(options))
    return {
        "problem": row["Question"],
        "options": [options[place] for place in order],
        "answer": order.tolist().index(0),
        "kind": row.get("Subdomain"),
    }


def mmlu_pro(row: Row, index: int) -> Mapping[str, object]:
    return {"kind": row["category"]}


def hotpot_qa(row: Row, index: int) -> Mapping[str, object]:
    """Return a question of HotpotQA without its passages: closed book."""
    return {
        "problem": row["question"],
        "answer": row["answer"],
        "form": "short",
        "context": None,
    }


def _words(text: str) -> str:
    """Return a text with single spaces, by which two are compared."""
    return " ".join(text.split())
