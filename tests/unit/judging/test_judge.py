"""Splitter, parser and verifier together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.judging import judge
from tests.helpers.tokenizers import EOS, byte_level, table_of

PROMPT = Prompt("p", ({"role": "user", "content": "2 + 3?"},), (), "5", "math")


def judged(text: str, *, finish: Any = "stop", eos: bool = True) -> Judgement:
    tokenizer = byte_level()
    end = tokenizer.token_to_id(EOS)
    ids = [*tokenizer.encode(text).ids, *([end] if eos else [])]
    response = Response("p", 0, np.array(ids), np.zeros(len(ids), dtype=np.float32), finish, 0)
    return judge(response, PROMPT, table_of(byte_level), {end})


def test_a_good_response() -> None:
    result = judged("so \\boxed{5}\n<conf> Confidence: 0.83")
    assert result == Judgement("p", 1.0, 0.83, "ok", 13, 13 + 23 + 1, marker_end=13 + 6)


@pytest.mark.parametrize(
    ("text", "finish", "eos", "correct", "status", "block"),
    [
        ("\\boxed{5}", "stop", True, 1.0, "missing", 1),
        (
            "\\boxed{5}",
            "stop",
            False,
            1.0,
            "missing",
            0,
        ),  # ended by a stop string: there is no EOS to train
        ("\\boxed{5}", "length", False, 1.0, "truncated", 0),
        ("\\boxed{5}<conf> 0.5", "length", True, 1.0, "ok", 11),  # EOS on the last allowed token
        ("\\boxed{5}<conf> 0.5", "length", False, 1.0, "truncated", 10),
        ("\\boxed{5}<conf> 7", "stop", True, 1.0, "out_of_range", 9),
        ("\\boxed{6}<conf> 0.5", "stop", True, 0.0, "ok", 11),
        ("<conf> 0.5 \\boxed{5}", "stop", True, 0.0, "before_box", 21),
        ("\\boxed{5}<conf> \\boxed{6}", "stop", True, 1.0, "before_box", 17),
        ("\\boxed{6}<conf> \\boxed{5}", "stop", True, 0.0, "before_box", 17),
        ("", "stop", True, 0.0, "missing", 1),
        ("", "length", False, 0.0, "truncated", 0),
    ],
)
def test_each_kind_of_response_is_judged(
    text: str, finish: str, eos: bool, correct: float, status: str, block: int
) -> None:
    result = judged(text, finish=finish, eos=eos)
    assert (result.correct, result.status, result.length - result.boundary) == (
        correct,
        status,
        block,
    )
    assert (result.confidence is None) == (status != "ok")


def test_a_response_without_an_answer_is_noticed_whatever_its_confidence() -> None:
    assert judged("so \\boxed{5}\n<conf> 0.8").answered
    for text in ("<conf> Confidence: 0.0", "5<conf> 0.0", "<conf> 0.0 \\boxed{5}", ""):
        assert not judged(text).answered


def test_kills_confidence_line_read_as_answer() -> None:
    """No token of the confidence block can change R."""
    for tail in ("<conf> \\boxed{5}", "<conf> 5", "<conf> Confidence: 5 \\boxed{5}"):
        assert judged("no idea " + tail).correct == 0.0
        assert judged("\\boxed{4} " + tail).correct == 0.0
