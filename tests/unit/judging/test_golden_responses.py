"""One judge for training (token ids) and for evaluation (text), and it judges as the two before it
did.

``fixtures/judge_golden.json`` holds responses (well-formed, malformed, cut off, with and without
EOS, several tags, bytes that are not UTF-8; mathematics and programs) with what the training judge
of commit 0580b9e said of their ids and what its evaluation judge said of their text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.data.code_problems import pack_tests
from megatron_dcpo.judging.answers import FENCED, Outcome
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.programs import ProgramVerifier
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.judging import judge_many
from tests.helpers.paths import FIXTURES

GOLDEN = json.loads((FIXTURES / "judge_golden.json").read_text())
EOS = GOLDEN["eos"]
TOKENS = TokenBytes(
    (*(bytes([b]) for b in range(256)), b"", *(piece.encode() for piece in GOLDEN["vocabulary"]))
)
ROWS = GOLDEN["responses"]

# A response that closes with an EOS although the engine reports "length" (it ended on the last
# allowed token): training took it as finished, evaluation as truncated. The one judge takes it as
# finished: its number is not cut.
EOS_AT_THE_LIMIT = {"ended at the limit", "nothing but the end token twice, cut off"}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[list[Judgement], list[Judgement]]]:
    """Every golden response judged by its ids, and by its text."""
    programs = ProgramVerifier(
        {key: pack_tests(tests) for key, tests in GOLDEN["tests"].items()}, workers=2
    )
    by_ids: dict[int, Judgement] = {}
    by_text: dict[int, Judgement] = {}
    for kind, options in (("math", {}), ("program", {"verifier": programs, "form": FENCED})):
        places = [place for place, row in enumerate(ROWS) if row["kind"] == kind]
        responses = [response(ROWS[place], str(place)) for place in places]
        prompts = {
            str(place): Prompt(str(place), (), (), ROWS[place]["truth"], kind) for place in places
        }
        texts = [text_alone(with_text(one, TOKENS, {EOS})) for one in responses]
        by_ids |= dict(
            zip(places, judge_many(responses, prompts, TOKENS, {EOS}, **options), strict=True)
        )  # type: ignore[arg-type]
        by_text |= dict(zip(places, judge_many(texts, prompts, **options), strict=True))  # type: ignore[arg-type]
    yield (
        [by_ids[place] for place in range(len(ROWS))],
        [by_text[place] for place in range(len(ROWS))],
    )
    programs.pool.close()


def response(row: dict[str, Any], prompt_id: str) -> Response:
    ids = np.array(row["ids"], np.int64)
    return Response(prompt_id, 0, ids, np.zeros(len(ids), np.float32), row["finish_reason"], 0)


def text_alone(response: Response) -> Response:
    """As a server gives it."""
    none = np.empty(0, np.int64)
    return Response(
        response.prompt_id,
        0,
        none,
        response.logprobs,
        response.finish_reason,
        0,
        text=response.text,
    )


def name_of(row: dict[str, Any]) -> str:
    return f"{row['kind']}: {row['name']}, {row['end']}"


def test_a_text_with_its_tokens_ends_has_the_ids_blocks() -> None:
    """Where the text is the tokens' bytes; of replaced characters the blocks are not known."""
    known = 0
    for row in ROWS:
        options = {"form": FENCED} if row["kind"] == "program" else {}
        ids, truth = (response(row, "p"), {"p": Prompt("p", (), (), row["truth"], row["kind"])})
        text = with_text(ids, TOKENS, {EOS})
        verifier = lambda attempts: [Outcome(False, None)] * len(attempts)  # noqa: E731
        (by_ids,) = judge_many([ids], truth, TOKENS, {EOS}, verifier=verifier, **options)
        (by_text,) = judge_many([text], truth, verifier=verifier, **options)
        if text.token_ends is not None:
            known += 1
            assert (by_text.boundary, by_text.marker_end) == (by_ids.boundary, by_ids.marker_end), (
                name_of(row)
            )
        else:
            assert by_text.boundary is None, name_of(row)
    assert known > 0.9 * len(ROWS)


def test_ids_and_text_are_judged_alike(both: tuple[list[Judgement], list[Judgement]]) -> None:
    names = (
        "correct",
        "confidence",
        "status",
        "stated",
        "answered",
        "length",
        "answer",
        "category",
    )
    for row, by_ids, by_text in zip(ROWS, *both, strict=True):
        assert {n: getattr(by_ids, n) for n in names} == {n: getattr(by_text, n) for n in names}, (
            name_of(row)
        )
        assert by_ids.boundary is not None
        assert (by_text.boundary, by_text.marker_end) == (None, None)


def test_training_is_judged_as_before(both: tuple[list[Judgement], list[Judgement]]) -> None:
    for row, judgement in zip(ROWS, both[0], strict=True):
        assert {name: getattr(judgement, name) for name in row["training"]} == row["training"], (
            name_of(row)
        )


def test_evaluation_is_judged_as_before_but_for_an_eos_at_the_limit(
    both: tuple[list[Judgement], list[Judgement]],
) -> None:
    for row, judgement in zip(ROWS, both[1], strict=True):
        now = {name: getattr(judgement, name) for name in row["evaluation"]}
        before = row["evaluation"]
        if EOS_AT_THE_LIMIT & {row["end"], f"{row['name']}, {row['end']}"}:
            assert (before["status"], before["confidence"]) == ("truncated", None), name_of(row)
            before = before | {name: row["training"][name] for name in ("status", "confidence")}
        assert now == before, name_of(row)


def test_the_golden_responses_are_many_kinds() -> None:
    statuses = {row["training"]["status"] for row in ROWS}
    assert len(ROWS) == 216
    assert len(statuses) == 8, "every kind of malformed confidence, and ok"
    assert {row["evaluation"]["category"] for row in ROWS} == {
        None,
        "passed",
        "wrong",
        "runtime_error",
        "no_program",
    }
