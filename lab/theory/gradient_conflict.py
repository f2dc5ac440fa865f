"""Why accuracy and calibration pull on the same tokens in opposite directions (paper, gradient conflict), exactly.

A policy over K enumerable responses, pi = softmax(theta), is right on response k with R_k and states (or implies) the
confidence phi_k. J = E[R] is its accuracy, c = E[phi] its mean confidence, l(c) a calibration loss. The two ascent
directions meet under the Fisher metric F as

    <grad J, -grad l>_{F^-1} = grad J^T F^-1 (-l'(c) grad c) = -l'(c) Cov_pi(R, phi).

With Cov(R, phi) > 0 (confident answers are more often right) the sign is that of -l'(c): negative exactly where
l'(c) > 0, that is, where the policy is over-confident. Here the left side is computed from its definition (score
functions, Fisher matrix, pseudo-inverse), the right side from the outcomes, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CalibrationLoss:
    """l(c) against the accuracy p, and its derivative by c."""

    value: Callable[[float, float], float]
    slope: Callable[[float, float], float]


LOSSES = {
    "brier": CalibrationLoss(lambda c, p: (c - p) ** 2, lambda c, p: 2 * (c - p)),
    "l1": CalibrationLoss(lambda c, p: abs(c - p), lambda c, p: float(np.sign(c - p))),
    "log": CalibrationLoss(
        lambda c, p: -(p * np.log(c) + (1 - p) * np.log1p(-c)), lambda c, p: (c - p) / (c * (1 - c))
    ),
}


@dataclass(frozen=True)
class Conflict:
    """One policy's conflict. ``inner`` by definition, ``identity`` = -l'(c) Cov(R, phi); ``cosine`` of the directions."""

    accuracy: float
    confidence: float
    covariance: float
    slope: float
    inner: float
    identity: float
    cosine: float


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def sampled_gradient(pi: np.ndarray, chosen: np.ndarray, A: np.ndarray) -> np.ndarray:
    """Policy gradient on the logits of a softmax [K]: the mean over samples of A (one-hot(chosen) - pi)."""
    return np.asarray(np.bincount(chosen, weights=A, minlength=len(pi)) / len(chosen) - pi * A.mean())


def fisher_conflict(
    logits: np.ndarray, R: np.ndarray, phi: np.ndarray, loss: str, target: float | None = None
) -> Conflict:
    """The conflict of the policy softmax(``logits``) [K], right with ``R`` [K], confident with ``phi`` [K].

    ``target``: what the confidence is to equal, held fixed while differentiating; by default the accuracy E[R].
    """
    pi = softmax(np.asarray(logits, np.float64))
    score = np.eye(len(pi)) - pi  # row k: grad_theta log pi_k
    fisher = (score.T * pi) @ score
    grad_J, grad_c = score.T @ (pi * R), score.T @ (pi * phi)
    J, c = float(pi @ R), float(pi @ phi)
    slope = LOSSES[loss].slope(c, J if target is None else target)
    inverse = np.linalg.pinv(fisher, rcond=1e-12, hermitian=True)
    direction = -slope * grad_c
    inner = float(grad_J @ inverse @ direction)
    norms = float(np.sqrt((grad_J @ inverse @ grad_J) * (direction @ inverse @ direction)))
    covariance = float(pi @ ((R - J) * (phi - c)))
    return Conflict(J, c, covariance, slope, inner, -slope * covariance, inner / norms if norms else 0.0)


def decoupled_conflict(logits: np.ndarray, confidence_logits: np.ndarray, R: np.ndarray, levels: np.ndarray) -> float:
    """The same inner product when the confidence has parameters of its own, which is what DCPO's masks arrange.

    Answer k ~ softmax(``logits``) [K], then a level ~ softmax(``confidence_logits``) [K, L] of ``levels`` [L]; c is the mean
    level. A_c reaches the confidence tokens only, so the calibration direction has no component along ``logits``, and the
    Fisher matrix has no block between the two: the inner product is 0 by structure; it is computed all the same.
    """
    pi = softmax(np.asarray(logits, np.float64))
    K, L = confidence_logits.shape
    conditional = np.stack([softmax(row) for row in confidence_logits])
    joint = (pi[:, None] * conditional).ravel()
    score = np.zeros((K * L, K + K * L))
    for k in range(K):
        for level in range(L):
            row = score[k * L + level]
            row[:K] = np.eye(K)[k] - pi
            row[K + k * L : K + (k + 1) * L] = np.eye(L)[level] - conditional[k]
    fisher = (score.T * joint) @ score
    grad_J = score.T @ (joint * np.repeat(R, L))
    grad_c = score.T @ (joint * np.tile(levels, K))
    grad_c[:K] = 0.0  # the mask: no calibration advantage on the reasoning tokens
    c, J = float(joint @ np.tile(levels, K)), float(pi @ R)
    return float(grad_J @ np.linalg.pinv(fisher, rcond=1e-12, hermitian=True) @ (-2 * (c - J) * grad_c))
