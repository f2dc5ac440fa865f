"""Confidences behind every answer of a session (``rollout.asks_confidence: turns``): branches that
the agent does not see, a segment each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.rollout.sessions import PlannedCall, Session, Turn
from megatron_dcpo.types import Response
from tests.helpers.chat_policy import said
from tests.unit.rollout.test_agents import rollout, sampled, write
from tests.unit.rollout.test_sessions import (
    QUESTION,
    as_sent,
    call,
    chat,
    plan,
    session,
    text_call,
    whole,
)

AGENT = """
async def run(problem, client):
    messages = [*problem["messages"]]
    for number in range(3):
        answer = await client.chat.completions.create(model="x", messages=messages)
        messages += [answer.choices[0].message.model_dump()]
        messages += [{"role": "user", "content": f"{number} is not all."}]
    return 0.25
"""


def three_turns(one: Session) -> list[Turn]:
    first = call(one, [QUESTION], "One.")
    second = call(one, [QUESTION, as_sent(first), QUESTION], "Two.")
    third = call(one, [*second.history, QUESTION], "Three.\n<conf> Confidence: 0.9")
    return [first, second, third]


def three_turns_alone() -> Session:
    one = session()
    three_turns(one)
    return one


def state(one: Session, *numbers: str) -> list[PlannedCall]:
    """Answer what is asked behind the earlier answers."""
    planned = one.ask_earlier_confidences("<conf>")
    for each, number in zip(planned, numbers, strict=True):
        one.add_earlier_confidence(each, said(one.chat, number), "<conf>")
    return planned


def test_a_branch_is_a_segment_behind_the_path_to_its_answer() -> None:
    one = session()
    three_turns(one)
    alone = one.response()
    state(one, " 0.25", " much")
    response = one.response()
    assert response.turn_confidences == ((1, 0.25), (2, None))
    texts = whole(one, response)
    assert len(texts) == 3
    assert texts[0].endswith("One.\n<conf> Confidence: 0.25<|im_end|>")
    assert texts[1].endswith("Two.\n<conf> Confidence: much<|im_end|>")
    assert texts[2] == whole(one, alone)[0]
    ends = (len(one.chat.encode(" 0.25")) + 1, len(one.chat.encode(" 0.25 much")) + 2)
    assert response.branch_ends == ends
    assert response.loss_mask is not None
    assert response.loss_mask[: ends[-1]].all(), "only what was sampled is in a branch"
    # what is behind the branches is the response without them
    assert response.token_ids[ends[-1] :].tolist() == alone.token_ids.tolist()
    assert response.loss_mask[ends[-1] :].tolist() == alone.loss_mask.tolist()  # type: ignore[union-attr]
    assert response.answer_from == ends[-1] + alone.answer_from
    assert response.sampled_length == alone.sampled_length
    assert response.counted == alone.counted


def test_branches_use_nothing_of_the_budget_and_have_names_of_their_own() -> None:
    used = len(three_turns_alone().response().token_ids)
    one = session(response_tokens=used)
    three_turns(one)
    planned = state(one, " 0.5", " 0.6")
    assert one.used == used
    assert len({name for each in planned for name in each.names}) == 2


def test_no_branch_behind_an_answer_that_states_one_or_without_room() -> None:
    one = session()
    first = call(one, [QUESTION], "One. <conf> Confidence: 0.3")
    call(one, [QUESTION, as_sent(first), QUESTION], "Two.")
    assert one.ask_earlier_confidences("<conf>") == []
    small = session()
    first = call(small, [QUESTION], "One.")
    call(small, [QUESTION, as_sent(first), QUESTION], "Two.")
    small.limits = type(small.limits)(4000, len(first.prompt.token_ids) + 6, 20)
    assert small.ask_earlier_confidences("<conf>") == []


def test_the_number_of_a_turn_is_that_of_its_conversation() -> None:
    """A history that is written anew goes on to count; of parallel calls and choices each has the
    number of its own conversation, whatever came first.
    """
    one = session()
    first = call(one, [QUESTION], "One.")
    changed = {"role": "user", "content": "Another question."}
    call(one, [changed, as_sent(first), QUESTION], "Anew.")
    call(one, [QUESTION, as_sent(first), changed], "Beside.")
    call(one, [QUESTION], "Last.")
    numbers = [each.prompt.parent.answer for each in one.ask_earlier_confidences("<conf>")]  # type: ignore[union-attr]
    state(one, " 0.1", " 0.2", " 0.3")
    assert [turn for turn, _ in one.response().turn_confidences] == [1, 2, 2]
    assert numbers[0] == "One."


def test_of_several_choices_those_that_were_not_taken_have_a_branch() -> None:
    one = session()
    planned = plan(one, chat([QUESTION], choices=3))
    one.commit(planned, [said(one.chat, text) for text in ("A.", "B.", "C.")])
    asked = one.ask_earlier_confidences("<conf>")
    assert sorted(each.prompt.parent.answer for each in asked) == ["B.", "C."]  # type: ignore[union-attr]


def test_texts_are_counted_along_their_path() -> None:
    one = session()
    start = one.chat.text_of(one.prompt.token_ids)
    first = text_call(one, start, "One.")
    second = text_call(one, first.text + " More: ", "Two.")
    text_call(one, second.text + " More: ", "Three.")
    state(one, " 0.1", " 0.2")
    assert one.response().turn_confidences == ((1, 0.1), (2, 0.2))


@pytest.mark.parametrize("asks", [True, "turns"])
def test_the_tokens_of_the_session_are_the_same(asks: bool | str, tmp_path: Path) -> None:
    """Over HTTP: what the agent gets, and what is trained on of it, does not know the option."""
    seen: list[str] = []

    def answer(text: str) -> str:
        is_asked = text.endswith("<conf> Confidence:")
        seen.append(text)
        return f" 0.{text.count('is not all')}" if is_asked else f"Answer {len(text)}."

    with rollout(answer, agent=write(tmp_path, AGENT), asks_confidence=asks) as made:
        got = sampled(made, "works", times=3)
    assert len(got) == 3
    for one in got.values():
        asked = [text for text in seen if text.endswith("<conf> Confidence:")]
        if asks is True:
            assert one.turn_confidences == ()
            assert len(asked) == 3
            continue
        assert one.turn_confidences == ((1, 0.0), (2, 0.1))
        assert len(asked) == 9
        others = [text for text in seen if text not in asked]
        assert not any("<conf>" in text for text in others), "no context holds a branch"
        assert one.verdict == {"score": 0.25}


def test_the_response_behind_its_branches_is_equal(tmp_path: Path) -> None:
    def answer(text: str) -> str:
        return " 0.5" if text.endswith("<conf> Confidence:") else f"Answer {len(text)}."

    responses: list[Response] = []
    for asks in (True, "turns"):
        with rollout(answer, agent=write(tmp_path, AGENT), asks_confidence=asks) as made:
            responses.append(sampled(made, "works")["works", 0])
    plain, turns = responses
    begin = turns.branch_tokens
    assert begin > 0
    for name in ("token_ids", "logprobs", "loss_mask"):
        np.testing.assert_array_equal(getattr(turns, name)[begin:], getattr(plain, name))
    assert turns.answer_from - begin == plain.answer_from


def test_the_weights_that_sampled_a_branch_count() -> None:
    """New weights may have come before a session is asked."""
    one = session()
    three_turns(one)
    before = one.response()
    for planned in one.ask_earlier_confidences("<conf>"):
        stated = replace(said(one.chat, " 0.5"), weights_version=before.weights_version + 1)
        one.add_earlier_confidence(planned, stated, "<conf>")
    after = one.response()
    assert after.oldest_version == before.oldest_version
    assert after.weights_version == before.weights_version + 1
    assert after.versions[-1] == (before.weights_version + 1, after.branch_tokens)
