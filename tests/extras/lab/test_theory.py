"""The theory of the lab against closed forms and a published run: gradient conflict, estimators,
scoring rules, drift.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from lab.theory import scoring_rules
from lab.theory.drift import (
    PAPER,
    PROPER,
    Advantage,
    advantages,
    right_in_groups,
    spread_within_problems,
    stable_points,
)
from lab.theory.gradient_conflict import (
    LOSSES,
    fisher_conflict,
    negative_share,
    over_confident_policies,
    slopes,
    softmax,
)
from lab.theory.scoring_rules import confidence_advantages
from lab.world2 import RECORDS, rows
from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.advantages import batch_scale
from tests.helpers.paths import REPOSITORY

PROPER_OPTIONS = {
    "lam": 0.0,
    "calibration_loss": "brier",
    "confidence_baseline": "counterfactual",
    "advantage_normalization_confidence": "batch_std",
}
CENTERED = PROPER_OPTIONS | {
    "advantage_normalization_confidence": "mean"
}  # one group has no batch to take a scale from


@pytest.mark.parametrize("loss", LOSSES)
def test_both_inner_products_are_their_identities(loss: str) -> None:
    """-l_c Cov(R, phi) with the target held fixed, -l_c Cov(R, phi) - l_t Var(R) as stated, by
    definition.
    """
    for logits, R, phi in over_confident_policies(200):
        found = fisher_conflict(logits, R, phi, loss)
        l_c, l_t = slopes(loss, found.confidence, found.accuracy)
        fixed = -l_c * found.covariance
        assert found.fixed == pytest.approx(fixed, rel=1e-10, abs=1e-10)
        assert found.stated == pytest.approx(fixed - l_t * found.variance, rel=1e-10, abs=1e-10)


def test_proposition_2_holds_for_a_fixed_target_and_has_the_wrong_sign_as_stated() -> None:
    """Over-confident policies with Cov(R, phi) > 0 (errata P13). Cross-entropy is negative for some
    of them, not for all.
    """
    counts = negative_share(300)
    assert {name: row["target_held_fixed"] for name, row in counts.items()} == dict.fromkeys(
        LOSSES, 300
    )
    assert [counts[name]["as_stated"] for name in ("l1", "brier", "kl")] == [0, 0, 0]
    assert 0 < counts["cross_entropy"]["as_stated"] < 300
    assert 0 < counts["brier_of_the_outcome"]["as_stated"] < 300


@pytest.mark.parametrize("loss", ["cross_entropy", "brier_of_the_outcome"])
def test_the_sign_is_the_propositions_up_to_one_half_for_a_score_linear_in_the_outcome(
    loss: str,
) -> None:
    """There the loss of a right response is not the lower one: l_t = S(c, 1) - S(c, 0) >= 0."""
    found = [fisher_conflict(*policy, loss) for policy in over_confident_policies(400)]
    assert all(one.stated < 0 for one in found if one.confidence <= 0.5)
    above = [one.stated > 0 for one in found if one.confidence > 0.5]
    assert 0 < sum(above) < len(above)


def test_slopes_are_the_derivatives() -> None:
    losses = {
        "l1": lambda c, t: abs(c - t),
        "brier": lambda c, t: (c - t) ** 2,
        "kl": lambda c, t: t * np.log(t / c) + (1 - t) * np.log((1 - t) / (1 - c)),
        "cross_entropy": lambda c, t: -(t * np.log(c) + (1 - t) * np.log1p(-c)),
        "brier_of_the_outcome": lambda c, t: t * (c - 1) ** 2 + (1 - t) * c**2,
    }
    for name, loss in losses.items():
        for c, t in ((0.2, 0.7), (0.9, 0.4), (0.5, 0.1)):
            by_c = (loss(c + 1e-6, t) - loss(c - 1e-6, t)) / 2e-6
            by_t = (loss(c, t + 1e-6) - loss(c, t - 1e-6)) / 2e-6
            assert slopes(name, c, t) == pytest.approx((by_c, by_t), rel=1e-6, abs=1e-9)
    assert set(losses) == set(LOSSES)


def test_the_stated_inner_product_is_the_change_along_a_natural_gradient_step() -> None:
    """Moving theta by eps F^+ grad J changes J_cal by eps times the inner product: upward, though c
    > J.
    """
    logits, R, phi = over_confident_policies(5)[4]
    found = fisher_conflict(logits, R, phi, "brier")
    step = 1e-6 * (
        R - found.accuracy
    )  # F^+ grad J up to a constant shift, which softmax does not see

    def objective(z: np.ndarray) -> float:
        return -((softmax(z) @ phi - softmax(z) @ R) ** 2)

    change = (objective(logits + step) - objective(logits - step)) / 2e-6
    assert change == pytest.approx(found.stated, rel=1e-5)
    assert change > 0


@pytest.mark.parametrize(
    "rule", [PAPER, PROPER, Advantage("l1", 0.0, "mean"), Advantage("brier", 1.0, "std")]
)
def test_the_drifts_advantages_are_the_packages(rule: Advantage) -> None:
    rng = np.random.default_rng(0)
    options = resolve(
        ObjectiveConfig(
            lam=rule.lam,
            calibration_loss=rule.loss,
            advantage_normalization_confidence=rule.normalization,
        )
    )
    for _ in range(20):
        R, c = (rng.random(8) < 0.5).astype(float), rng.random(8)
        assert advantages(c, R, rule) == pytest.approx(
            confidence_advantages(R, c, options), abs=1e-9
        )


def test_a_proper_score_drifts_to_the_accuracy_and_the_papers_away_from_it() -> None:
    right = stats.binom.pmf(np.arange(9), 8, 0.3)
    assert stable_points(right, 0.05, PROPER) == [pytest.approx(0.3, abs=0.01)]
    (low,) = stable_points(right, 0.05, PAPER)
    assert low < 0.2


def test_the_papers_advantages_predict_what_the_second_worlds_run_states() -> None:
    """Nothing is fitted: its accuracies and the spread of its confidences give a stable point
    beside .225; it is right in .488 of the cases, which is what a proper score would have it state.
    """
    run = rows(REPOSITORY / "docs" / "lab" / RECORDS)[0]["dcpo"]["test"]
    right, spread = right_in_groups(run), spread_within_problems(run)
    low, high = stable_points(right, spread, samples=1000)
    stated = np.nanmean(run.confidence)
    assert stated == pytest.approx(0.225, abs=0.001)
    assert low == pytest.approx(stated, abs=0.015)
    assert high == pytest.approx(0.72, abs=0.01)
    assert stable_points(right, spread, PROPER, samples=1000) == [
        pytest.approx(run.correct.mean(), abs=0.01)
    ]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("group_size", [1, 2, 8, 32])
def test_variance_of_the_group_target_falls_as_one_over_g(p: float, group_size: int) -> None:
    assert scoring_rules.target_variance(p, group_size) == pytest.approx(
        p * (1 - p) / group_size, rel=1e-10
    )


def test_subgradient_variance_of_single_labels_and_of_groups() -> None:
    for p in (0.1, 0.5, 0.7):
        assert scoring_rules.subgradient_variance(0.95, p, 1) == pytest.approx(4 * p * (1 - p))
    large = [scoring_rules.subgradient_variance(0.9, 0.5, G) for G in (1, 8, 32, 128)]
    assert large == sorted(large, reverse=True)
    assert large[-1] < 1e-12


def gradients(
    options: ObjectiveConfig, pi: np.ndarray, levels: np.ndarray, p: float
) -> tuple[np.ndarray, float]:
    """Return mean [L] and variance of the policy gradient (1/2) sum_i A_c,i grad log pi(c_i) of a
    tabular confidence policy, by enumeration of the labels and confidences of a group of two.
    """
    chances, found = [], []
    for labels in itertools.product((0.0, 1.0), repeat=2):
        for chosen in itertools.product(range(len(pi)), repeat=2):
            A_c = confidence_advantages(np.array(labels), levels[list(chosen)], options)
            chances.append(np.prod([p if R else 1 - p for R in labels]) * np.prod(pi[list(chosen)]))
            found.append(
                sum(a * (np.eye(len(pi))[k] - pi) for a, k in zip(A_c, chosen, strict=True)) / 2
            )
    mean = np.array(chances) @ np.array(found)
    return mean, float(np.array(chances) @ ((np.array(found) - mean) ** 2).sum(axis=1))


def test_the_counterfactual_baseline_leaves_the_mean_gradient_and_takes_noise_out() -> None:
    """A Brier score is -c^2 + (2c - 1) R: the label's noise enters with 2c - 1, and against the
    others' confidences with 2(c - mean c) only. So the gain is large for a policy that is sure of
    itself and small for one that says .5.
    """
    pi, shares = np.array([0.2, 0.6, 0.2]), []
    for center in (0.9, 0.5):
        levels = np.array([center - 0.05, center, center + 0.05])
        group, own = (
            gradients(
                resolve(ObjectiveConfig(**CENTERED | {"confidence_baseline": name})),
                pi,
                levels,
                0.4,
            )
            for name in ("group", "counterfactual")
        )
        assert group[0] * 2 == pytest.approx(own[0], abs=1e-12), (
            "the group's own member in its mean takes 1 - 1/G off"
        )
        shares.append(own[1] / (group[1] * 4))
    assert shares[0] < 0.05
    assert shares[1] > 0.5


def test_counterfactual_advantage_is_unbiased_by_enumeration() -> None:
    """E[A_c,i grad log pi(c_i)] over all labels and confidences of a group of two equals the
    gradient of E[R_c].
    """
    levels, pi, p = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.5, 0.3]), 0.7
    score = -(p * (levels - 1) ** 2 + (1 - p) * levels**2)
    expected, _ = gradients(resolve(ObjectiveConfig(**PROPER_OPTIONS)), pi, levels, p)
    assert expected == pytest.approx(pi * (score - pi @ score), abs=1e-12)


def test_counterfactual_advantage_with_malformed_responses_is_its_formula() -> None:
    R, c = np.array([1.0, 0.0, 1.0]), np.array([0.9, 0.4, np.nan])
    A_c = confidence_advantages(R, c, resolve(ObjectiveConfig(**PROPER_OPTIONS)))

    def S(j: int, t: float) -> float:
        return -1.0 if np.isnan(c[j]) else -((c[j] - t) ** 2)

    for i in range(3):
        others = [S(j, R[i]) for j in range(3) if j != i]
        assert A_c[i] == pytest.approx(S(i, R[i]) - np.mean(others))


@pytest.mark.parametrize("lam", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.7, 0.9])
def test_l1_asks_for_a_median(lam: float, p: float) -> None:
    """Of a target with an exact Rt: lam p + (1 - lam) above p = 1/2, lam p below."""
    assert scoring_rules.optimum("l1", lam, p) == pytest.approx(
        lam * p + (1 - lam) * (p > 0.5), abs=0.0051
    )


def test_proper_scores_ask_for_the_probability_and_lam_mixes_in_what_the_group_does() -> None:
    for lam, p in itertools.product((0.0, 0.5, 1.0), (0.1, 0.37, 0.8)):
        for score in ("brier", "log", "spherical")[: 2 if lam else 3]:
            assert scoring_rules.optimum(score, lam, p) == pytest.approx(p, abs=0.0051), score
        # the response shows that it is right with 0.9: E[t] = lam p + (1 - lam) 0.9
        seen = scoring_rules.optimum("brier", lam, p, q=0.9)
        assert seen == pytest.approx(lam * p + (1 - lam) * 0.9, abs=0.0051)


def test_l1_is_not_proper_at_lambda_1_with_a_group_of_eight() -> None:
    assert [scoring_rules.optimum("l1", 1.0, p, 8) for p in (0.05, 0.95)] == [0.0, 1.0]


def test_std_keeps_pushing_a_saturated_group_and_the_mean_fades() -> None:
    near, nearer = (
        np.array([0.98, 0.99, 0.98, 1.0]),
        1 - 0.1 * (1 - np.array([0.98, 0.99, 0.98, 1.0])),
    )
    paper, proper = (
        ObjectiveConfig(),
        ObjectiveConfig(**PROPER_OPTIONS | {"advantage_normalization_confidence": "mean"}),
    )
    assert scoring_rules.saturated_push(paper, nearer) == pytest.approx(
        scoring_rules.saturated_push(paper, near), rel=1e-2
    )
    assert scoring_rules.saturated_push(proper, nearer) < 0.02 * scoring_rules.saturated_push(
        proper, near
    )


def settle(
    objective: ObjectiveConfig, probabilities: tuple[float, ...], steps: int = 1000
) -> np.ndarray:
    """Train one softmax over 21 levels for each p, six groups of eight of each in a batch, with the
    trainer's advantages; return the mean confidences over the last quarter.
    """
    options, levels, rng = (resolve(objective), np.linspace(0, 1, 21), np.random.default_rng(0))
    theta, tail = np.zeros((len(probabilities), len(levels))), []
    for _ in range(steps):
        pi = np.stack([softmax(row) for row in theta])
        chosen = np.stack([rng.choice(len(levels), (6, 8), p=row) for row in pi])
        correct = (rng.random(chosen.shape) < np.reshape(probabilities, (-1, 1, 1))).astype(float)
        A_c = np.zeros(chosen.shape)
        for place in np.ndindex(chosen.shape[:2]):
            A_c[place] = confidence_advantages(correct[place], levels[chosen[place]], options)
        if options.advantage_normalization_confidence == "batch_std":
            A_c /= batch_scale(A_c)
        for row, (picked, A) in enumerate(zip(chosen, A_c, strict=True)):
            pushed = (
                np.bincount(picked.ravel(), A.ravel(), len(levels)) / A.size - pi[row] * A.mean()
            )
            theta[row] += 0.2 * options.weights[1] * pushed
        tail.append(pi @ levels)
    return np.mean(tail[-steps // 4 :], axis=0)


@pytest.mark.slow
def test_one_scale_per_batch_keeps_a_proper_score_where_the_groups_own_does_not() -> None:
    """Nine in ten are right: with a std of their own, groups that are all right push as hard as the
    others, to 1.
    """
    ends = {
        how: settle(
            ObjectiveConfig(**PROPER_OPTIONS | {"advantage_normalization_confidence": how}),
            (0.5, 0.9),
        )
        for how in ("std", "batch_std")
    }
    assert abs(ends["batch_std"][1] - 0.9) < 0.02
    assert ends["std"][1] > 0.98
    assert all(abs(end[0] - 0.5) < 0.05 for end in ends.values())


def test_every_mixture_of_right_answers_is_optimal() -> None:
    """Proposition 1 of the paper names one trajectory: no mixture of two right ones can be improved
    (errata P10).
    """
    R = np.array([1.0, 1.0, 0.0])
    for share in (0.0, 0.3, 0.5, 1.0):
        pi = np.array([share, 1 - share, 0.0])
        assert pi @ R == 1.0 == R.max()
        assert not np.any(pi * (R - pi @ R)), "the exact gradient leaves it there"


def test_the_groups_subgradient_varies_unless_its_accuracy_is_known() -> None:
    """Var sign(c - R) = 4p(1 - p); of a sampled group 4 P(below c) P(above c), up to ties, not 0
    (errata P11).
    """
    p, G = 0.4, 8
    variance = scoring_rules.subgradient_variance
    assert variance(0.7, p, 1) == pytest.approx(4 * p * (1 - p)), "4p(p - 1) would be negative"
    for c in (0.41, 0.45, 0.7):
        below = stats.binom.cdf(np.floor(c * G), G, p)
        expected = 4 * below * (1 - below)
        assert variance(c, p, G) == pytest.approx(expected)
        assert expected > 0
    assert variance(0.41, p, G) > 4 * p * (1 - p), (
        "near p the group's varies more than the single label's"
    )
    assert (variance(0.21, 0.2, G), variance(0.21, 0.2, 1)) == pytest.approx(
        (1.00, 0.64), abs=0.001
    )


def test_shared_parameters_break_theorem_1() -> None:
    """Answer and confidence read one parameter: ascent on the confidence's Brier score alone
    changes the accuracy; with a parameter each it does not (errata P12).
    """

    def score(answer: float, stated: float) -> float:
        p, c = 1 / (1 + np.exp(-answer)), 1 / (1 + np.exp(-stated))
        return -(
            p * (1 - c) ** 2 + (1 - p) * c**2
        )  # p is what is sampled: a policy gradient reaches the confidence alone

    step = 1e-5
    ascent = (score(-1.0, 1.0 + step) - score(-1.0, 1.0 - step)) / (2 * step)
    assert ascent < -0.1, "over-confident: the stated confidence is pushed down"
    shared = (
        np.array([-1.0, 1.0]) + np.array([1.0, 1.0]) * ascent
    )  # logits: theta - 1 and theta + 1 at theta = 0
    assert shared[0] < -1.1, "and with it the accuracy"
    disjoint = np.array([-1.0, 1.0]) + np.array([0.0, 1.0]) * ascent
    assert disjoint[0] == -1.0


def test_proposition_2_has_no_sign_for_a_policy_with_fewer_parameters() -> None:
    """Errata P17: one parameter, logits theta T, uniform at theta = 0."""

    def products(T: list[float], R: list[float], phi: list[float]) -> tuple[float, float]:
        score = np.array(T) - np.mean(T)
        by_accuracy = np.mean(score * R)
        by_confidence = np.mean(score * phi)
        fisher = np.mean(score**2)
        assert np.mean(phi) > np.mean(R)
        assert np.mean(np.multiply(R, phi)) > np.mean(R) * np.mean(phi)
        # J_cal = -|c - J| with c > J, the target moving, and held fixed
        as_stated = by_accuracy * (by_accuracy - by_confidence) / fisher
        return float(as_stated), float(-by_accuracy * by_confidence / fisher)

    stated, _ = products(T=[0, 0, 1], R=[1, 0, 0], phi=[0.9, 1, 0.2])
    assert stated == pytest.approx(-1 / 36)
    _, fixed = products(T=[0, 0, -1], R=[1, 0, 0], phi=[1, 0.7, 1])
    assert fixed == pytest.approx(1 / 60)
