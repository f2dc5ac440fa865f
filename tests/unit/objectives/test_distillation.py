"""What a teacher adds to the advantages: by hand, by enumeration, and where it adds nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, build_method, resolve
from megatron_dcpo.objectives.policy_loss import teacher_advantages
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_NONE,
    BLOCK_REASONING,
    MicroBatch,
    TokenOutputs,
)
from tests.helpers.objective_cases import (
    OLD,
    flat,
    golden_judgements,
    judgement,
    loss_and_gradient,
    objective,
    samples_of,
    score,
)

EXACT = 1e-12


def tokens(blocks: list[int], **columns: torch.Tensor) -> MicroBatch:
    """Return a micro-batch of one response with the columns of its tokens."""
    n = len(blocks)
    nothing = torch.zeros(n, dtype=torch.int64)
    return MicroBatch(
        tokens=nothing[None],
        position_ids=nothing[None],
        packed_seq_params=None,
        rows=nothing,
        targets=nothing,
        sequence_ids=nothing,
        samples=(),
        R=torch.zeros(1),
        columns={"block_ids": torch.tensor(blocks), **columns},
    )


@pytest.mark.parametrize("clip", ["ppo", "cispo"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_teacher_that_is_the_policy_adds_nothing(clip: str, ratio: str) -> None:
    """log pi_teacher - log pi_old = 0: loss and gradient are those without a teacher."""
    options = {"clip": clip, "ratio": ratio}
    loss, gradient = loss_and_gradient(objective(**options))
    distilled = objective(distill_coef_reasoning=3.0, distill_coef_confidence=2.0, **options)
    same, same_gradient = loss_and_gradient(distilled, teacher_logprobs=flat(OLD))
    assert same == pytest.approx(loss, abs=EXACT)
    for a, b in zip(gradient, same_gradient, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT)


def test_alone_and_on_policy_the_policy_as_teacher_has_no_gradient() -> None:
    """posthoc on the confidence with weight 0: no reward is left, and the teacher's is 0."""
    alone = objective(
        name="posthoc",
        options={"tokens": "confidence"},
        weight_confidence=0.0,
        distill_coef_reasoning=1.0,
    )
    loss, gradient = loss_and_gradient(alone, new=OLD, teacher_logprobs=flat(OLD))
    assert loss == pytest.approx(0.0, abs=EXACT)
    assert max(np.abs(row).max() for row in gradient) <= EXACT


@pytest.mark.parametrize("block", ["reasoning", "confidence"])
def test_the_other_block_keeps_its_gradient(block: str) -> None:
    """At rho = 1 the gradient of a token is -w (A + coef d); d = 0.3 everywhere."""
    chosen = BLOCK_CONFIDENCE if block == "confidence" else BLOCK_REASONING
    options: dict[str, Any] = {f"distill_coef_{block}": 0.5}
    _, plain = loss_and_gradient(objective(), new=OLD)
    _, taught = loss_and_gradient(objective(**options), new=OLD, teacher_logprobs=flat(OLD) + 0.3)
    for sample, a, b in zip(
        score(objective(), golden_judgements(), OLD).samples, plain, taught, strict=True
    ):
        inside = sample.block_ids == chosen
        np.testing.assert_array_equal(a[~inside], b[~inside])
        expected = a[inside] - 0.5 * 0.3 * sample.weights[inside]
        np.testing.assert_allclose(b[inside], expected, rtol=0, atol=EXACT)


