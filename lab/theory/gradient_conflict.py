"""The paper's gradient conflict (its Proposition 2), computed exactly, as stated and as proved.

A policy over K enumerable responses, pi = softmax(theta), is right on response k with R_k in {0, 1} and implies the
confidence phi_k. J = E[R] is its accuracy and c = E[phi] its mean confidence. The paper's calibration objective is

    J_cal = -l(c, t)   with the target t = J,

and its proposition says that an over-confident policy (c > J) with Cov(R, phi) > 0 has <grad J, grad J_cal> < 0 under the
inverse Fisher metric. J depends on theta as c does, so the inner product is

    -l_c Cov(R, phi) - l_t Var(R),

with the partial derivatives l_c and l_t. The paper's proof leaves the second term out, that is, it holds the target fixed.
For |c - t| and (c - t)^2, l_t = -l_c, and the inner product is l_c (Var(R) - Cov(R, phi)). It is never negative for an
over-confident policy, because Cov(R, phi) = Var(R) (E[phi | R = 1] - E[phi | R = 0]) <= Var(R): the proposition has the
wrong sign. With the target held fixed, which is what implementations do, it is -l_c Cov(R, phi) and the proposition holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def logit(p: float) -> float:
    """Return the log-odds of a probability."""
    return float(np.log(p) - np.log1p(-p))


def _likelihood_slope(c: float, t: float) -> float:
    return (c - t) / (c * (1 - c))


@dataclass(frozen=True)
class CalibrationLoss:
    """Hold l(c, t) and its partial derivatives by the confidence c and by the target t."""

    value: Callable[[float, float], float]
    slope: Callable[[float, float], float]
    target_slope: Callable[[float, float], float]


LOSSES = {
    "l1": CalibrationLoss(
        lambda c, t: abs(c - t), lambda c, t: float(np.sign(c - t)), lambda c, t: float(np.sign(t - c))
    ),
    "brier": CalibrationLoss(lambda c, t: (c - t) ** 2, lambda c, t: 2 * (c - t), lambda c, t: 2 * (t - c)),
    "kl": CalibrationLoss(
        lambda c, t: t * np.log(t / c) + (1 - t) * np.log((1 - t) / (1 - c)),
        _likelihood_slope,
        lambda c, t: logit(t) - logit(c),
    ),
    "cross_entropy": CalibrationLoss(
        lambda c, t: -(t * np.log(c) + (1 - t) * np.log1p(-c)), _likelihood_slope, lambda c, t: -logit(c)
    ),
}


@dataclass(frozen=True)
class Conflict:
    """Hold one policy's inner products <grad J, grad J_cal>, by definition and by their identities.

    ``fixed`` holds the target fixed (``fixed_identity`` = -l_c Cov(R, phi)); ``stated`` is that of the objective as the
    paper states it (``stated_identity`` = -l_c Cov(R, phi) - l_t Var(R)).
    """

    accuracy: float
    confidence: float
    covariance: float
    fixed: float
    fixed_identity: float
    stated: float
    stated_identity: float


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of a vector of logits."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def fisher_conflict(logits: np.ndarray, R: np.ndarray, phi: np.ndarray, loss: str) -> Conflict:
    """Compute both inner products of the policy softmax(``logits``) [K], right with ``R`` [K], confident with ``phi`` [K].

    The definitions use score functions, the Fisher matrix and its pseudo-inverse, in float64.
    """
    pi = softmax(np.asarray(logits, np.float64))
    score = np.eye(len(pi)) - pi  # row k: grad_theta log pi_k
    inverse = np.linalg.pinv((score.T * pi) @ score, rcond=1e-12, hermitian=True)
    grad_J, grad_c = score.T @ (pi * R), score.T @ (pi * phi)
    J, c = float(pi @ R), float(pi @ phi)
    l_c, l_t = LOSSES[loss].slope(c, J), LOSSES[loss].target_slope(c, J)
    covariance, variance = float(pi @ ((R - J) * (phi - c))), float(pi @ (R - J) ** 2)
    return Conflict(
        accuracy=J,
        confidence=c,
        covariance=covariance,
        fixed=float(grad_J @ inverse @ (-l_c * grad_c)),
        fixed_identity=-l_c * covariance,
        stated=float(grad_J @ inverse @ (-l_c * grad_c - l_t * grad_J)),
        stated_identity=-l_c * covariance - l_t * variance,
    )


def over_confident_policies(n: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Draw policies (logits, R, phi) until ``n`` of them satisfy the proposition's premises: c > J and Cov(R, phi) > 0."""
    rng = np.random.default_rng(seed)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while len(found) < n:
        size = int(rng.integers(2, 12))
        logits, R, phi = rng.normal(0, 2, size), (rng.random(size) < 0.5).astype(float), rng.random(size)
        pi = softmax(logits)
        J, c = pi @ R, pi @ phi
        if 1e-6 < J < c - 1e-6 and pi @ ((R - J) * (phi - c)) > 1e-9:
            found.append((logits, R, phi))
    return found


def negative_share(n: int) -> dict[str, dict[str, int]]:
    """Count by loss in how many of ``n`` policies that satisfy the premises each inner product is negative."""
    policies = over_confident_policies(n)
    counts: dict[str, dict[str, int]] = {}
    for loss in LOSSES:
        found = [fisher_conflict(*policy, loss) for policy in policies]
        counts[loss] = {
            "target_held_fixed": sum(one.fixed < -1e-12 for one in found),
            "as_stated": sum(one.stated < -1e-12 for one in found),
        }
    return counts
