"""Intervals of ECE and PCE: coverage by simulation, the correction against numerical integration,
the null band.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from megatron_dcpo.calibration import binned, ece, metrics, pce
from megatron_dcpo.calibration.binned import binned_error, null_ece

PROBLEMS, REPEATS = 300, 4
TRUTHS = {  # P(right | confidence c)
    "calibrated": lambda c: c,
    "over by .05": lambda c: np.clip(c - 0.05, 0.001, 0.999),
    "over by a fifth": lambda c: 0.8 * c,
    "too extreme": lambda c: 0.1 + 0.8 * c,
}


def drawn(
    truth, problems: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences near a number of the problem's own; the repeats' labels share a cause (a Gaussian
    copula, 0.4).
    """
    own = generator.beta(0.5, 0.4, (problems, 1))
    c = np.round(np.clip(own + generator.normal(0, 0.05, (problems, REPEATS)), 0, 0.99), 2)
    cause, noise = generator.normal(size=(problems, 1)), generator.normal(size=c.shape)
    y = math.sqrt(0.4) * cause + math.sqrt(0.6) * noise < norm.ppf(truth(c))
    return c.ravel(), y.ravel().astype(float), np.repeat(np.arange(problems), REPEATS)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_interval_contains_the_true_value_in_about_95_of_100_samples(name: str) -> None:
    """The true ECE is that of 400,000 problems with P(right | c) in place of labels."""
    truth, generator = TRUTHS[name], np.random.default_rng(5)
    c, _, _ = drawn(truth, 400_000, generator)
    population = metrics.bin_rows(c, np.zeros(len(c)))
    index = np.searchsorted(population.edges[1:], c)
    true = np.abs(np.bincount(index, weights=c - truth(c))).sum() / len(c)
    covered = []
    for seed in range(300):
        found = binned_error(*drawn(truth, PROBLEMS, generator), resamples=150, seed=seed)
        covered.append(found.low - 1e-12 <= true <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.97


def test_the_correction_takes_off_the_bias_of_a_bin() -> None:
    """h(m, s) is the mean of max(x, 0) for x ~ N(m, s), by integration; far from 0 there is nothing
    to correct.
    """
    s = 0.02
    for m in (-0.05, -0.01, 0.0, 0.015, 0.2):
        mean = quad(
            lambda x, m=m: max(x, 0) * norm.pdf(x, m, s), m - 10 * s, m + 10 * s, points=[0.0]
        )[0]
        found = binned._corrected(np.array([m]), np.array([s]), True)
        assert found[0] == pytest.approx(2 * max(m, 0) - mean, abs=1e-9)
    assert binned._corrected(
        np.array([-0.2, 0.3]), np.array([s, s]), False
    ).tolist() == pytest.approx([0.2, 0.3])


def test_without_noise_the_estimate_is_the_plug_in_error() -> None:
    """Every problem is the same: no resample differs, and there is no interval."""
    c, y = np.tile([0.9, 0.9, 0.2, 0.2], 50), np.tile([1.0, 0.0, 1.0, 0.0], 50)
    ids = np.repeat(np.arange(50), 4)
    for over_only, plug_in in ((False, ece(c, y)), (True, pce(c, y))):
        found = binned_error(c, y, ids, over_only=over_only)
        assert found.estimate == pytest.approx(plug_in)
        assert np.isnan([found.low, found.high]).all()
    assert all(math.isnan(value) for value in binned_error([None], [1]))
    assert math.isnan(null_ece([]))


def test_unparsed_rows_are_left_out_with_their_problems() -> None:
    c, y = [0.8, None, 0.8, 0.3], [1, 1, 0, 0]
    assert binned_error(c, y, ["a", "b", "c", "d"], seed=2) == binned_error(
        [0.8, 0.8, 0.3], [1, 0, 0], [0, 1, 2], seed=2
    )


def test_the_null_band_is_that_of_one_bin_in_closed_form() -> None:
    """1,000 times c = 0.5: |mean y - 0.5| stays below 1.96 * 0.5 / sqrt(1000) in 95 %."""
    assert null_ece(np.full(1000, 0.5), resamples=4000) == pytest.approx(
        1.96 * 0.5 / math.sqrt(1000), rel=0.06
    )