def test_the_mean_over_a_vocabulary_of_four_is_the_reverse_divergence_and_its_gradient() -> None:
    """E_pi[-d] = KL(pi || teacher); the policy gradient of the advantage d is that of -KL."""
    z = torch.tensor([0.4, -1.1, 0.9, 0.2], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    divergence = (p * (logp - q.log())).sum()
    (expected,) = torch.autograd.grad(divergence, z, retain_graph=True)

    # every token of the vocabulary is a response token once, weighted by its probability
    batch = tokens(
        [BLOCK_REASONING] * 4,
        advantages=torch.zeros(4, dtype=torch.float64),
        weights=p.detach(),
        teacher_logprobs=q.log(),
    )
    outputs = TokenOutputs(logp, torch.zeros(4, dtype=torch.float64))
    losses, statistics = objective(distill_coef_reasoning=1.0).loss(batch, outputs)
    (found,) = torch.autograd.grad(losses.sum(), z)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    weighted = (p.detach() * -teacher_advantages_of(batch, outputs)).sum()
    assert float(weighted) == pytest.approx(float(divergence.detach()), abs=EXACT)
    assert float(statistics["teacher_kl/reasoning"]) == pytest.approx(
        float((logp - q.log()).sum().detach()), abs=EXACT
    )


def teacher_advantages_of(batch: MicroBatch, outputs: TokenOutputs) -> torch.Tensor:
    options = resolve(ObjectiveConfig(distill_coef_reasoning=1.0))
    return teacher_advantages(batch, outputs, options)[0]


def test_a_token_that_was_not_sampled_has_no_part() -> None:
    """Not even where the teacher's number is not finite."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    batch = tokens(
        [BLOCK_REASONING, BLOCK_NONE, BLOCK_CONFIDENCE],
        advantages=torch.zeros(3),
        weights=torch.ones(3),
        teacher_logprobs=torch.tensor([-0.5, torch.nan, -0.75], dtype=torch.float64),
    )
    losses, _ = objective(distill_coef_reasoning=2.0, distill_coef_confidence=1.0).loss(
        batch, TokenOutputs(logprobs, torch.zeros(3))
    )
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.0, 0.25], abs=EXACT)


def test_the_engines_correction_weighs_the_teacher_as_it_weighs_a_reward() -> None:
    engine = flat(OLD) - 0.2
    options: dict[str, Any] = {"tis_level": "token", "tis_cap": 5.0}
    taught = {**options, "distill_coef_reasoning": 1.0}
    teacher = {"teacher_logprobs": flat(OLD) + 0.4, "engine_logprobs": engine}
    _, plain = loss_and_gradient(objective(**options), new=OLD, engine_logprobs=engine)
    _, found = loss_and_gradient(objective(**taught), new=OLD, **teacher)
    for sample, a, b in zip(
        score(objective(), golden_judgements(), OLD).samples, plain, found, strict=True
    ):
        inside = sample.block_ids == BLOCK_REASONING
        expected = a[inside] - np.exp(0.2) * 0.4 * sample.weights[inside]
        np.testing.assert_allclose(b[inside], expected, rtol=1e-9, atol=EXACT)


def test_a_saturated_group_is_trained_where_there_is_a_teacher() -> None:
    """block_groups=signal leaves its reasoning out, unless a teacher has a signal there."""
    right = samples_of([judgement("p0", 1.0, 0.9), judgement("p0", 1.0, 0.4)])
    for coef, trained in ((0.0, False), (1.0, True)):
        options: dict[str, Any] = {"distill_coef_reasoning": coef} if coef else {}
        method = objective(name="grpo", block_groups="signal", **options)
        for sample in method.score(right):
            assert bool(sample.weights[sample.block_ids == BLOCK_REASONING].any()) is trained
            assert method.has_gradient(sample) is trained


def test_the_column_is_needed() -> None:
    with pytest.raises(ValueError, match="teacher_logprobs"):
        loss_and_gradient(objective(distill_coef_reasoning=1.0))


def test_a_teacher_without_a_coefficient_is_refused() -> None:
    with pytest.raises(UserError, match=r"objective\.teacher .*objective\.distill_coef_reasoning"):
        build_method(ObjectiveConfig(teacher="somewhere"))


def test_a_method_with_another_loss_has_no_teacher() -> None:
    with pytest.raises(UserError, match=r"objective\.distill_coef_reasoning"):
        build_method(ObjectiveConfig(name="ccgspg", distill_coef_reasoning=1.0))
