"""What must hold for every group: invariances, gradients, scores, options."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import METHODS, ObjectiveConfig, resolve
from megatron_dcpo.objectives.advantages import MIN_BATCH_RMS, SCORING_RULES, log, normalize
from megatron_dcpo.objectives.policy_loss import importance_weights, kl_estimate
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_NONE,
    MALFORMED,
    Judgement,
    MicroBatch,
    TokenOutputs,
)
from tests.helpers.objective_cases import (
    NEW,
    OLD,
    flat,
    golden_judgements,
    judgement,
    loss_and_gradient,
    objective,
    score,
    token_batch,
)

VARIANTS: list[dict[str, Any]] = [
    {"name": name, **more}
    for name in METHODS
    for more in (
        {},
        {"preset": "verl_compat"},
        {"preset": "dcpo_proper"},
        {"loss_aggregation": "block_mean"},
    )
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Judgement], list[np.ndarray], list[np.ndarray]]:
    """One to three prompts with two to five responses each, in a random order, with log-probs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows: list[Judgement] = []
    for prompt in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(2, 5))):
            length = int(rng.integers(1, 9))
            status: Any = "ok" if rng.random() < 0.7 else MALFORMED[rng.integers(len(MALFORMED))]
            boundary = length if status == "truncated" else int(rng.integers(0, length))
            c = float(rng.random()) if status == "ok" else None
            rows.append(
                Judgement(f"p{prompt}", float(rng.random() < 0.5), c, status, boundary, length)
            )
    order = rng.permutation(len(rows))
    old = [-rng.exponential(1.0, rows[i].length) for i in order]
    new = [row + rng.normal(0, 0.3, len(row)) for row in old]
    return [rows[i] for i in order], old, new


