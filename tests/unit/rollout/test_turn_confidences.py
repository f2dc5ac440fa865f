"""Confidences behind every answer of a session (``rollout.asks_confidence: turns``): branches that
the agent does not see, a segment each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.judging.answers import Attempt, Outcome
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.rollout.sessions import CallRefused, PlannedCall, Session, Turn
from megatron_dcpo.types import Judgement, Response
from tests.helpers.chat_policy import said
from tests.unit.rollout.test_agents import rollout, sampled, write
from tests.unit.rollout.test_sessions import (
    CALL,
    QUESTION,
    TOOLS,
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


def truncated(one: Session) -> None:
    """The second answer takes the last tokens, and the third call is refused."""
    first = call(one, [QUESTION], "One.")
    planned = plan(one, chat([QUESTION, as_sent(first), QUESTION]))
    left = len(planned.prompt.written) + 2
    one.limits = replace(one.limits, response_tokens=one.used + left)
    (second,) = one.commit(planned, [said(one.chat, "Two.")])
    with pytest.raises(CallRefused):
        plan(one, chat([*second.history, QUESTION]))


def cut_short(one: Session) -> None:
    """The first answer ends at its longest."""
    first = call(one, [QUESTION], "On", ends=False, max_tokens=2)
    call(one, [QUESTION, as_sent(first), QUESTION], LAST)


def choices(one: Session) -> None:
    """The agent goes on from the second of three."""
    planned = plan(one, chat([QUESTION], choices=3))
    _, second, _ = one.commit(planned, [said(one.chat, text) for text in ("A.", "B.", "C.")])
    call(one, [QUESTION, as_sent(second), QUESTION], LAST)


def calls_side_by_side(one: Session, answered: Sequence[int] = (0, 1)) -> None:
    """Two calls go on from the first answer, and are answered in an order."""
    first = call(one, [QUESTION], CALL, tools=TOOLS)
    results = [{"role": "tool", "content": result} for result in ("42", "43")]
    history = [QUESTION, as_sent(first)]
    planned = [plan(one, chat([*history, result], tools=TOOLS)) for result in results]
    for number in answered:
        one.commit(planned[number], [said(one.chat, f"Beside {number}.")])
    call(one, [*history, *results], LAST, tools=TOOLS)


def history_written_anew(one: Session) -> None:
    """The first two answers are compacted into another question."""
    first = call(one, [QUESTION], "One.")
    call(one, [QUESTION, as_sent(first), QUESTION], "Two.")
    compacted = {"role": "user", "content": "So far it is 42."}
    third = call(one, [compacted], "Three.")
    call(one, [compacted, as_sent(third), QUESTION], LAST)


LAST = "\\boxed{42}\n<conf> Confidence: 0.9"
SESSIONS: dict[Callable[[Session], None], tuple[tuple[int, float | None], ...]] = {
    truncated: ((1, 0.0),),
    cut_short: ((1, 0.0),),
    choices: ((1, 0.0), (1, 0.1), (1, 0.2)),
    calls_side_by_side: ((1, 0.0), (2, 0.1), (2, 0.2)),
    history_written_anew: ((1, 0.0), (1, 0.1), (2, 0.2)),
}


def judged(one: Session, response: Response) -> tuple[list[Attempt], Judgement]:
    """What a verifier gets of a response, and the judgement."""
    seen: list[Attempt] = []

    def verifier(attempts: Sequence[Attempt]) -> list[Outcome]:
        seen.extend(attempts)
        return [Outcome(correct=attempt.answer == "42") for attempt in attempts]

    prompts = {one.prompt.prompt_id: one.prompt}
    (judgement,) = judge_many(
        [response], prompts, one.chat.tokens, one.chat.eos_ids, verifier=verifier
    )
    assert judgement is not None
    return seen, judgement


@pytest.mark.parametrize("make", SESSIONS, ids=lambda make: make.__name__)
def test_what_is_no_branch_is_what_it_is_without_the_option(
    make: Callable[[Session], None],
) -> None:
    """Token ids, contexts, what the verifier gets, and the judgement."""
    one = session()
    make(one)
    alone = one.response({"score": 0.5})
    expected = SESSIONS[make]
    state(one, *(f" 0.{number}" for number in range(len(expected))))
    branched = one.response({"score": 0.5})
    assert branched.turn_confidences == expected
    begin = branched.branch_tokens
    for name in ("token_ids", "logprobs", "loss_mask"):
        np.testing.assert_array_equal(getattr(branched, name)[begin:], getattr(alone, name))
    assert whole(one, branched)[len(expected) :] == whole(one, alone)
    for name in ("finish_reason", "verdict", "counted", "sampled_length", "step"):
        assert getattr(branched, name) == getattr(alone, name), name
    attempts, judgement = judged(one, branched)
    attempts_alone, judgement_alone = judged(one, alone)
    assert attempts == attempts_alone
    assert judgement_alone.boundary is not None
    moved = replace(
        judgement_alone,
        boundary=judgement_alone.boundary + begin,
        length=judgement_alone.length + begin,
    )
    assert replace(judgement, marker_end=None) == replace(moved, marker_end=None)
    assert judgement.status == ("truncated" if make is truncated else "ok")


def test_the_order_of_answers_changes_no_branch() -> None:
    made = []
    for answered in ((0, 1), (1, 0)):
        one = session()
        calls_side_by_side(one, answered)
        planned = state(one, " 0.0", " 0.1", " 0.2")
        made.append(([each.names for each in planned], one.response()))
    (names, response), (other_names, other) = made
    assert names == other_names
    assert response.turn_confidences == other.turn_confidences
    assert response.contexts == other.contexts
    np.testing.assert_array_equal(response.token_ids, other.token_ids)


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
