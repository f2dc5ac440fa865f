"""Metrics against scikit-learn, brute force, the golden table of the reference sheet, and their own
definitions.
"""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

from megatron_dcpo.calibration import metrics as m

# 14 confidences on and beside the bin edges, and two that no parser should let through.
GOLDEN_C = [0, 0.05, 0.051, 0.10, 0.30, 0.30, 0.55, 0.70, 0.72, 0.85, 0.95, 0.951, 1, 1, -0.1, 1.2]
GOLDEN_Y = [0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1]

rows = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 1), st.sampled_from([i / 20 for i in range(21)])), st.booleans()
    )
)
some_rows = rows.filter(lambda r: len(r) > 0)


def split(pairs: list[tuple[float, bool]]) -> tuple[list[float], list[float]]:
    return [c for c, _ in pairs], [float(y) for _, y in pairs]


@pytest.mark.parametrize(
    ("bins", "ece", "pce"),
    [(20, 0.28625, 0.1594375), (15, 0.25125, 0.1419375), (10, 0.27375, 0.1531875)],
)
def test_golden_table(bins: int, ece: float, pce: float) -> None:
    """Reference conventions: N counts the two out-of-range rows, Brier does not, AUROC ranks them
    too.
    """
    assert m.ece(GOLDEN_C, GOLDEN_Y, bins, "all") == pytest.approx(ece, abs=1e-9)
    assert m.pce(GOLDEN_C, GOLDEN_Y, bins, "all") == pytest.approx(pce, abs=1e-9)
    assert m.brier(GOLDEN_C, GOLDEN_Y) == pytest.approx(0.2851001428571428, abs=1e-9)
    assert m.auroc(GOLDEN_C, GOLDEN_Y) == pytest.approx(0.75, abs=1e-9)
    assert m.accuracy(GOLDEN_Y) == 0.5


def test_default_denominator_leaves_invalid_rows_out() -> None:
    """ECE over N valid rows = ECE over all rows x 16 / 14: an unparsed answer must not improve the
    score.
    """
    assert m.ece(GOLDEN_C, GOLDEN_Y) == pytest.approx(0.28625 * 16 / 14, abs=1e-12)
    assert m.ece(GOLDEN_C[:14], GOLDEN_Y[:14]) == m.ece(GOLDEN_C, GOLDEN_Y)


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 20, 100])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_bins_are_right_closed_at_every_edge(bins: int, dtype: type) -> None:
    """An edge i / bins belongs to bin i - 1 (0.15 to (.10, .15]), 0 to the first; just above it
    begins the next.
    """
    edges = (np.arange(bins + 1) / bins).astype(dtype)
    assert m.bin_rows(edges, np.ones(bins + 1), bins).count.tolist() == [2] + [1] * (bins - 1)
    above = np.nextafter(edges[:-1], dtype(2))
    assert m.bin_rows(above, np.ones(bins), bins).count.tolist() == [1] * bins