@given(batch=batches(), lam=st.floats(0, 1))
def test_dcpo_is_the_papers_equation_written_as_loops(batch: Any, lam: float) -> None:
    """(1/N) sum_i (1/|o_i|) sum_t -min(rho A, clip(rho) A) with A_r before and A_c behind the
    boundary.
    """
    rows, old, new = batch
    total = 0.0
    for row, old_row, new_row in zip(rows, old, new, strict=True):
        group = [other for other in rows if other.prompt_id == row.prompt_id]
        accuracy = sum(other.correct for other in group) / len(group)

        def R_c(one: Judgement, accuracy: float = accuracy) -> float:
            return (
                -1.0
                if one.confidence is None
                else -abs(one.confidence - lam * accuracy - (1 - lam) * one.correct)
            )

        for t in range(row.length):
            reward = (lambda one: one.correct) if t < row.boundary else R_c
            values = [reward(other) for other in group]
            mean = sum(values) / len(values)
            std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
            A = (reward(row) - mean) / (std + 1e-6) if max(values) - min(values) >= 1e-6 else 0.0
            rho = float(np.exp(new_row[t] - old_row[t]))
            total -= min(rho * A, min(max(rho, 0.8), 1.28) * A) / row.length / len(rows)
    assert loss_and_gradient(objective(lam=lam), rows, old, new)[0] == pytest.approx(
        total, abs=1e-9
    )


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@settings(max_examples=15)
@given(batch=batches(), data=st.data())
def test_permuting_the_rows_changes_nothing(
    options: dict[str, Any], batch: Any, data: st.DataObject
) -> None:
    rows, old, new = batch
    chosen = objective(**options)
    order = data.draw(st.permutations(range(len(rows))))
    loss, gradient = loss_and_gradient(chosen, rows, old, new)
    moved, moved_gradient = loss_and_gradient(
        chosen, [rows[i] for i in order], [old[i] for i in order], [new[i] for i in order]
    )
    assert moved == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for place, i in enumerate(order):
        np.testing.assert_allclose(moved_gradient[place], gradient[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@settings(max_examples=15)
@given(
    batch=batches(),
    size=st.sampled_from([1, 2, 4, 8]),
    ranks=st.sampled_from([1, 2]),
    padding=st.integers(0, 3),
)
def test_micro_batches_ranks_and_padding_change_nothing(
    options: dict[str, Any], batch: Any, size: int, ranks: int, padding: int
) -> None:
    """The loss is the plain sum over ranks and micro-batches; the gradient is the one of everything
    at once.
    """
    rows, old, new = batch
    chosen = objective(**options)
    expected, gradient = loss_and_gradient(chosen, rows, old, new, torch.float32)
    scored = score(chosen, rows, old)
    shares = [np.arange(rank, len(rows), ranks) for rank in range(ranks)]
    total = 0.0
    for share in shares:
        for micro in np.split(share, range(size, len(share), size)):
            if not len(micro):
                continue
            samples = [scored.samples[i] for i in micro]
            packed = token_batch(
                samples, [old[i] for i in micro], [new[i] for i in micro], torch.float32
            )
            inputs, outputs = pad(*packed, padding)
            losses, _ = chosen.loss(inputs, outputs)
            losses.sum().backward()
            total += float(losses.detach().sum())
            assert outputs.logprobs.grad is not None
            found = outputs.logprobs.grad.numpy()
            np.testing.assert_array_equal(found[len(found) - padding :], 0.0)
            whole = np.concatenate([gradient[i] for i in micro])
            np.testing.assert_allclose(found[: len(whole)], whole, rtol=1e-5, atol=1e-9)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)


def pad(batch: MicroBatch, outputs: TokenOutputs, n: int) -> tuple[MicroBatch, TokenOutputs]:
    """Hostile padding tokens: NaN log-probs and weights, huge advantages, no block."""
    hostile = {"old_logprobs": -1e9, "advantages": 1e9, "weights": float("nan"), "block_ids": 0}

    def padded(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([tensor.detach(), torch.full((n,), value).to(tensor.dtype)])

    columns = {name: padded(batch.columns[name], value) for name, value in hostile.items()}
    nan = float("nan")
    logprobs = padded(outputs.logprobs, nan).requires_grad_()
    moved = dataclasses.replace(batch, sequence_ids=padded(batch.sequence_ids, 0), columns=columns)
    return moved, TokenOutputs(logprobs, padded(outputs.entropy, nan))


def test_gradient_is_zero_on_prompt_and_padding_with_every_term_on() -> None:
    chosen = objective(kl_coef=0.1, entropy_coef=0.1, tis_level="sequence", dual_clip=3.0)
    scored = score(chosen, golden_judgements(), OLD)
    batch, outputs = pad(*token_batch(scored.samples), 5)
    padding = batch.columns["block_ids"] == BLOCK_NONE
    hostile = torch.where(padding, torch.nan, batch.columns["old_logprobs"])
    more = {"ref_logprobs": hostile, "engine_logprobs": hostile}
    batch = dataclasses.replace(batch, columns={**batch.columns, **more})
    losses, stats = chosen.loss(batch, TokenOutputs(outputs.logprobs, hostile))
    losses.sum().backward()
    assert outputs.logprobs.grad is not None
    assert torch.isfinite(losses).all()
    assert losses[-5:].tolist() == [0.0] * 5
    assert outputs.logprobs.grad[-5:].tolist() == [0.0] * 5
    assert all(torch.isfinite(value) for value in stats.values())


@given(batch=batches(), scale=st.floats(0.1, 10))
def test_scaling_the_calibration_reward_moves_confidence_tokens_only(
    batch: Any, scale: float
) -> None:
    rows, old, new = batch
    plain = objective(preset="dcpo_proper")
    scored = score(plain, rows, old)
    scaled = objective(preset="dcpo_proper", weight_confidence=plain.options.weights[1] * scale)
    _, before = loss_and_gradient(plain, rows, old, new)
    _, after = loss_and_gradient(scaled, rows, old, new)
    for tokens, a, b in zip(scored.samples, before, after, strict=True):
        confidence = tokens.block_ids == BLOCK_CONFIDENCE
        np.testing.assert_array_equal(a[~confidence], b[~confidence])
        np.testing.assert_allclose(a[confidence] * scale, b[confidence], rtol=1e-9, atol=1e-15)


def test_changing_a_confidence_moves_confidence_tokens_only() -> None:
    rows = golden_judgements()
    other = [dataclasses.replace(rows[0], confidence=0.2), *rows[1:]]
    _, a = loss_and_gradient(objective(), rows)
    _, b = loss_and_gradient(objective(), other)
    for tokens, x, y in zip(score(objective(), rows).samples, a, b, strict=True):
        confidence = tokens.block_ids == BLOCK_CONFIDENCE
        np.testing.assert_array_equal(x[~confidence], y[~confidence])
    assert any((x != y).any() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["dcpo", "grpo"])
def test_on_policy_gradient_is_the_advantage(name: str) -> None:
    """At rho = 1 the gradient of a token is -A / (G |o_i|)."""
    chosen = objective(name=name)
    scored = score(chosen, golden_judgements())
    _, gradient = loss_and_gradient(chosen, new=OLD)
    for tokens, row in zip(scored.samples, gradient, strict=True):
        np.testing.assert_allclose(row, -tokens.advantages / (8 * len(row)), rtol=1e-12)


@pytest.mark.parametrize("R", [0.0, 1.0])
def test_saturated_group_keeps_its_confidence_gradient(R: float) -> None:
    rows = [judgement("p", R, c) for c in (0.2, 0.5, 0.9)]
    old = [np.full(5, -1.0)] * 3
    for preset in ("paper", "dcpo_proper", "verl_compat"):
        scored = score(objective(preset=preset), rows)
        assert scored.A_r.tolist() == [0.0] * 3
        assert np.isfinite(scored.A_c).all()
        assert np.abs(scored.A_c).min() > 0
        _, gradient = loss_and_gradient(objective(preset=preset), rows, old, old)
        assert all((row[:3] == 0).all() and (row[3:] != 0).all() for row in gradient)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.1, -0.3, 1.0, 0.7])
