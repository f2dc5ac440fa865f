"""A linear probe: a logistic regression on the model's state before the number of a confidence
(``states.py``).

The state has hundreds of dimensions, so the penalty matters; it is chosen by the cross-entropy on
problems that are not fitted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

FOLDS = 5
# of scikit-learn's logistic regression, on standardized inputs
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PREFIX = "probe_"


def fit_probe(
    states: np.ndarray, correct: np.ndarray, problems: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the weights of a probe on states [N, h] of answers to ``problems`` [N]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(states)
    model = LogisticRegression(C=_chosen_penalty(states, correct, problems), max_iter=2000)
    model.fit(scaler.transform(states), correct)
    slopes = model.coef_[0] / scaler.scale_
    intercept = model.intercept_[0] - slopes @ scaler.mean_
    return {f"{PREFIX}slopes": slopes, f"{PREFIX}intercept": np.array(intercept)}


def probe_logits(weights: Mapping[str, np.ndarray], states: np.ndarray) -> np.ndarray:
    """Return the logits [N] that a probe gives states [N, h]."""
    logits: np.ndarray = states @ weights[f"{PREFIX}slopes"] + weights[f"{PREFIX}intercept"]
    return logits


def cross_fitted_logits(
    states: np.ndarray, correct: np.ndarray, problems: Sequence[str]
) -> np.ndarray:
    """Return, for each answer, the logit of a probe that was fitted on other problems [N]. What is
    fitted on these logits learns how much to trust the probe on new problems.
    """
    logits = np.zeros(len(states))
    names = np.array(problems)
    for inside in _folds(problems):
        fitted = ~inside
        weights = fit_probe(states[fitted], correct[fitted], names[fitted].tolist())
        logits[inside] = probe_logits(weights, states[inside])
    return logits


def _chosen_penalty(states: np.ndarray, correct: np.ndarray, problems: Sequence[str]) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.preprocessing import StandardScaler

    losses = dict.fromkeys(PENALTIES, 0.0)
    for inside in _folds(problems):
        if len(set(correct[~inside])) < 2:
            continue
        scaler = StandardScaler().fit(states[~inside])
        for penalty in PENALTIES:
            model = LogisticRegression(C=penalty, max_iter=2000)
            with warnings.catch_warnings():
                # a weak penalty need not converge; it is then not chosen, or good enough
                warnings.simplefilter("ignore")
                model.fit(scaler.transform(states[~inside]), correct[~inside])
            predicted = model.predict_proba(scaler.transform(states[inside]))
            losses[penalty] += log_loss(
                correct[inside], predicted, labels=[0.0, 1.0], normalize=False
            )
    return min(PENALTIES, key=lambda penalty: losses[penalty])


def _folds(problems: Sequence[str]) -> list[np.ndarray]:
    """Return which answers [N] are in each fold; the answers to a problem are in one."""
    from sklearn.model_selection import GroupKFold

    folds = min(FOLDS, len(set(problems)))
    inside = []
    for _, rows in GroupKFold(n_splits=folds).split(problems, groups=problems):
        chosen = np.zeros(len(problems), bool)
        chosen[rows] = True
        inside.append(chosen)
    return inside
