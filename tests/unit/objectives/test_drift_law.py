"""What dividing by the group's standard deviation does to a stated confidence that does not tell
problems apart: it is driven to 0 if more groups are all wrong than all right, and to 1 otherwise.

The setting: every response states c_i = c + s z_i with noise z_i of mean 0 and variance 1. The
expected gradient on c is in proportion to the drift, E[A_i (c_i - c)] = s E[A_i z_i]. As s shrinks:

* A group that is all right has the same target 1 for all its responses, so its rewards differ by
  the noise alone: R_c,i = const + a s z_i with a slope a > 0. Dividing by their own standard
  deviation cancels a and s: A_i = (z_i - mean z) / std z, and E[A_i z_i] = E[std z]. A group that
  is all wrong has the target 0, the slope is negative, and its part is -E[std z].
* In a mixed group the rewards of right and wrong responses differ by a constant (lambda < 1),
  beside which the noise vanishes: A_i does not depend on z_i, and E[A_i z_i] goes to 0. (Only where
  a right and a wrong response score the same by chance, which for L1 is at c = lambda k / G +
  (1 - lambda) / 2 with k right ones, does it need a smaller s; so c lies off these points here.)

So drift / s -> kappa (P(all G right) - P(all G wrong)) with kappa = E[std of G draws of z],
whatever c, lambda < 1 and the score are. For Gaussian noise and the population's standard deviation
(``ddof: 0``, the paper's) kappa = sqrt(2 / G) Gamma(G / 2) / Gamma((G - 1) / 2), which is .903 at
G = 8; for other noise it is at most sqrt(1 - 1 / G), .935 there (Jensen). At lambda 1 all responses
of every group have the same target, the group's accuracy, and the drift is
kappa (P(accuracy > c) - P(accuracy < c)): no collapse, the median is found.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import stats

from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.dcpo import score_group

SPREADS = (0.05, 0.01, 0.001)
PAIRS = 400  # of groups with opposite noise

# problem accuracies and their shares
MIXTURES = {
    "one accuracy, .5": ([0.5], [1.0]),
    "one accuracy, .9": ([0.9], [1.0]),
    "hard, some easy": ([0.02, 0.95], [0.7, 0.3]),
    "easy, some hard": ([0.02, 0.95], [0.3, 0.7]),
    "more right than wrong, but more groups all wrong": ([0.0, 0.75], [0.3, 0.7]),
    "uniform": (list(np.linspace(0.005, 0.995, 100)), [0.01] * 100),
}


def kappa(G: int) -> float:
    """Return E[std of G standard normal numbers], of the population's standard deviation."""
    return math.sqrt(2 / G) * math.exp(math.lgamma(G / 2) - math.lgamma((G - 1) / 2))


def right_of(mixture: str, G: int) -> np.ndarray:
    """Return the distribution [G + 1] of the number of right responses in a group."""
    accuracies, shares = MIXTURES[mixture]
    of_accuracy = stats.binom.pmf(np.arange(G + 1), G, np.array(accuracies)[:, None])
    return np.array(shares) @ of_accuracy


@functools.cache
def drift_by_right(
    G: int, spread: float, c: float = 0.17, options: tuple[tuple[str, object], ...] = ()
) -> np.ndarray:
    """Return drift / spread [G + 1] of groups with 0 to G right responses, by the trainer's own
    advantages with the preset ``paper``. Noise of opposite sign takes out what does not depend on
    it.
    """
    config = resolve(ObjectiveConfig(name="dcpo", preset="paper", **dict(options)))
    z = np.random.default_rng(0).normal(size=(PAIRS, G))
    drifts = []
    for right in range(G + 1):
        R = (np.arange(G) < right).astype(float)
        total = 0.0
        for noise in (*z, *-z):
            *_, A_c = score_group(R, c + spread * noise, np.full(G, np.nan), config)
            total += float(np.mean(A_c * noise))
        drifts.append(total / (2 * PAIRS))
    return np.array(drifts)


def test_kappa_is_the_mean_of_the_standard_deviation() -> None:
    z = np.random.default_rng(1).normal(size=(200_000, 8))
    assert kappa(8) == pytest.approx(z.std(axis=1).mean(), abs=2e-3)
    assert kappa(8) < math.sqrt(1 - 1 / 8)


@pytest.mark.parametrize("G", [4, 8, 16])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_drift_is_the_difference_of_the_saturated_groups(mixture: str, G: int) -> None:
    right = right_of(mixture, G)
    limit = kappa(G) * (right[G] - right[0])
    measured = [float(right @ drift_by_right(G, spread)) for spread in SPREADS]
    assert measured[-1] == pytest.approx(limit, abs=0.015)
    assert abs(measured[-1] - limit) <= abs(measured[0] - limit) + 0.015
    if abs(limit) > 0.03:
        assert np.sign(measured[-1]) == np.sign(limit)


def test_the_threshold_is_not_an_accuracy_of_one_half() -> None:
    """More than half of the responses are right, and still the confidence is driven to 0."""
    mixture = "more right than wrong, but more groups all wrong"
    accuracies, shares = MIXTURES[mixture]
    assert np.dot(accuracies, shares) > 0.5
    assert right_of(mixture, 8) @ drift_by_right(8, SPREADS[-1]) < -0.1


@pytest.mark.parametrize(
    ("c", "options"),
    [
        (0.81, ()),
        (0.37, (("lam", 0.0),)),
        (0.1, (("lam", 0.7),)),
        (0.17, (("calibration_loss", "brier"),)),
        (0.81, (("calibration_loss", "brier"), ("lam", 0.0))),
    ],
)
def test_neither_the_confidence_nor_lambda_nor_the_score_matters(
    c: float, options: tuple[tuple[str, object], ...]
) -> None:
    by_right = drift_by_right(8, SPREADS[-1], c, options)
    expected = np.array([-1.0, *[0.0] * 7, 1.0]) * kappa(8)
    np.testing.assert_allclose(by_right, expected, atol=0.03)


def test_at_lambda_one_every_group_pushes_towards_its_accuracy() -> None:
    by_right = drift_by_right(8, SPREADS[-1], 0.37, (("lam", 1.0),))
    expected = np.where(np.arange(9) / 8 > 0.37, 1, -1) * kappa(8)
    np.testing.assert_allclose(by_right, expected, atol=0.03)


def test_without_the_division_the_push_vanishes_with_the_spread() -> None:
    """The mean alone: saturated groups with nearly equal confidences push as little as these
    differ.
    """
    options = (("advantage_normalization_confidence", "mean"),)
    by_right = drift_by_right(8, SPREADS[-1], 0.37, options)
    assert np.abs(by_right[[0, 8]]).max() < 2 * SPREADS[-1]