@pytest.mark.parametrize("how", ["std", "mean"])
def test_identical_rewards_give_exactly_zero(dtype: type, value: float, how: Any) -> None:
    options = resolve(ObjectiveConfig())
    rewards = np.full(8, value, dtype=dtype)
    assert normalize(rewards, how, options).tolist() == [0.0] * 8
    rewards[3] = np.nextafter(rewards[3], dtype(9))  # rounding noise is no difference
    assert normalize(rewards, how, options).tolist() == [0.0] * 8


def test_batch_std_is_one_scale_for_all_groups() -> None:
    """A_c centred per group, over the root mean square of the mini-batch; A_r stays as it is."""
    rows = [
        judgement(p, R, c)
        for p, R, c in (("a", 1, 0.9), ("a", 0, 0.2), ("b", 1, 0.6), ("b", 1, 0.61), ("b", 0, None))
    ]
    for baseline in ("group", "counterfactual"):
        plain = score(
            objective(advantage_normalization_confidence="mean", confidence_baseline=baseline), rows
        )
        scaled = score(
            objective(advantage_normalization_confidence="batch_std", confidence_baseline=baseline),
            rows,
        )
        np.testing.assert_allclose(
            scaled.A_c, plain.A_c / np.sqrt(np.mean(plain.A_c**2)), rtol=1e-12
        )
        np.testing.assert_array_equal(scaled.A_r, plain.A_r)
        for tokens, A_c in zip(scaled.samples, scaled.A_c, strict=True):
            assert (tokens.advantages[tokens.block_ids == BLOCK_CONFIDENCE] == A_c).all()


def test_batch_std_does_not_blow_up_what_is_almost_nothing() -> None:
    rows = [judgement(p, 1, c) for p in "ab" for c in (0.99, 0.99, 0.98)]
    plain = score(
        objective(calibration_loss="brier", advantage_normalization_confidence="mean"), rows
    )
    scaled = score(
        objective(calibration_loss="brier", advantage_normalization_confidence="batch_std"), rows
    )
    np.testing.assert_allclose(scaled.A_c, plain.A_c / MIN_BATCH_RMS, rtol=1e-12)