def test_decimal_literals_fall_where_they_are_written() -> None:
    """Every two-decimal literal: bin ceil(20 c) - 1, computed in integers."""
    for hundredths in range(101):
        count = m.bin_rows([float(f"{hundredths / 100:.2f}")], [1]).count
        assert int(count.argmax()) == max(0, -(-hundredths // 5) - 1), hundredths


@given(some_rows)
def test_ece_is_the_brute_force_sum(pairs: list[tuple[float, bool]]) -> None:
    c, y = split(pairs)
    total = 0.0
    for b in range(20):
        low, high = b / 20, (b + 1) / 20
        members = [
            (ci, yi)
            for ci, yi in zip(c, y, strict=True)
            if low < ci <= high or (b == 0 and ci == 0)
        ]
        if members:
            gap = abs(np.mean([yi for _, yi in members]) - np.mean([ci for ci, _ in members]))
            total += len(members) / len(c) * gap
    assert m.ece(c, y) == pytest.approx(total, abs=1e-12)


@given(some_rows, st.sampled_from([1, 5, 10, 15, 20]))
def test_order_relations(pairs: list[tuple[float, bool]], bins: int) -> None:
    """PCE <= ECE <= MCE <= 1, |overconfidence| <= ECE, and flipping everything swaps over- and
    under-confidence.
    """
    c, y = split(pairs)
    ece, pce, mce = m.ece(c, y, bins), m.pce(c, y, bins), m.mce(c, y, bins)
    assert 0 <= pce <= ece <= mce + 1e-12 <= 1 + 2e-12
    assert abs(m.overconfidence(c, y)) <= ece + 1e-12
    assert ece - pce == pytest.approx(
        pce - m.overconfidence(c, y), abs=1e-9
    )  # ECE = PCE + NCE, gap = PCE - NCE
    assert m.ece_equal_mass(c, y, bins) >= abs(m.overconfidence(c, y)) - 1e-12


@given(some_rows)
def test_scores_equal_scikit_learn(pairs: list[tuple[float, bool]]) -> None:
    c, y = split(pairs)
    assert m.brier(c, y) == pytest.approx(brier_score_loss(y, c, pos_label=1), abs=1e-12)
    assert m.nll(c, y) == pytest.approx(log_loss(y, c, labels=[0, 1]), rel=1e-12, abs=1e-12)
    if 0 < sum(y) < len(y):
        assert m.auroc(c, y) == pytest.approx(roc_auc_score(y, c), abs=1e-12)
    if sum(y) > 0:
        assert m.auprc(c, y) == pytest.approx(average_precision_score(y, c), abs=1e-12)


def test_ranking_scores_on_many_tied_rows() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        c = generator.integers(0, 12, 500) / 11
        y = generator.random(500) < 0.2 + 0.6 * c
        assert m.auroc(c, y) == pytest.approx(roc_auc_score(y, c), abs=1e-12)
        assert m.auprc(c, y) == pytest.approx(average_precision_score(y, c), abs=1e-12)


@given(some_rows)
def test_brier_parts_add_up(pairs: list[tuple[float, bool]]) -> None:
    """Brier = reliability - resolution + uncertainty + within-bin; within-bin is 0 when a bin holds
    one confidence.
    """
    c, y = split(pairs)
    p = m.brier_decomposition(c, y)
    assert p.reliability - p.resolution + p.uncertainty + p.within_bin == pytest.approx(
        m.brier(c, y), abs=1e-12
    )
    centers = [(min(int(ci * 20), 19) + 0.5) / 20 for ci in c]
    assert m.brier_decomposition(centers, y).within_bin == pytest.approx(0, abs=1e-12)


def test_equal_mass_bins_keep_ties_together() -> None:
    c = [0.9] * 50 + [0.1, 0.2, 0.3, 0.4] * 10
    bins = m.bin_rows(c, np.ones(90), 10, mass=True)
    assert bins.count.sum() == 90
    assert 50 in bins.count
    assert len(bins.count) == 5


def test_empty_one_class_and_invalid_rows() -> None:
    for metric in (
        m.ece,
        m.pce,
        m.mce,
        m.ece_equal_mass,
        m.brier,
        m.nll,
        m.auroc,
        m.auprc,
        m.overconfidence,
    ):
        assert math.isnan(metric([], [])), metric
        assert math.isnan(metric([None, float("nan")], [1, 0])), metric
    assert math.isnan(m.accuracy([]))
    assert math.isnan(m.parse_rate([]))
    assert math.isnan(m.auroc([0.2, 0.9], [1, 1]))
    assert math.isnan(m.auprc([0.2, 0.9], [0, 0]))
    assert m.auroc([0.5] * 4, [1, 0, 1, 0]) == 0.5
    assert m.ece([0.5] * 4, [1, 0, 1, 0]) == 0.0
    assert m.ece([1.0], [1]) == 0.0
    assert m.nll([1.0, 0.0], [0, 1]) == pytest.approx(-math.log(np.finfo(float).eps))
    assert m.parse_rate([0.3, None, 1.2, -0.1, float("nan"), float("inf"), 1, 0]) == 3 / 8


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 confidences for 1"):
        m.ece([0.1, 0.2], [1])
    with pytest.raises(ValueError, match="only 0 and 1"):
        m.ece([0.1], [0.5])
    with pytest.raises(ValueError, match="one-dimensional"):
        m.brier(np.zeros((2, 2)), np.zeros(2))
    with pytest.raises(ValueError, match="at least 1"):
        m.ece([0.1], [1], 0)
    with pytest.raises(ValueError, match="'valid' or 'all'"):
        m.ece([0.1], [1], 20, "some")  # type: ignore[arg-type]


def test_pessimistic_puts_unparsed_answers_at_the_wrong_end() -> None:
    c, y = [0.8, None, None, 1.5], [1, 1, 0, 1]
    assert m.pessimistic(c, y).tolist() == [0.8, 0.0, 1.0, 0.0]
    assert m.pessimistic(c, y, "half").tolist() == [0.8, 0.5, 0.5, 0.5]
    assert m.ece(m.pessimistic(c, y), y) > m.ece(c, y)


def test_bootstrap_resamples_whole_problems() -> None:
    """Four equal repeats of a problem carry no more information than one: the interval must not
    shrink by half.
    """
    generator = np.random.default_rng(1)
    y = (generator.random(100) < 0.6).astype(float)
    c = np.full(100, 0.7)
    alone = m.bootstrap_ci(lambda _c, y: m.accuracy(y), c, y)
    repeated, ids = np.repeat(y, 4), np.repeat(np.arange(100), 4)
    clustered = m.bootstrap_ci(lambda _c, y: m.accuracy(y), np.repeat(c, 4), repeated, ids)
    naive = m.bootstrap_ci(lambda _c, y: m.accuracy(y), np.repeat(c, 4), repeated)
    assert clustered == alone
    assert naive[1] - naive[0] < 0.7 * (alone[1] - alone[0])
    expected = 1.96 * math.sqrt(y.mean() * (1 - y.mean()) / 100)
    assert (alone[1] - alone[0]) / 2 == pytest.approx(expected, rel=0.15)


def test_bootstrap_is_reproducible_and_defined_at_the_edges() -> None:
    generator = np.random.default_rng(2)
    c, y = generator.random(50), generator.integers(0, 2, 50)
    assert m.bootstrap_ci(m.ece, c, y, seed=3) == m.bootstrap_ci(m.ece, c, y, seed=3)
    assert all(math.isnan(v) for v in m.bootstrap_ci(m.ece, [], []))
    assert all(math.isnan(v) for v in m.bootstrap_ci(m.auroc, c, np.ones(50)))
    with pytest.raises(ValueError, match="problem ids"):
        m.bootstrap_ci(m.ece, c, y, [1, 2])


def test_wilson_interval() -> None:
    """Against scipy's, which is exact for the same formula."""
    from scipy.stats import binomtest

    low, high = m.wilson_interval(np.array([0.0, 3.0, 10.0]), np.array([10, 10, 10]))
    for i, k in enumerate([0, 3, 10]):
        expected = binomtest(k, 10).proportion_ci(method="wilson")
        assert (low[i], high[i]) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_metrics_do_not_import_torch() -> None:
    code = (
        "import sys; from megatron_dcpo.calibration import ece, summarize; "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
