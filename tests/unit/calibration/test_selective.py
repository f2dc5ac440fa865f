"""Accuracy-coverage, adaptive and debiased errors: against definitions written out, and
scikit-learn where it has them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

from megatron_dcpo.calibration import (
    accuracy_at_coverage,
    accuracy_coverage,
    auprc,
    aurc,
    auroc,
    brier,
    ece,
    ece_adaptive,
    ece_debiased,
    nll,
    summarize,
)
from megatron_dcpo.calibration.metrics import wilson_interval
from megatron_dcpo.calibration.selective import share_interval, threshold_for_risk

rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.05, 0.15, 0.5, 0.85, 0.95, 1.0]), st.booleans()),
    min_size=1,
    max_size=7,
)


@given(rows)
def test_ties_are_the_mean_over_all_their_orders(pairs: list[tuple[float, bool]]) -> None:
    c, y = [p[0] for p in pairs], [float(p[1]) for p in pairs]
    curves = []
    for order in itertools.permutations(range(len(pairs))):
        if all(c[a] >= c[b] for a, b in itertools.pairwise(order)):
            hits = np.cumsum([y[i] for i in order])
            curves.append(hits / np.arange(1, len(pairs) + 1))
    expected = np.mean(curves, axis=0)
    coverage, accuracy = accuracy_coverage(c, y)
    np.testing.assert_allclose(accuracy, expected, atol=1e-12)
    np.testing.assert_allclose(coverage, np.arange(1, len(pairs) + 1) / len(pairs), atol=1e-12)
    assert aurc(c, y) == pytest.approx(float(np.mean(1 - expected)), abs=1e-12)
    assert accuracy_at_coverage(c, y, 1.0) == pytest.approx(float(np.mean(y)), abs=1e-12)


def test_by_hand() -> None:
    c, y = [0.9, 0.8, 0.7, 0.6, 0.5], [1, 1, 0, 1, 0]
    assert aurc(c, y) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4 + 2 / 5) / 5, abs=1e-12)
    assert accuracy_at_coverage(c, y, 0.4) == 1.0
    assert accuracy_at_coverage(c, y, 0.41) == pytest.approx(2 / 3)
    assert (
        accuracy_at_coverage(
            [1, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [1, 1, 1] + [0] * 7, 0.3
        )
        == 1.0
    )
    assert ece_adaptive(c, y, bins=2) == pytest.approx(
        (abs(0.6 - 1 / 3) + abs(0.85 - 1)) / 2, abs=1e-12
    )
    two_bins = 2 / 5 * (0.05**2 - 0.25) + 3 / 5 * ((0.8 - 2 / 3) ** 2 - 1 / 9)
    assert ece_debiased([0.45, 0.45, 0.9, 0.8, 0.7], [1, 0, 1, 1, 0], bins=2) == 0.0
    assert two_bins < 0
    assert ece_debiased([0.9] * 100, [0] * 100) == pytest.approx(0.9, abs=1e-12)


def test_the_order_of_equal_confidences_changes_no_adaptive_error() -> None:
    c, y = np.array([0.2, 0.2, 0.2, 0.2, 0.9, 0.9]), np.array([1, 0, 0, 0, 1, 1])
    groups_of_two = (abs(0.2 - 0.25) + abs(0.2 - 0.25) + abs(0.9 - 1)) / 3
    assert ece_adaptive(c, y, bins=3) == pytest.approx(groups_of_two)
    assert ece_adaptive(c[::-1], y[::-1], bins=3) == pytest.approx(groups_of_two)
    assert ece_adaptive(c[1:], y[1:], bins=3) == pytest.approx(
        (abs(0.2 - 0) + abs((0.2 + 0.9) / 2 - (0 + 1) / 2) + abs(0.9 - 1)) / 3
    )


def test_debiasing_takes_the_bias_of_a_calibrated_model() -> None:
    generator = np.random.default_rng(0)
    plain, debiased = [], []
    for _ in range(40):
        c = generator.random(400)
        y = (generator.random(400) < c).astype(float)
        plain.append(ece(c, y))
        debiased.append(ece_debiased(c, y) ** 2)
    assert np.mean(plain) > 0.05
    assert np.mean(debiased) < 0.002


def test_bins_of_one_row_add_nothing_to_the_debiased_error() -> None:
    """Numbers of uncertainty-calibration 0.1.4, ``unbiased_l2_ce`` over ten bins of equal width."""
    assert ece_debiased([0.05, 0.95], [1, 0]) == 0.0
    c = [0.05, 0.12, 0.33, 0.37, 0.38, 0.51, 0.62, 0.84, 0.88, 0.97]
    y = [1, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    pair = 2 / 10 * ((0.86 - 0.5) ** 2 - 0.25)
    three = 3 / 10 * (0.36 - 1.0) ** 2
    by_hand = (pair + three) ** 0.5
    assert by_hand == pytest.approx(0.31432467291003413, abs=1e-12)
    assert ece_debiased(c, y, bins=10) == pytest.approx(by_hand, abs=1e-12)


def test_a_calibrated_model_of_ten_rows_has_little_debiased_error() -> None:
    generator = np.random.default_rng(1)
    plain, debiased = [], []
    for _ in range(400):
        c = generator.random(10)
        y = (generator.random(10) < c).astype(float)
        plain.append(ece(c, y))
        debiased.append(ece_debiased(c, y))
    assert np.mean(debiased) < 0.4 * np.mean(plain)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1) | st.sampled_from([0.0, 0.05, 0.1, 0.15, 0.95, 1.0]), st.booleans()
        ),
        min_size=2,
        max_size=60,
    ).filter(lambda pairs: len({y for _, y in pairs}) == 2)
)
def test_equal_to_scikit_learn(pairs: list[tuple[float, bool]]) -> None:
    c, y = np.array([p[0] for p in pairs]), np.array([float(p[1]) for p in pairs])
    assert auroc(c, y) == pytest.approx(roc_auc_score(y, c), abs=1e-12)
    assert auprc(c, y) == pytest.approx(average_precision_score(y, c), abs=1e-12)
    assert brier(c, y) == pytest.approx(brier_score_loss(y, c), abs=1e-12)
    assert nll(c, y) == pytest.approx(log_loss(y, c), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("c", "y"), [([], []), ([None, float("nan")], [1, 0])])
def test_nothing_to_rank(c: list[float | None], y: list[int]) -> None:
    assert np.isnan(aurc(c, y))
    assert np.isnan(accuracy_at_coverage(c, y, 0.5))
    assert np.isnan(ece_adaptive(c, y))
    assert np.isnan(ece_debiased(c, y))
    with pytest.raises(ValueError, match="coverage"):
        accuracy_at_coverage(c, y, 0.0)


def test_scores_that_only_rank() -> None:
    found = summarize([-0.1, -0.5, -3.0], [1, 1, 0], ranking_only=True)
    assert found["auroc"] == 1.0
    assert found["aurc"] == pytest.approx(1 / 9)
    assert np.isnan(found["ece"])
    assert found["parse_rate"] == 0.0
    assert np.isnan(summarize([-0.1, -0.5, -3.0], [1, 1, 0])["auroc"])


@given(rows, st.sampled_from([0.0, 0.1, 0.25, 0.5]))
def test_the_threshold_answers_most_at_the_stated_risk(
    pairs: list[tuple[float, bool]], risk: float
) -> None:
    """By trying every confidence as the threshold."""
    c, y = np.array([p[0] for p in pairs]), np.array([float(p[1]) for p in pairs])
    best = None
    for threshold in np.unique(c):
        above = y[c >= threshold]
        if 1 - above.mean() <= risk + 1e-12 and (best is None or len(above) > best[1]):
            best = (threshold, len(above), 1 - above.mean())
    found = threshold_for_risk(c, y, risk)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.confidence == best[0]
    assert found.coverage == pytest.approx(best[1] / len(c))
    assert found.risk == pytest.approx(best[2])
    assert found.low <= found.risk + 1e-9 <= found.high + 1e-9


def test_no_rows_have_no_threshold() -> None:
    assert threshold_for_risk([], [], 0.5) is None
    assert threshold_for_risk([None, 0.5], [1, 0], 0.5) is None


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_the_interval_of_the_risk_covers_whatever_repeats_have_in_common(alike: float) -> None:
    """60 problems of 8 repeats, of which the share ``alike`` has the verdict of the first one."""
    generator = np.random.default_rng(0)
    problems = np.repeat(np.arange(60), 8)
    covered = 0
    draws = 400
    for _ in range(draws):
        own = generator.random((60, 8)) < 0.3
        copied = generator.random((60, 8)) < alike
        marked = np.where(copied, own[:, :1], own).ravel().astype(float)
        low, high = share_interval(marked, problems)
        covered += low <= 0.3 <= high
    assert covered / draws >= 0.9


def test_the_threshold_of_alike_repeats_has_the_interval_of_their_problems() -> None:
    """Eight copies of a row are one row, whatever the order and with unparsed ones between them."""
    generator = np.random.default_rng(0)
    c = np.round(generator.random(60), 2)
    y = (generator.random(60) < 0.5 + c / 2).astype(float)
    order = generator.permutation(480)
    problems = np.repeat(np.arange(60), 8)[order]
    copies = np.where(generator.random(480) < 0.1, np.nan, np.repeat(c, 8)[order])
    several = threshold_for_risk(copies, np.repeat(y, 8)[order], 0.25, problems)
    alone = threshold_for_risk(copies, np.repeat(y, 8)[order], 0.25)
    assert several is not None
    assert alone is not None
    assert several.confidence == alone.confidence
    assert several.high - several.low > 2 * (alone.high - alone.low)


def test_problems_of_one_row_have_wilsons_interval() -> None:
    marked = np.array([1.0, 0, 0, 1, 0, 0, 0])
    low, high = wilson_interval(np.array([2]), np.array([7]))
    assert share_interval(marked, np.arange(7)) == (low[0], high[0])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_or_none_marked_leaves_an_interval(value: float) -> None:
    low, high = share_interval(np.full(12, value), np.repeat(np.arange(3), 4))
    assert high - low > 0.5
    assert share_interval(np.full(12, value), np.zeros(12)) == (0.0, 1.0)
