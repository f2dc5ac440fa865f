"""Negative controls: each test names the defect it kills. ``docs/algorithms.md`` has the table of
the mutants run.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, Judgement
from tests.helpers.objective_cases import (
    EXPECTED,
    INPUTS,
    NEW,
    OLD,
    golden_judgements,
    judgement,
    loss_and_gradient,
    objective,
    score,
    with_tokens,
)

CORRECT = (1.0, 1.0, 0.0, 0.0)
CONFIDENCE = (0.9, 0.45, 0.14, 0.77)


def small_group() -> list[Judgement]:
    return [judgement("p", R, c) for R, c in zip(CORRECT, CONFIDENCE, strict=True)]


def test_kills_swapped_blocks() -> None:
    """R = (1,1,0,0): reasoning tokens get +1,+1,-1,-1; confidence tokens the normalised R_c, never
    the reverse.
    """
    scored = score(objective(lam=0.0, calibration_loss="brier"), small_group())
    R_c = np.array([-0.01, -0.3025, -0.0196, -0.5929])
    A_c = (R_c - R_c.mean()) / (R_c.std() + 1e-6)
    for i, tokens in enumerate(scored.samples):
        np.testing.assert_allclose(tokens.advantages[:3], [1, 1, -1, -1][i], atol=1e-5)
        np.testing.assert_allclose(tokens.advantages[3:], A_c[i], atol=1e-9)
        assert tokens.block_ids.tolist() == [BLOCK_REASONING] * 3 + [BLOCK_CONFIDENCE] * 2


def test_kills_swapped_blocks_in_the_loss() -> None:
    chosen = objective()
    scored = score(chosen, golden_judgements())
    swapped = [
        np.where(tokens.block_ids == BLOCK_CONFIDENCE, scored.A_r[i], scored.A_c[i])
        for i, tokens in enumerate(scored.samples)
    ]
    assert (
        abs(loss_and_gradient(chosen, samples=with_tokens(scored, swapped))[0] - golden_loss())
        > 1e-3
    )


def test_kills_groups_by_position() -> None:
    """Two prompts interleaved row by row: one always right, one always wrong. By position the
    groups would be mixed.
    """
    rows = [judgement("ab"[i % 2], 1.0 - i % 2, 0.5 + 0.05 * i) for i in range(8)]
    scored = score(objective(lam=1.0), rows)
    assert scored.targets.tolist() == [1.0, 0.0] * 4
    assert scored.A_r.tolist() == [0.0] * 8
    for prompt in (0, 1):
        assert scored.A_c[prompt::2].sum() == pytest.approx(0, abs=1e-9)


def test_kills_groups_merged_into_one() -> None:
    rows = [*small_group(), judgement("q", 1.0, 0.5), judgement("q", 1.0, 0.6)]
    assert score(objective(lam=1.0), rows).targets.tolist() == [0.5] * 4 + [1.0] * 2


def test_kills_flipped_lam() -> None:
    """lam is the weight of the group: .25 * .5 + .75 * R."""
    assert score(objective(lam=0.25), small_group()).targets.tolist() == [
        0.875,
        0.875,
        0.125,
        0.125,
    ]
    assert score(objective(lam=0.0), small_group()).targets.tolist() == list(CORRECT)
    assert score(objective(lam=1.0), small_group()).targets.tolist() == [0.5] * 4


@pytest.mark.parametrize("shift", [-2, -1, 1])
def test_kills_boundary_off_by_one(shift: int) -> None:
    chosen = objective()
    moved = []
    for j in golden_judgements():
        boundary = (
            min(max(j.boundary + shift, 0), j.length)
            if j.status not in ("missing", "truncated")
            else j.boundary
        )
        moved.append(
            Judgement(j.prompt_id, j.correct, j.confidence, j.status, boundary, j.length, j.stated)
        )
    assert abs(loss_and_gradient(chosen, moved)[0] - golden_loss()) > 1e-4


@pytest.mark.parametrize("shift", [-1, 1])
def test_kills_labels_shifted_by_one(shift: int) -> None:
    """Log-probs of the neighbouring position under the same advantages are another loss."""
    rolled = [np.roll(row, shift) for row in NEW]
    assert abs(loss_and_gradient(objective(), new=rolled)[0] - golden_loss()) > 1e-3


def test_kills_advantages_shifted_by_one_with_a_one_token_block() -> None:
    """The gradient of the confidence advantage sits on exactly the last token when the block is one
    token.
    """
    rows = [judgement("p", 1.0, c, boundary=4) for c in (0.2, 0.9)]  # all right: A_r = 0
    old = [np.full(5, -1.0)] * 2
    _, gradients = loss_and_gradient(objective(), rows, old, old)
    for gradient, sign in zip(gradients, (1, -1), strict=True):
        assert gradient[:4].tolist() == [0.0] * 4
        assert np.sign(gradient[4]) == sign


def test_kills_penalty_that_depends_on_correctness() -> None:
    rows = [judgement("p", R, None if i < 2 else 0.5) for i, R in enumerate((1.0, 0.0, 1.0, 0.0))]
    assert score(objective(), rows).R_c[:2].tolist() == [-1.0, -1.0]


def test_kills_malformed_left_out_of_the_statistics() -> None:
    """Malformed and truncated responses count in the group accuracy and in the mean of R_c."""
    rows = [judgement("p", 1.0, 0.9), judgement("p", 0.0, None, status="truncated", boundary=5)]
    scored = score(objective(lam=1.0), rows)
    assert scored.targets.tolist() == [0.5, 0.5]
    np.testing.assert_allclose(scored.A_c, [1, -1], atol=1e-4)


def test_kills_sample_std_and_missing_eps() -> None:
    scored = score(objective(), golden_judgements())
    assert scored.A_r[0] == pytest.approx(0.5 / (0.5 + 1e-6), abs=1e-12)
    assert score(objective(ddof=1), golden_judgements()).A_r[0] == pytest.approx(
        0.9354125966967592, abs=1e-12
    )


def test_kills_length_of_one_block_as_denominator() -> None:
    """sequence_mean divides by the whole response, not by the block."""
    chosen = objective()
    scored = score(chosen, golden_judgements())
    for row, old in zip(scored.weights, OLD, strict=True):
        np.testing.assert_allclose(row, 1 / (8 * len(old)), rtol=1e-15)


def test_kills_clip_without_min() -> None:
    """rho = 3.49 with A < 0 (response 5, token 1) is not clipped from above; with A > 0 it would
    be.
    """
    for sign, expected in ((-1.0, np.exp(1.25)), (1.0, -1.28)):
        chosen = objective(name="grpo", advantage_normalization="none")
        rows = [judgement("p", sign, 0.5, 0, 1), judgement("p", 0.0, 0.5, 0, 1)]
        old, new = ([np.array([-1.6]), np.array([-1.0])], [np.array([-0.35]), np.array([-1.0])])
        assert loss_and_gradient(chosen, rows, old, new)[0] == pytest.approx(
            expected / 2, abs=1e-12
        )


def golden_loss() -> float:
    loss: float = EXPECTED["dcpo lam=0.5 [paper]"]["loss"]
    assert loss_and_gradient(objective())[0] == pytest.approx(loss, abs=1e-9)
    assert len(INPUTS["correct"]) == 8
    return loss
