"""Predictions against references, and where the verifier and plain string equality differ: that is what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.judging.confidence import MARKER
from megatron_dcpo.judging.math import equivalent_many, extract_boxed


@dataclass(frozen=True)
class JudgedPair:
    """``answer`` is what was read in the prediction; ``string_equal``: it is the reference, blanks aside."""

    answer: str
    reference: str
    correct: bool
    string_equal: bool


def read_answer(prediction: str) -> str:
    """The last complete box before the confidence line; a prediction without any box is a bare answer itself.

    In training and evaluation a response without a box is wrong. Here pairs of bare answers are judged as well, so
    only a text that has begun a box and not closed it has no answer.
    """
    before, _, _ = prediction.partition(MARKER)
    boxed = extract_boxed(before)
    if boxed is not None:
        return boxed.strip()
    return "" if "\\boxed" in before else before.strip()


def judge_pairs(pairs: Sequence[tuple[str, str]]) -> list[JudgedPair]:
    """Judge (prediction, reference) pairs, in order."""
    answers = [read_answer(prediction) for prediction, _ in pairs]
    references = [reference.strip() for _, reference in pairs]
    verdicts = equivalent_many(list(zip(answers, references, strict=True)))
    return [
        JudgedPair(answer, reference, correct, "".join(answer.split()) == "".join(reference.split()))
        for answer, reference, correct in zip(answers, references, verdicts, strict=True)
    ]


def report(judged: Sequence[JudgedPair]) -> dict[str, Any]:
    """Counts, and the distinct pairs on which the two disagree, the most frequent first."""
    differing: dict[tuple[str, str, bool], int] = {}
    for pair in judged:
        if pair.correct != pair.string_equal:
            name = (pair.answer, pair.reference, pair.correct)
            differing[name] = differing.get(name, 0) + 1
    rows = sorted(differing.items(), key=lambda item: -item[1])
    return {
        "pairs": len(judged),
        "correct": sum(pair.correct for pair in judged),
        "string_equal": sum(pair.string_equal for pair in judged),
        "disagreements": [
            {"answer": answer, "reference": reference, "correct": correct, "count": count}
            for (answer, reference, correct), count in rows
        ],
    }
