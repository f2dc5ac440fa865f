"""Thinking models: boxes and tags inside the thinking count for nothing; both blocks still partition the response."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.thinking import KNOWN, answer_start, check_thinking, find_tags
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response

TAGS = KNOWN[0]
EOS = 258
TABLE = TokenBytes((*(bytes([b]) for b in range(256)), b"<think>", b"</think>", b"<|im_end|>"), TAGS)
GOOD = "\\boxed{7}\n<conf> Confidence: 0.8"


def ids(text: str) -> list[int]:
    found: list[int] = []
    while text:
        special = next((i for i, tag in ((256, "<think>"), (257, "</think>")) if text.startswith(tag)), None)
        size = 1 if special is None else len(TABLE[special])
        found += [special] if special is not None else list(text[0].encode())
        text = text[size:]
    return found


def judged(text: str, before: str = "Q", finish: str = "stop") -> Judgement:
    prompt = Prompt("p", (), tuple(ids(before)), "7", "math")
    tokens = np.array([*ids(text), *[EOS] * (finish == "stop")])
    response = Response("p", 0, tokens, np.zeros(len(tokens), np.float32), finish, 0)
    return judge_many([response], {"p": prompt}, TABLE, (EOS,))[0]


@pytest.mark.parametrize(
    "thinking", ["", "\\boxed{3} <conf> Confidence: 0.1", "<conf> 1 <conf>", "two </th", "x\\boxed{"]
)
def test_what_the_thinking_holds_counts_for_nothing(thinking: str) -> None:
    text = f"<think>{thinking}</think>{GOOD}"
    found = judged(text)
    assert (found.R, found.confidence, found.status, found.answer) == (1.0, 0.8, "ok", "7")
    assert found.boundary == len(ids(text[: text.rindex("<conf>")])), "the reasoning block holds the thinking"


@pytest.mark.parametrize(("text", "before"), [(f"<think>{GOOD}", "Q"), (GOOD, "Q<think>\n")])
def test_a_thinking_that_has_not_ended_has_no_answer(text: str, before: str) -> None:
    found = judged(text, before, "length")
    assert (found.R, found.confidence, found.answered, found.status) == (0.0, None, False, "truncated")


def test_a_prompt_that_ended_the_thinking_leaves_none() -> None:
    assert judged(GOOD, "Q<think>\n\n</think>\n\n").status == "ok"
    assert judged(GOOD).status == "ok", "a model that did not think"
    assert judged(f"a </think>{GOOD}", "Q<think>\n").R == 1.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<conf>", "\\boxed{7}", " Confidence: 0.5", "x"]), max_size=12))
def test_the_answer_begins_behind_the_first_end(parts: list[str]) -> None:
    content = "".join(parts).encode()
    start = answer_start(content, TAGS)
    if TAGS.end in content:
        assert start == content.index(TAGS.end) + len(TAGS.end)
    else:
        assert start == (None if content.startswith(TAGS.opening) else 0)
    assert answer_start(content, None) == 0


def test_the_tokenizers_own_token() -> None:
    assert find_tags({"<think>", "</think>", "<|im_end|>"}) == TAGS
    assert find_tags({"<|im_end|>"}) is None
    check_thinking("auto", None, "m")
    with pytest.raises(UserError, match="no end-of-thinking token"):
        check_thinking("on", None, "m")
