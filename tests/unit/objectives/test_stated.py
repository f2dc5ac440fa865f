"""The expected score of a confidence that an adapter states."""

import numpy as np
import pytest
import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, build_objective
from megatron_dcpo.objectives.stated import score_values, stated, statement_losses
from megatron_dcpo.types import Judgement

BRIER = ObjectiveConfig(calibration_loss="brier", lam=0.0)


def expected_score(logits, scores):
    """Of the two digits drawn one after the other, by the definition."""
    if logits.shape[1] == 1:
        return (logits[:, 0].softmax(-1) * scores).sum(-1)
    joint = logits[:, 0].softmax(-1)[..., None] * logits[:, 1:].softmax(-1)
    return (joint.flatten(1) * scores).sum(-1)


@pytest.mark.parametrize("shape", [(1, 100), (11, 10)])
def test_with_a_large_damping_it_is_the_gradient_of_the_expected_score(shape):
    """Up to a factor of each decision, the tenth's being one of all it can depend on; the hundredths weigh ten times."""
    torch.manual_seed(0)
    logits = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    scores = torch.as_tensor(score_values(np.array([0.0, 1.0, 0.3]), BRIER, max(100, shape[1])))
    (ours,) = torch.autograd.grad(statement_losses(logits, scores, BRIER.changed(digit_damping=1e9)).sum(), logits)
    (plain,) = torch.autograd.grad(-expected_score(logits, scores).sum(), logits)
    for sample in range(3):
        for row in range(shape[0]):
            cosine = torch.cosine_similarity(ours[sample, row], plain[sample, row], dim=0)
            assert cosine > 1 - 1e-6, (sample, row)


@pytest.mark.parametrize("loss", ["brier", "l1"])
def test_of_its_own_tokens_the_mean_is_scored(loss):
    """By the score of that value; between two hundredths it is theirs in proportion."""
    torch.manual_seed(0)
    logits, t = 3 * torch.randn(5, 1, 101, dtype=torch.float64), np.array([0.0, 1.0, 0.3, 0.5, 1.0])
    logits[4, 0, 100] = 1e3  # certain of 1.00
    options = BRIER.changed(calibration_loss=loss)
    losses = statement_losses(logits, torch.as_tensor(score_values(t, options, 101)), options).numpy()
    mean = (logits[:, 0].softmax(-1) @ torch.arange(101, dtype=torch.float64) / 100).numpy()
    expected = np.abs(mean - t) if loss == "l1" else (mean - t) ** 2
    np.testing.assert_allclose(losses, expected, atol=3e-5)
    assert losses[4] == 0


@pytest.mark.parametrize("shape", [(1, 100), (11, 10), (1, 101)])
def test_gradient_descent_finds_the_probability(shape):
    """Labels right with probability .37: what is stated in the end is .37."""
    logits = torch.zeros(1, *shape, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.1)
    scores = torch.as_tensor(score_values(np.array([0.0, 1.0]), BRIER, max(100, shape[1])), dtype=torch.float32)
    expected = (0.63 * scores[0] + 0.37 * scores[1])[None]
    for _ in range(400):
        adam.zero_grad()
        statement_losses(logits, expected, BRIER).sum().backward()
        adam.step()
    assert stated(logits.detach()).tolist() == pytest.approx([0.37], abs=0.011)


def test_what_is_stated_is_the_mean_in_hundredths():
    certain = torch.full((2, 11, 10), -1e4)
    certain[0, 0, 7] = certain[0, 1 + 7, 4] = 0.0
    certain[1, 0, [0, 9]] = 0.0  # .09 and .94 with probability 1/2 each
    certain[1, 1 + 0, 9] = certain[1, 1 + 9, 4] = 0.0
    assert stated(certain).tolist() == pytest.approx([0.74, 0.52])
    assert stated(torch.zeros(1, 1, 100)).tolist() == pytest.approx([0.5])  # of 0 to .99: .495
    sure = torch.zeros(1, 1, 101)
    sure[..., 100] = 1e4
    assert stated(sure).tolist() == [1.0]


def test_the_policy_gets_the_advantages_of_grpo():
    judgements = [Judgement("p", float(i % 3 == 0), 0.5, "ok", 4, 9) for i in range(6)]
    ours = build_objective(ObjectiveConfig(preset="dcpo_proper", confidence_parameters="adapter"))
    grpo = build_objective(ObjectiveConfig(name="grpo"))
    a, b = ours.score(judgements), grpo.score(judgements)
    np.testing.assert_array_equal(a.A_r, b.A_r)
    np.testing.assert_array_equal(a.targets, [j.correct for j in judgements])
    for mine, theirs in zip(a.tokens, b.tokens, strict=True):
        np.testing.assert_array_equal(mine.advantages, theirs.advantages)
        assert set(mine.block_ids) == {1}
    for mine, theirs in zip(ours.token_weights(a, ours.counts(a)), grpo.token_weights(b, grpo.counts(b)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"confidence_parameters": "adapter", "marker_block": "reasoning"}, "marker_block"),
        ({"confidence_parameters": "adapter", "confidence_gradient": "digits"}, "confidence_gradient"),
        ({"confidence_sees": "logprobs"}, "confidence_sees"),
        ({"name": "grpo", "confidence_parameters": "adapter"}, "confidence_parameters"),
    ],
)
def test_contradictions_are_refused_by_name(options, word):
    with pytest.raises(UserError, match=word):
        build_objective(ObjectiveConfig(**options))
