"""The judge of a response of several turns: the last answer counts, and an agent's verdict."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.judging.answers import Attempt, Outcome
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.verdicts import with_verdicts
from megatron_dcpo.types import Prompt, Response
from tests.helpers.chat_policy import chat_tokens
from tests.helpers.judging import judge_many

CHAT = chat_tokens()
END = CHAT.eos_ids[0]
FIRST = CHAT.encode("\\boxed{1}\n<conf> Confidence: 0.1")
WRITTEN = CHAT.encode("a tool says \\boxed{2} <conf>")
LAST = [*CHAT.encode("\\boxed{42}\n<conf> Confidence: 0.9"), END]
PROMPT = Prompt("p", (), tuple(CHAT.encode("?")), "42", "t")


def response(**fields: Any) -> Response:
    ids = np.array([*FIRST, *WRITTEN, *LAST], np.int64)
    return Response("p", 0, ids, -np.arange(len(ids), dtype=np.float32), "stop", 1, **fields)


def judged(one: Response, **options: Any) -> Any:
    (judgement,) = judge_many([one], {"p": PROMPT}, CHAT.tokens, CHAT.eos_ids, **options)
    return judgement


def test_the_last_answer_is_judged_and_what_is_before_it_reasons() -> None:
    start = len(FIRST) + len(WRITTEN)
    judgement = judged(response(answer_from=start))
    assert (judgement.correct, judgement.confidence, judgement.status) == (1.0, 0.9, "ok")
    assert judgement.answer == "42"
    assert judgement.length == start + len(LAST)
    assert judgement.boundary == start + len(CHAT.encode("\\boxed{42}\n"))
    assert judgement.marker_end == judgement.boundary + len("<conf>")
    assert judged(response()).status == "multiple", "all of it is not one answer"


def test_an_evaluation_keeps_the_last_answer() -> None:
    start = len(FIRST) + len(WRITTEN)
    contexts = ((0, 1), (len(FIRST), 2))
    one = response(answer_from=start, contexts=contexts, context_ids=np.zeros(3, np.int64))
    kept = with_text(one, CHAT.tokens, CHAT.eos_ids)
    assert kept.text == "\\boxed{42}\n<conf> Confidence: 0.9"
    assert kept.logprobs.tolist() == [-float(start + n) for n in range(len(LAST))]
    assert (kept.contexts, kept.answer_from) == ((), 0)
    assert judged(kept).boundary == len(CHAT.encode("\\boxed{42}\n"))


@pytest.mark.parametrize(
    "text", ["<think>\n\\boxed{42}", "<think>\n\\boxed{7}\n</think>\n\\boxed{42}"]
)
def test_thinking_is_looked_for_before_the_last_answer(text: str) -> None:
    """The prompt of the whole response ends the thinking; that of the last answer opens it."""
    prompt = Prompt("p", (), tuple(CHAT.encode("<think>\n\n</think>\n\n")), "42", "t")
    before = CHAT.encode("\\boxed{1}<|im_end|>\nassistant\n")
    ids = np.array([*before, *CHAT.encode(text), END], np.int64)
    one = Response("p", 0, ids, np.zeros(len(ids), np.float32), "stop", 1, answer_from=len(before))
    (judgement,) = judge_many([one], {"p": prompt}, CHAT.tokens, CHAT.eos_ids)
    assert judgement.correct == float("</think>" in text)


@pytest.mark.parametrize(
    ("verdict", "graded", "correct", "R"),
    [
        ({"score": 0.0}, False, 0.0, 0.0),
        ({"score": 0.6, "steps": 3}, False, 0.0, 0.0),
        ({"score": 0.6, "steps": 3}, True, 0.0, 0.6),
        ({"score": 1.0}, False, 1.0, 1.0),
    ],
)
def test_a_verdict_takes_the_place_of_the_verifier(
    verdict: dict[str, float], graded: bool, correct: float, R: float
) -> None:
    def never(attempts: Any) -> list[Outcome]:
        assert attempts == []
        return []

    verifier = with_verdicts(never, JudgingConfig(graded=graded))
    judgement = judged(response(answer_from=len(FIRST), verdict=verdict), verifier=verifier)
    assert (judgement.correct, judgement.R) == (correct, R)
    assert judgement.logged == verdict


def test_without_a_verdict_the_verifier_is_asked_in_order(caplog: Any) -> None:
    asked: list[str] = []

    def verifier(attempts: Any) -> list[Outcome]:
        asked.extend(one.truth for one in attempts)
        return [Outcome(one.truth == "a") for one in attempts]

    judge = with_verdicts(verifier, JudgingConfig())
    attempts = [
        Attempt("x", "a"),
        Attempt("x", "b", verdict={"score": 1}),
        Attempt("x", "c"),
    ]
    with caplog.at_level(logging.WARNING):
        outcomes = judge(attempts)
    assert [one.correct for one in outcomes] == [True, True, False]
    assert asked == ["a", "c"]
    assert not caplog.records
