"""Choices of experts of a response in several parts: whose they are, and where they stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_dcpo.rollout.engine import earlier_first
from tests.unit.rollout.test_sessions import QUESTION, call, session

LAYERS, K = 2, 2


def choices(*experts: int) -> np.ndarray:
    """The same expert for all layers of a token."""
    made = np.array(experts, np.int16)[:, None, None]
    return np.broadcast_to(made, (len(experts), LAYERS, K)).copy()


def firsts(joined: np.ndarray | None) -> list[int]:
    assert joined is not None
    assert joined.shape[1:] == (LAYERS, K)
    return joined[:, 0, 0].tolist()


def test_the_earlier_pass_counts_where_it_has_chosen() -> None:
    earlier, later = choices(1, -1, 3), choices(5, 6, 7, 8)
    assert firsts(earlier_first(earlier, later)) == [1, 6, 3, 8]
    assert firsts(earlier_first(choices(1, 2, 3), choices(5))) == [1, 2, 3]
    assert earlier_first(None, later) is later
    assert earlier_first(earlier, None) is earlier
    assert earlier_first(None, None) is None


def test_a_layer_without_experts_is_no_missing_choice() -> None:
    earlier, later = choices(1, 2), choices(5, 6)
    earlier[:, 0] = later[:, 0] = -1
    joined = earlier_first(earlier, later)
    assert joined is not None
    assert joined[:, 1, 0].tolist() == [1, 2]


def test_vllms_choices_are_bytes() -> None:
    joined = earlier_first(choices(-1, 200), choices(250, 1).astype(np.uint8))
    assert firsts(joined) == [250, 200]


def test_a_session_has_the_choices_of_each_segment_without_its_last_token() -> None:
    """Two turns of one conversation, the second read behind the first, and one of another."""
    one = session()
    plan = call(one, [{"role": "system", "content": "Plan."}, QUESTION], "A plan.")
    first = call(one, [QUESTION], "It is 42.")
    second = call(one, [*first.history, {"role": "user", "content": "Sure?"}], "Yes.")
    turns = []
    for number, turn in enumerate((plan, first, second), start=1):
        rows = len(turn.prompt.token_ids) + len(turn.sampled) - 1
        turns.append(replace(turn, experts=choices(*[number] * rows)))
    by_name = {turn.name: turn for turn in turns}
    parent = by_name[first.name]
    prompt_of_second = replace(second.prompt, parent=parent)
    by_name[second.name] = replace(by_name[second.name], prompt=prompt_of_second)
    one.turns = [by_name[turn.name] for turn in one.turns]
    response = one.response()
    found = firsts(response.experts)
    lengths = [count + end - start for count, start, end in response.parts]
    assert len(found) == sum(lengths) - 2
    assert found[: lengths[0] - 1] == [1] * (lengths[0] - 1)
    of_first = len(first.prompt.token_ids) + len(first.sampled) - 1
    assert found[lengths[0] - 1 :][:of_first] == [2] * of_first, "the pass that sampled them"
    assert set(found[lengths[0] - 1 + of_first :]) == {3}


def test_a_segment_without_choices_has_none_in_its_place() -> None:
    one = session()
    plan = call(one, [{"role": "system", "content": "Plan."}, QUESTION], "A plan.")
    answer = call(one, [QUESTION], "It is 42.")
    assert one.response().experts is None
    rows = len(answer.prompt.token_ids) + len(answer.sampled) - 1
    one.turns = [plan, replace(answer, experts=choices(*[7] * rows))]
    response = one.response()
    before = len(plan.prompt.token_ids) + len(plan.sampled) - 1
    assert firsts(response.experts) == [-1] * before + [7] * rows
