"""The paper's gradient conflict (its Proposition 2), computed exactly, as stated and as proved.

A policy over K enumerable responses, pi = softmax(theta), is right on response k with R_k in {0, 1}
and implies the confidence phi_k; J = E[R], c = E[phi]. The paper's objective is J_cal = -l(c, t)
with the target t = J, and its proposition says that an over-confident policy (c > J) with Cov(R,
phi) > 0 has <grad J, grad J_cal> < 0 under the inverse Fisher metric. All that follows is for this
policy, which has a logit of its own for each response: for others projections on the span of the
scores take the place of R and phi, and nothing has a sign (errata P17). J depends on theta as c
does, so the inner product is -l_c Cov(R, phi) - l_t Var(R) with the partial derivatives l_c and
l_t. The
paper's proof leaves the second term out, that is, it holds the target fixed. For |c - t| and (c -
t)^2, l_t = -l_c, and it is l_c (Var(R) - Cov(R, phi)), never negative for an over-confident policy,
because Cov(R, phi) = Var(R) (E[phi | R = 1] - E[phi | R = 0]) <= Var(R): the proposition has the
wrong sign. With the target held fixed, which is what implementations do, it is -l_c Cov(R, phi) and
the proposition holds. Of a score linear in the outcome, E[S(c, R)] (cross-entropy, (c - R)^2), l_t
= S(c, 1) - S(c, 0): negative where c <= 1/2, above it of either sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOSSES = (
    "l1",
    "brier",
    "kl",
    "cross_entropy",
    "brier_of_the_outcome",
)  # the last two are linear in the outcome


def slopes(loss: str, c: float, t: float) -> tuple[float, float]:
    """Return the partial derivatives of l(c, t) by the confidence and by the target."""
    if loss == "l1":
        return float(np.sign(c - t)), float(np.sign(t - c))
    if loss.startswith(
        "brier"
    ):  # (c - t)^2, or the mean of (c - R)^2, which is (c - t)^2 + t(1 - t)
        return 2 * (c - t), 2 * (t - c) if loss == "brier" else 1 - 2 * c
    log_odds = {x: float(np.log(x) - np.log1p(-x)) for x in (c, t)}
    return (c - t) / (c * (1 - c)), (log_odds[t] if loss == "kl" else 0.0) - log_odds[c]


@dataclass(frozen=True)
class Conflict:
    """Hold one policy's inner products <grad J, grad J_cal> by definition: ``fixed`` with the
    target held fixed, ``stated`` of the objective as the paper states it; and what their identities
    are made of.
    """

    accuracy: float
    confidence: float
    covariance: float
    variance: float
    fixed: float
    stated: float


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of a vector of logits."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def fisher_conflict(logits: np.ndarray, R: np.ndarray, phi: np.ndarray, loss: str) -> Conflict:
    """Compute both inner products of the policy softmax(``logits``) [K], right with ``R`` [K],
    confident with ``phi`` [K].

    The definitions use score functions, the Fisher matrix and its pseudo-inverse, in float64.
    """
    pi = softmax(np.asarray(logits, np.float64))
    score = np.eye(len(pi)) - pi  # row k: grad_theta log pi_k
    inverse = np.linalg.pinv((score.T * pi) @ score, rcond=1e-12, hermitian=True)
    grad_J, grad_c = score.T @ (pi * R), score.T @ (pi * phi)
    J, c = float(pi @ R), float(pi @ phi)
    l_c, l_t = slopes(loss, c, J)
    return Conflict(
        accuracy=J,
        confidence=c,
        covariance=float(pi @ ((R - J) * (phi - c))),
        variance=float(pi @ (R - J) ** 2),
        fixed=float(grad_J @ inverse @ (-l_c * grad_c)),
        stated=float(grad_J @ inverse @ (-l_c * grad_c - l_t * grad_J)),
    )


def over_confident_policies(
    n: int, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Draw policies (logits, R, phi) until ``n`` of them satisfy the proposition's premises: c > J
    and Cov(R, phi) > 0.
    """
    rng = np.random.default_rng(seed)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while len(found) < n:
        size = int(rng.integers(2, 12))
        logits, R, phi = (
            rng.normal(0, 2, size),
            (rng.random(size) < 0.5).astype(float),
            rng.random(size),
        )
        pi = softmax(logits)
        J, c = pi @ R, pi @ phi
        if 1e-6 < J < c - 1e-6 and pi @ ((R - J) * (phi - c)) > 1e-9:
            found.append((logits, R, phi))
    return found


def negative_share(n: int) -> dict[str, dict[str, int]]:
    """Count by loss in how many of ``n`` policies that satisfy the premises each inner product is
    negative.
    """
    policies = over_confident_policies(n)
    found = {loss: [fisher_conflict(*policy, loss) for policy in policies] for loss in LOSSES}
    names = {"target_held_fixed": "fixed", "as_stated": "stated"}
    return {
        k: {n: sum(getattr(one, a) < -1e-12 for one in of) for n, a in names.items()}
        for k, of in found.items()
    }