def test_batch_std_of_posthoc_scales_all_its_tokens_alike() -> None:
    rows = [judgement("a", R, c) for R, c in ((1, 0.9), (0, 0.2), (0, 0.7))]
    for tokens in ("all", "confidence"):
        plain = score(
            objective(name="posthoc", tokens=tokens, advantage_normalization_confidence="mean"),
            rows,
        )
        scaled = score(
            objective(
                name="posthoc", tokens=tokens, advantage_normalization_confidence="batch_std"
            ),
            rows,
        )
        scale = np.sqrt(np.mean(plain.A_c**2))
        np.testing.assert_allclose(scaled.A_c, plain.A_c / scale, rtol=1e-12)
        np.testing.assert_allclose(scaled.A_r, plain.A_r / scale, rtol=1e-12)


def score_of(name: str, c: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The score of ``name``; the logarithmic one clamps below the smallest confidence tried."""
    return log(c, target, 0.005) if name == "log" else SCORING_RULES[name](c, target)


@pytest.mark.parametrize("name", ["brier", "log", "spherical"])
@pytest.mark.parametrize("p", [0.1, 0.35, 0.5, 0.8])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_proper_scores_are_best_at_the_probability(name: str, p: float, lam: float) -> None:
    """E over R ~ Bernoulli(p) of S(c, lam p + (1 - lam) R) is largest at c = p, whatever lam."""
    c = np.linspace(0.01, 0.99, 99)
    expected = sum(
        weight * score_of(name, c, np.full_like(c, lam * p + (1 - lam) * R))
        for R, weight in ((1.0, p), (0.0, 1 - p))
    )
    assert c[np.argmax(expected)] == pytest.approx(p, abs=1e-9)


def test_l1_is_not_proper_below_lam_one() -> None:
    c, p = np.linspace(0, 1, 101), 0.7
    expected = p * SCORING_RULES["l1"](c, np.full_like(c, 1.0)) + (1 - p) * SCORING_RULES["l1"](
        c, np.zeros_like(c)
    )
    assert c[np.argmax(expected)] == 1.0


@given(st.sampled_from(sorted(SCORING_RULES)), st.floats(0, 1), st.floats(0, 1))
def test_scores_lie_between_minus_one_and_zero(name: str, c: float, target: float) -> None:
    """So the malformed penalty of -1 is never better than an honest answer."""
    value = SCORING_RULES[name](np.array([c]), np.array([target]))[0]
    assert -1 - 1e-12 <= value <= 1e-12


def test_malformed_placements() -> None:
    rows = [judgement("p", 1.0, 0.5), judgement("p", 0.0, 0.5), judgement("p", 1.0, None)]
    scores = {
        place: score(objective(malformed_placement=place), rows)
        for place in ("confidence", "reasoning", "both", "sentinel")
    }
    t = 0.5 * 2 / 3 + 0.5
    assert [scores[place].R[2] for place in scores] == [1.0, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(
        [scores[p].R_c[2] for p in scores], [-1, scores["reasoning"].R_c[:2].mean(), -1, -1 - t]
    )
    assert scores["reasoning"].A_c[2] == pytest.approx(0, abs=1e-12)
    assert score(objective(malformed_penalty=-0.5), rows).R_c[2] == -0.5


def test_posthoc_tokens() -> None:
    rows = [judgement("p", R, c) for R, c in ((1.0, 0.9), (0.0, 0.9), (1.0, 0.1))]
    everywhere, confined = (
        score(objective(name="posthoc", tokens=t), rows) for t in ("all", "confidence")
    )
    np.testing.assert_allclose(everywhere.R_c, [-0.01, -0.81, -0.81])
    np.testing.assert_array_equal(everywhere.A_r, everywhere.A_c)
    assert confined.A_r.tolist() == [0.0] * 3
    np.testing.assert_array_equal(confined.A_c, everywhere.A_c)


def test_aggregations_have_their_own_denominators() -> None:
    lengths = np.array([len(row) for row in OLD])
    for name, expected in {
        "sequence_mean": [1 / (8 * n) for n in lengths],
        "token_mean": [1 / lengths.sum()] * 8,
    }.items():
        chosen = objective(loss_aggregation=name)
        scored = score(chosen, golden_judgements())
        for row, value in zip(scored.weights, expected, strict=True):
            np.testing.assert_allclose(row, value, rtol=1e-15)
    chosen = objective(loss_aggregation="block_mean", weight_reasoning=2.0, weight_confidence=3.0)
    scored = score(chosen, golden_judgements())
    weights = np.concatenate(scored.weights)
    blocks = np.concatenate([sample.block_ids for sample in scored.samples])
    assert len(blocks) == lengths.sum()
    reasoning, confidence = ((blocks != BLOCK_CONFIDENCE).sum(), (blocks == BLOCK_CONFIDENCE).sum())
    np.testing.assert_allclose(
        weights, np.where(blocks == BLOCK_CONFIDENCE, 3 / confidence, 2 / reasoning)
    )


def test_mask_truncated_trains_nothing_on_it() -> None:
    chosen = objective(mask_truncated=True)
    scored = score(chosen, golden_judgements())
    assert [bool(row.any()) for row in scored.weights] == [True] * 7 + [False]
    np.testing.assert_allclose(scored.weights[0] * len(scored.weights[0]), 1 / 7)
    assert (loss_and_gradient(chosen)[1][7] == 0).all()


def test_kl_estimators() -> None:
    """k1 and k3 are unbiased for KL(policy || reference), k2 nearly so; k3 and k2 are never
    negative.
    """
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    exact = float((p * (p / q).log()).sum())
    d = (q / p).log()
    for name, tolerance in (("k1", 1e-7), ("k3", 1e-7), ("k2", 2e-3)):
        assert float((p * kl_estimate(d, name)).sum()) == pytest.approx(exact, abs=tolerance)
    assert (kl_estimate(d, "k3") >= 0).all()
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    bounded = kl_estimate(far, "k3")
    bounded.sum().backward()
    assert bounded.max() <= 10
    assert far.grad is not None
    assert torch.isfinite(far.grad).all()


def test_kl_estimators_by_their_gradients() -> None:
    """The mean over the policy's own samples of the estimator's gradient, no gradient through the
    sampling.
    """
    z = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    logp = torch.log_softmax(z, -1)
    p = logp.detach().exp()
    divergences = {
        "k1": torch.zeros((), dtype=torch.float64) * z.sum(),
        "k2": (logp.exp() * (logp - q.log())).sum(),
        "k3": (q * (q.log() - logp)).sum(),
    }
    for name, divergence in divergences.items():
        (expected,) = torch.autograd.grad(divergence, z, retain_graph=True)
        (found,) = torch.autograd.grad(
            (p * kl_estimate(q.log() - logp, name)).sum(), z, retain_graph=True
        )
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "kl"), [("k1", 0.2), ("k2", 0.02), ("k3", np.exp(-0.2) + 0.2 - 1)]
)
def test_kl_loss_pulls_towards_the_reference(estimator: str, kl: float) -> None:
    """kills_kl_sign: the policy is 0.2 above the reference at every token; each token adds kl_coef
    * kl.
    """
    base, gradient = loss_and_gradient(objective())
    options = {"kl_coef": 0.5, "kl_estimator": estimator}
    loss, pulled = loss_and_gradient(objective(**options), ref_logprobs=flat(NEW) - 0.2)
    assert loss - base == pytest.approx(0.5 * kl, abs=1e-12)
    assert all((b > a).all() for a, b in zip(gradient, pulled, strict=True))  # descent lowers logp


@pytest.mark.parametrize("block", ["reasoning", "confidence"])
def test_kl_and_entropy_act_on_their_block_only(block: str) -> None:
    like = flat(OLD)
    extra = {"ref_logprobs": like - 0.1, "entropy": torch.full_like(like, 2.0)}
    scored = score(objective(), golden_judgements())
    _, plain = loss_and_gradient(objective(), **extra)
    _, with_kl = loss_and_gradient(objective(**{f"kl_coef_{block}": 0.5}), **extra)
    for tokens, a, b in zip(scored.samples, plain, with_kl, strict=True):
        changed = tokens.block_ids == (BLOCK_CONFIDENCE if block == "confidence" else 1)
        np.testing.assert_array_equal(a[~changed], b[~changed])
        assert (a[changed] != b[changed]).all()
    base, _ = loss_and_gradient(objective(), **extra)
    share = (
        sum(
            (t.block_ids == (BLOCK_CONFIDENCE if block == "confidence" else 1)).mean()
            for t in scored.samples
        )
        / 8
    )
    bonus, _ = loss_and_gradient(objective(**{f"entropy_coef_{block}": 0.5}), **extra)
    assert bonus == pytest.approx(base - 0.5 * 2.0 * share, abs=1e-12)


def test_truncated_importance_sampling() -> None:
    """A constant gap of log 1.1 per token: 1.1 on each token, or 1.1^|o| capped, on the policy term
    alone.
    """
    gap = float(np.log(1.1))
    engine = flat(OLD) - gap
    base, gradient = loss_and_gradient(objective())
    token, _ = loss_and_gradient(objective(tis_level="token"), engine_logprobs=engine)
    assert token == pytest.approx(1.1 * base, rel=1e-12)
    capped, _ = loss_and_gradient(
        objective(tis_level="token", tis_cap=1.05), engine_logprobs=engine
    )
    assert capped == pytest.approx(1.05 * base, rel=1e-12)
    _, by_sequence = loss_and_gradient(
        objective(tis_level="sequence", tis_cap=2.0), engine_logprobs=engine
    )
    for a, b in zip(gradient, by_sequence, strict=True):
        np.testing.assert_allclose(b, min(1.1 ** len(a), 2.0) * a, rtol=1e-12, atol=1e-15)


# log pi_old - log pi_engine of three responses; the weights that the papers' formulas make of them,
# worked out by hand
GAPS = [np.log([1.5, 0.4, 6.0]), np.log([0.9, 1.2]), np.log([3.0, 3.0])]
PAPERS = {
    # TIS: min(pi_old / pi_engine, C) of each token; Yao et al. 2025, "Your efficient RL framework
    # secretly brings you off-policy RL training". C = 2, verl's and TRL's token_truncate
    "TIS": ({"tis_level": "token", "tis_cap": 2.0}, [[1.5, 0.4, 2.0], [0.9, 1.2], [2.0, 2.0]]),
    # IcePop: M(k) = k where alpha <= k <= beta, else 0; Ling team 2025, "Small leak can sink a
    # great ship". 0.5 and 5, verl's rollout_is_threshold "0.5_5.0"
    "IcePop": (
        {"tis_level": "token", "tis_mode": "mask", "tis_floor": 0.5, "tis_cap": 5.0},
        [[1.5, 0.0, 0.0], [0.9, 1.2], [3.0, 3.0]],
    ),
    # truncated sequence weights min(rho, C), rho = prod_t pi_old / pi_engine = 3.6, 1.08, 9; Liu et
    # al. 2025, "When speed kills stability", Seq-TIS
    "Seq-TIS": ({"tis_level": "sequence", "tis_cap": 2.0}, [[2.0] * 3, [1.08] * 2, [2.0] * 2]),
    # MIS: rho where rho <= C, else 0; the same paper, TRL's default mode sequence_mask, C = 3
    "Seq-MIS": (
        {"tis_level": "sequence", "tis_mode": "mask", "tis_cap": 3.0},
        [[0.0] * 3, [1.08] * 2, [0.0] * 2],
    ),
    # the geometric mean rho^(1/T) = 3.6^(1/3), sqrt(1.08), 3, 0 outside; the same paper, part 3
    "Geo-Mask": (
        {"tis_level": "geometric", "tis_mode": "mask", "tis_floor": 0.5, "tis_cap": 2.0},
        [[3.6 ** (1 / 3)] * 3, [1.08**0.5] * 2, [0.0] * 2],
    ),
    "geometric, truncated": (
        {"tis_level": "geometric", "tis_floor": 1.05, "tis_cap": 2.0},
        [[3.6 ** (1 / 3)] * 3, [1.05] * 2, [2.0] * 2],
    ),
}


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("padded", [False, True])
def test_importance_weights_by_their_papers(name: str, padded: bool) -> None:
    options, expected = PAPERS[name]
    lengths = [len(gap) for gap in GAPS]
    gaps, sequences = np.concatenate(GAPS), np.repeat(np.arange(3), lengths)
    blocks = np.ones(len(gaps), np.int8)
    if padded:  # behind the last response, where anything may stand
        gaps, sequences, blocks = (
            np.append(gaps, np.nan),
            np.append(sequences, 2),
            np.append(blocks, np.int8(0)),
        )
    old = torch.tensor(np.nan_to_num(gaps) - 1.0)
    batch = SimpleNamespace(
        columns={
            "old_logprobs": old,
            "engine_logprobs": torch.full_like(old, -1.0) + (torch.tensor(gaps) * 0),
            "block_ids": torch.tensor(blocks),
        },
        R=torch.zeros(3),
        sequence_ids=torch.tensor(sequences),
    )
    found = importance_weights(batch, TokenOutputs(old, old), objective(**options).options)
    np.testing.assert_allclose(found[: sum(lengths)], np.concatenate(expected), rtol=1e-12)


def test_masked_tokens_train_nothing_and_are_counted() -> None:
    """IcePop: 0 in loss and gradient where the weight lies outside; the share of such tokens is a
    statistic.
    """
    engine = flat(OLD).clone()
    engine[::3] -= float(np.log(6.0))
    options = {"tis_level": "token", "tis_mode": "mask", "tis_floor": 0.5, "tis_cap": 5.0}
    _, gradient = loss_and_gradient(objective(**options), engine_logprobs=engine)
    _, plain = loss_and_gradient(objective())
    expected = np.concatenate(plain)
    expected[::3] = 0
    np.testing.assert_allclose(np.concatenate(gradient), expected, rtol=1e-12)
    scored = score(objective(**options), golden_judgements())
    batch, outputs = token_batch(scored.samples, engine_logprobs=engine)
    _, statistics = objective(**options).loss(batch, outputs)
    blocks = np.concatenate([tokens.block_ids for tokens in scored.samples])
    masked = [float(statistics[f"tis_masked/{block}"]) for block in ("reasoning", "confidence")]
    assert masked == [np.count_nonzero(blocks[::3] == block) for block in (1, 2)]


def test_the_floor_is_below_the_cap() -> None:
    with pytest.raises(ValueError, match="tis_floor=2 must be below tis_cap=2"):
        ObjectiveConfig(tis_floor=2.0)


def test_missing_inputs_are_named() -> None:
    for options, missing in (
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"tis_level": "token"}, "engine_logprobs"),
    ):
        with pytest.raises(ValueError, match=missing):
            loss_and_gradient(objective(**options))
    with pytest.raises(ValueError, match="old_logprobs"):
        score(objective(name="ccgspg"), golden_judgements())
    with pytest.raises(ValueError, match="needs old_logprobs of all"):
        score(objective(name="ccgspg"), golden_judgements(), NEW[::-1])
    with pytest.raises(UserError, match="at least 2"):
        score(objective(), golden_judgements()[:1])
    with pytest.raises(UserError, match=r"in \[0, 1\]"):
        score(objective(), [judgement("p", 1.0, 1.2), judgement("p", 1.0, 0.2)])


def test_ccgspg_is_bounded_when_the_model_is_sure() -> None:
    rows = [judgement("p", R, None) for R in (1.0, 0.0)]
    sure = [np.zeros(5), np.full(5, -1e-9)]
    for dtype in (torch.float32, torch.float64):
        loss, gradient = loss_and_gradient(objective(name="ccgspg"), rows, sure, sure, dtype)
        assert np.isfinite(loss)
        assert all(np.isfinite(row).all() and np.abs(row).max() <= 1e4 for row in gradient)


def test_statistics_sum_over_micro_batches() -> None:
    chosen = objective(kl_coef=0.1)
    scored = score(chosen, golden_judgements())
    _, whole = chosen.loss(*token_batch(scored.samples, ref_logprobs=flat(OLD)))
    parts = []
    for rows in (range(3), range(3, 8)):
        old, new = [OLD[i] for i in rows], [NEW[i] for i in rows]
        batch = token_batch([scored.samples[i] for i in rows], old, new, ref_logprobs=flat(old))
        parts.append(chosen.loss(*batch)[1])
    assert whole["tokens/reasoning"] + whole["tokens/confidence"] == sum(map(len, OLD))
    for name, value in whole.items():
        assert float(sum(part[name] for part in parts)) == pytest.approx(float(value), rel=1e-12)
