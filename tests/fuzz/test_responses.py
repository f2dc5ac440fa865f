"""What models write, on text that nobody meant (``test_parsers.py``)."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_dcpo.evaluation.samples import Sample, sample_line, sample_of
from megatron_dcpo.judging.abstention import is_abstention, normalize
from megatron_dcpo.judging.answers import BOXED, FENCED, Outcome, extract_program
from megatron_dcpo.judging.math import answer_forms, latex, words
from megatron_dcpo.judging.math.equivalence import quick_verdict
from megatron_dcpo.judging.option_letters import chosen_letter
from megatron_dcpo.judging.questions import f1, normalize_triviaqa, same_answer, same_choice
from megatron_dcpo.judging.same_program import normal_form, same_program
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.runtime.text import encodable, parse_json, printable
from megatron_dcpo.types import MALFORMED, Prompt, Response
from tests.fuzz.strategies import fuzz, responses
from tests.helpers.judging import judge_many

BYTES = TokenBytes((*(bytes([b]) for b in range(256)), b"<|im_end|>"))
THINKS = TokenBytes(BYTES.table, KNOWN[0])
OPENINGS = ["", "<think>\n", "<think>\n\n</think>\n\n"]


@fuzz
@given(text=responses, key=responses, finished=st.booleans(), form=st.sampled_from([BOXED, FENCED]))
def test_responses(text: str, key: str, finished: bool, form: Any) -> None:
    """Ids and text give the same judgement, whose blocks partition the tokens, and a sample that is
    read as written.
    """
    ids = np.array([*text.encode(errors="surrogatepass"), *([256] if finished else [])], np.int64)
    ends = "stop" if finished else "length"
    by_id = Response("p", 0, ids, np.zeros(len(ids)), ends, 0)
    prompts = {"p": Prompt("p", (), (), key, "")}

    def verifier(attempts: Any) -> list[Outcome]:
        return [Outcome(bool(quick_verdict(a.answer or "", a.truth))) for a in attempts]

    by_ids, by_text = judge_many(
        [by_id, replace(by_id, text=text)], prompts, BYTES, {256}, verifier=verifier, form=form
    )
    same = ("correct", "confidence", "status", "stated", "answered", "answer")
    if finished or "\ud800" not in text:
        assert [getattr(by_ids, name) for name in same] == [getattr(by_text, name) for name in same]
    assert 0 <= by_ids.boundary <= by_ids.length == len(ids)
    assert (by_ids.status == "ok") == (by_ids.confidence is not None)
    assert by_ids.status in ("ok", *MALFORMED)
    assert by_ids.confidence is None or 0 <= by_ids.confidence <= 1
    sample = Sample(prompts["p"], replace(by_id, text=text), by_text)
    row = parse_json(sample_line(sample).encode())
    assert (row["text"], row["ground_truth"]) == (encodable(text), encodable(key))
    again = sample_of(row)
    assert again.judgement.status == by_text.status
    assert again.judgement.length == len(ids)


@fuzz
@given(
    text=responses,
    opening=st.sampled_from(OPENINGS),
    finished=st.booleans(),
    form=st.sampled_from([BOXED, FENCED]),
)
def test_responses_that_think(text: str, opening: str, finished: bool, form: Any) -> None:
    """Ids and text give the same judgement; what is behind the thinking gives it alone."""
    ids = np.array([*text.encode(errors="surrogatepass"), *([256] if finished else [])], np.int64)
    by_id = Response("p", 0, ids, np.zeros(len(ids)), "stop" if finished else "length", 0)
    prompts = {
        "p": Prompt("p", (), tuple(opening.encode()), "7", ""),
        "q": Prompt("q", (), (), "7", ""),
    }
    verifier = lambda attempts: [Outcome(a.answer == a.truth) for a in attempts]  # noqa: E731
    options: dict[str, Any] = {"verifier": verifier, "form": form}
    by_ids, by_text = judge_many(
        [by_id, replace(by_id, text=text)], prompts, THINKS, {256}, **options
    )
    rest = replace(by_id, prompt_id="q", text=text[by_text.thinking_characters :])
    (alone,) = judge_many([rest], prompts, **options)
    same = ("correct", "confidence", "status", "stated", "answer", "abstained")
    assert [getattr(alone, name) for name in same] == [getattr(by_text, name) for name in same]
    if "\ud800" not in text:
        assert [getattr(by_ids, name) for name in same] == [getattr(by_text, name) for name in same]
    assert (
        0
        <= (by_ids.thinking_tokens or 0)
        <= by_ids.boundary
        <= by_ids.marker_end
        <= by_ids.length
        == len(ids)
    )


@fuzz
@given(answer=responses, key=responses)
@example(answer="1e999", key="1")
@example(answer="0." + "9" * 190, key="1/" + "3" * 190)
@example(answer=r"0.\overline{0}", key="²")
def test_answers_of_mathematics(answer: str, key: str) -> None:
    answer, key = answer[:300], key[:300]
    assert quick_verdict(answer, key) in (True, False, None)
    for form in (
        answer_forms.numeral,
        answer_forms.ratio,
        answer_forms.is_well_formed,
        answer_forms.is_braced_set,
    ):
        form(answer)
    words.differ(words.measured(answer), words.measured(key))
    words.same_name(answer, key)
    answer_forms.exact_number(answer)
    latex.degrees_to_radians(latex.protect_letters(latex.drop_degrees(latex.spell_out(answer))))


@fuzz
@given(answer=responses, truth=responses, options=st.lists(responses, max_size=5))
def test_answers_to_questions(answer: str, truth: str, options: list[str]) -> None:
    assert isinstance(normalize(answer), str)
    assert isinstance(normalize_triviaqa(answer), str)
    assert same_choice(answer, answer)
    assert f1(answer, truth) == pytest.approx(f1(truth, answer))
    assert 0 <= f1(answer, truth) <= 1
    assert chosen_letter(answer, options) in (
        None,
        *"ABCDE"[: len(options)],
        *("" if options else string.ascii_uppercase),
    )
    assert is_abstention(answer) in (True, False)
    assert same_answer(answer, answer)


@fuzz
@given(a=responses, b=responses)
def test_programs(a: str, b: str) -> None:
    program = extract_program(a) or a
    printable(program).encode()
    assert same_program(program, program)
    assert isinstance(normal_form(program), str)
    assert same_program(program, b) == same_program(b, program)
