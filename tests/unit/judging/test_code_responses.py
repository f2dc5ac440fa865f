"""Where the confidence block of a code response begins, and what of the response is judged."""

from __future__ import annotations

import pytest

from megatron_dcpo.judging.answers import FENCED, Attempt, Outcome
from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Prompt, Response
from tests.helpers.judging import judge_many

RESPONSE = (
    "I print '<conf>'.\n```python\nprint('<conf> Confidence: 0.1')\n```\n<conf> Confidence: 0.75"
)


def test_the_marker_behind_the_program_opens_the_confidence_block() -> None:
    content = RESPONSE.encode()
    assert FENCED.find_marker(content, b"<conf>") == content.rindex(b"<conf>")
    table = TokenBytes(tuple(bytes([b]) for b in range(256)))
    split = split_blocks([*content, 0], table, {0}, "<conf>", FENCED)
    assert split.boundary == content.rindex(b"<conf>")
    assert split.ended


def test_a_straddling_token_stays_with_the_program() -> None:
    table = TokenBytes((b"", b"```python\nx\n``", b"`<", b"conf> 0.5"))
    split = split_blocks([1, 2, 3, 0], table, {0}, "<conf>", FENCED)
    assert split.boundary == 2, "the token with the last backtick is no confidence token"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("```python\nx\n```\n<conf> Confidence: 0.75", "ok"),
        ("```python\nx\n```\n", "missing"),
        ("<conf> 0.5\n```python\nx\n```", "before_box"),
        ("```python\nx\n```\n<conf> 0.5 done", "trailing_text"),
        ("```python\nx # <conf>\n```\n<conf> 0.5", "multiple"),
        ("```python\nx\n```\n<conf> 1.5", "out_of_range"),
    ],
)
def test_confidence_of_code_responses(text: str, status: str) -> None:
    assert parse_confidence(text, finished=True, opener=FENCED.opener).status == status


def test_only_what_stands_before_the_confidence_is_judged() -> None:
    """A program behind the confidence line does not count."""
    import numpy as np

    seen: list[Attempt] = []

    def verifier(attempts):  # type: ignore[no-untyped-def]
        seen.extend(attempts)
        return [Outcome(True)] * len(attempts)

    table = TokenBytes(tuple(bytes([b]) for b in range(256)))
    text = b"```python\ngood\n```\n<conf> 0.5\n```python\nbad\n```"
    ids = np.array([*text, 0])
    response = Response("p", 0, ids, np.zeros(len(ids)), "stop", 0)
    prompt = Prompt("p", (), (), "tests:0", "t", b"")
    judgement = judge_many([response], {"p": prompt}, table, {0}, verifier=verifier, form=FENCED)[0]
    assert judgement.status == "before_box"
    assert [(a.answer, a.truth) for a in seen] == [("good", "tests:0")]
