"""The confidences of earlier turns in the objective: whom they are compared with, and that a
session counts once (docs/algorithms.md#confidences-of-earlier-turns).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_dcpo.objectives.method import Method
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_REASONING,
    Judgement,
    Prompt,
    Response,
    TrainingSample,
    replaced,
)
from tests.helpers.objective_cases import objective

Turns = Sequence[tuple[int, float | None]]
REASONING, LAST, BRANCH = 4, 3, 2  # tokens of each part


def session(
    index: int, correct: float, confidence: float, turns: Turns = (), status: str = "ok"
) -> TrainingSample:
    """A session with ``turns`` asked before its last confidence: tokens of branches first."""
    begin = BRANCH * len(turns)
    length = begin + REASONING + LAST
    response = Response(
        "p",
        index,
        np.arange(length),
        np.full(length, -1.0, np.float32),
        "stop",
        0,
        loss_mask=np.ones(length, bool),
        turn_confidences=tuple(turns),
        branch_ends=tuple(BRANCH * (number + 1) for number in range(len(turns))),
        answer_from=begin,
    )
    is_ok = status == "ok"
    judgement = Judgement(
        prompt_id="p",
        correct=correct,
        confidence=confidence if is_ok else None,
        status=status,  # type: ignore[arg-type]
        boundary=begin + REASONING,
        length=length,
    )
    return TrainingSample(Prompt("p", (), (1,), "", ""), response, judgement)


def without_branches(sample: TrainingSample) -> TrainingSample:
    begin = sample.response.branch_tokens
    response = replaced(
        sample.response,
        token_ids=sample.response.token_ids[begin:],
        logprobs=sample.response.logprobs[begin:],
        loss_mask=np.ones(REASONING + LAST, bool),
        turn_confidences=(),
        branch_ends=(),
    )
    judgement = replaced(sample.judgement, boundary=REASONING, length=REASONING + LAST)
    return replaced(sample, response=response, judgement=judgement)


GROUP = [
    session(0, 1.0, 0.9, [(1, 0.5), (2, 0.7)]),
    session(1, 0.0, 0.4, [(1, 0.6)]),
    session(2, 0.0, 0.2),
    session(3, 1.0, 0.8, [(1, None)]),
]
BRIER = {"calibration_loss": "brier", "lam": 0.0, "advantage_normalization": "mean"}


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant", "block_mean"])
def test_three_turns_by_hand(aggregation: str) -> None:
    """u_t of one session with two branches and one without, K = 3 and 1: a reasoning token has the
    share that it has without branches, and the confidences of a session together what one has.
    """
    group = [GROUP[0], GROUP[2]]
    method = objective(name="dcpo", loss_aggregation=aggregation, max_response_length=3000, **BRIER)
    (branched, plain) = method.score(group)
    T = REASONING + LAST
    by_hand = {
        "sequence_mean": (1 / (2 * T), 1 / (2 * T)),
        "token_mean": (1 / (2 * T), 1 / (2 * T)),
        "constant": (1 / (2 * 3000), 1 / (2 * 3000)),
        "block_mean": (1 / (2 * REASONING), 1 / ((2 * BRANCH + LAST) / 3 + LAST)),
    }
    of_reasoning, of_confidence = by_hand[aggregation]
    begin = 2 * BRANCH
    assert branched.weights is not None
    assert plain.weights is not None
    np.testing.assert_allclose(branched.weights[:begin], of_confidence / 3, rtol=1e-12)
    np.testing.assert_allclose(
        branched.weights[begin : begin + REASONING], of_reasoning, rtol=1e-12
    )
    np.testing.assert_allclose(branched.weights[begin + REASONING :], of_confidence / 3, rtol=1e-12)
    np.testing.assert_allclose(plain.weights[:REASONING], of_reasoning, rtol=1e-12)
    np.testing.assert_allclose(plain.weights[REASONING:], of_confidence, rtol=1e-12)


@pytest.mark.parametrize("name", ["dcpo", "coupled", "rlcr", "posthoc"])
def test_rewards_and_the_rest_of_the_gradient_are_those_without_branches(name: str) -> None:
    method = objective(name=name)
    plain = method.score([without_branches(sample) for sample in GROUP])
    for one, other in zip(method.score(GROUP), plain, strict=True):
        begin = one.response.branch_tokens
        assert one.R == other.R
        assert one.R_c == other.R_c
        assert one.advantages is not None
        assert one.weights is not None
        assert one.block_ids is not None
        np.testing.assert_array_equal(one.advantages[begin:], other.advantages)
        np.testing.assert_array_equal(one.block_ids[begin:], other.block_ids)
        assert (one.block_ids[:begin] == BLOCK_CONFIDENCE).all()
        is_reasoning = other.block_ids == BLOCK_REASONING
        np.testing.assert_array_equal(
            one.weights[begin:][is_reasoning],
            other.weights[is_reasoning],  # type: ignore[index]
        )


def test_branches_are_compared_with_the_same_turn() -> None:
    """-(c - R)^2 minus the mean of the turn; a malformed one has the penalty."""
    of_branches = objective(name="dcpo", **BRIER).branch_advantages(GROUP)
    first = np.array([-0.25, -0.36, -1.0])
    expected = first - first.mean()
    np.testing.assert_allclose([each[0] for each in of_branches if len(each)], expected)
    assert [len(each) for each in of_branches] == [2, 1, 0, 1]


def test_a_turn_that_one_session_has_reached_is_compared_with_the_last_confidences() -> None:
    of_branches = objective(name="dcpo", **BRIER).branch_advantages(GROUP)
    scores = np.array([-(0.3**2), -(0.4**2), -(0.2**2), -(0.2**2)])
    assert of_branches[0][1] == pytest.approx(scores[0] - scores.mean())


def test_two_branches_of_one_session_are_not_a_group() -> None:
    """Choices that were not taken have the number of the turn too."""
    group = [session(0, 1.0, 0.9, [(1, 0.5), (1, 0.7)]), session(1, 0.0, 0.4)]
    (of_branches, _) = objective(name="dcpo", **BRIER).branch_advantages(group)
    scores = np.array([-0.25, -0.09, -0.16])
    np.testing.assert_allclose(of_branches, scores[:2] - scores.mean())


def test_one_scale_for_all_confidences_of_the_mini_batch() -> None:
    method = objective(name="dcpo", **{**BRIER, "advantage_normalization_confidence": "batch_std"})
    centered = objective(name="dcpo", **BRIER)
    branches = centered.branch_advantages(GROUP)
    last = centered.group_scores(GROUP)[4]
    scale = np.sqrt(np.mean(np.square(np.concatenate([last, *branches]))))
    for one, of_branches, of_last in zip(method.score(GROUP), branches, last, strict=True):
        assert one.advantages is not None
        assert one.advantages[-1] == pytest.approx(of_last / scale)
        begin = one.response.branch_tokens
        np.testing.assert_allclose(one.advantages[:begin:BRANCH], of_branches / scale)


def test_each_branch_has_its_advantage() -> None:
    method = objective(name="dcpo", **BRIER)
    (first, *_) = method.score(GROUP)
    of_branches = method.branch_advantages(GROUP)[0]
    assert first.advantages is not None
    np.testing.assert_array_equal(first.advantages[:4], np.repeat(of_branches, BRANCH))


def test_a_truncated_session_that_is_masked_trains_no_branch() -> None:
    group = [session(0, 0.0, 0.5, [(1, 0.5)], status="truncated"), *GROUP[1:]]
    method = objective(name="dcpo", mask_truncated=True, **BRIER)
    first = method.score(group)[0]
    assert first.weights is not None
    assert not first.weights.any()


def test_a_group_whose_branches_alone_differ_trains_the_confidence() -> None:
    """All are right and equally sure at the end, and were not before."""
    sure = [session(index, 1.0, 0.9, [(1, c)]) for index, c in enumerate((0.2, 0.7))]
    method = objective(name="dcpo", block_groups="signal", **BRIER)
    assert method.trains(sure)
    assert not method.is_informative(sure)
    assert not method.trains([without_branches(one) for one in sure])
    for one in method.score(sure):
        assert one.weights is not None
        assert one.weights[:BRANCH].all()
        assert not one.weights[BRANCH : BRANCH + REASONING].any()


def test_the_length_penalty_does_not_count_branches() -> None:
    options = {"overlong_buffer": 4, "max_response_length": REASONING + LAST, **BRIER}
    method = objective(name="dcpo", **options)
    plain = method.group_scores([without_branches(sample) for sample in GROUP])
    np.testing.assert_array_equal(method.group_scores(GROUP), plain)


def test_which_methods_have_a_reward_of_a_confidence() -> None:
    names = ("dcpo", "coupled", "rlcr", "posthoc", "ternary", "grpo", "ccgspg")
    has: dict[str, bool] = {}
    for name in names:
        method: Method = objective(name=name)
        has[name] = method.scores_confidence
    assert [name for name in names if not has[name]] == ["grpo", "ccgspg"]
