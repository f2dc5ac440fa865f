"""Judged responses of the test, and rows fitted on them: on the validation problems, never on the
test's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np

LEAST_LOGPROB = -20.0  # of a response whose reasoning was not found


@dataclass(frozen=True)
class Records:
    """Hold judged responses [N] to one part, in the order of the problems; NaN where there is no
    number.
    """

    problem: np.ndarray
    kind: np.ndarray
    correct: np.ndarray
    confidence: np.ndarray
    logprob: np.ndarray
    tokens: np.ndarray

    def stating(self, confidence: np.ndarray) -> Records:
        """Return the same responses with another confidence."""
        return replace(self, confidence=confidence)


Run = Mapping[str, Records]  # part -> responses of one policy under one method
Stated = Callable[[Records], np.ndarray]
Fit = Callable[[Records], Stated]


def isotonic(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fit an isotonic curve of ``y`` over ``x``; a missing number is given the mean of ``y``."""
    from sklearn.isotonic import IsotonicRegression

    known = ~np.isnan(x)
    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x[known], y[known])
    return lambda new: np.where(np.isnan(new), y.mean(), model.predict(np.nan_to_num(new)))


def lookup(fit: Records) -> Stated:
    """Return the accuracy on the type of problem, of all types where the type is new."""
    table = {kind: fit.correct[fit.kind == kind].mean() for kind in np.unique(fit.kind)}
    of_all = fit.correct.mean()
    return lambda r: np.array([table.get(kind, of_all) for kind in r.kind])


def isotonic_per_type(fit: Records) -> Stated:
    """Fit an isotonic curve of the log-prob on each type of problem, and one on all for a
    new type.
    """
    kinds = {kind: rows_of(fit, fit.kind == kind) for kind in np.unique(fit.kind)}
    curves = {kind: isotonic(rows.logprob, rows.correct) for kind, rows in kinds.items()}
    of_all = isotonic(fit.logprob, fit.correct)

    def stated(r: Records) -> np.ndarray:
        found = of_all(r.logprob)
        for kind, curve in curves.items():
            found = np.where(r.kind == kind, curve(r.logprob), found)
        return found

    return stated


def logistic(fit: Records) -> Stated:
    """Fit a logistic regression on log(-log-prob), the number of tokens and the type, which is the
    task here: of seven forms the one with the least Brier score on the validation problems. It is
    the bar that a stated confidence has to pass. ``dcpo calibrate --features task`` fits the like
    of it, with a slope for each task too.
    """
    kinds = np.unique(fit.kind)
    curve = logistic_curve(bar_inputs(fit, kinds), fit.correct)
    return lambda r: curve(bar_inputs(r, kinds))


def bar_inputs(r: Records, kinds: np.ndarray) -> np.ndarray:
    """Return log(-log-prob), the number of tokens and which of ``kinds`` a problem is of."""
    return np.column_stack([surprise(r.logprob), r.tokens, r.kind[:, None] == kinds])


def surprise(logprob: np.ndarray) -> np.ndarray:
    """Return log(-log-prob), of ``LEAST_LOGPROB`` where there is none."""
    known = np.nan_to_num(logprob, nan=LEAST_LOGPROB)
    found: np.ndarray = np.log(np.maximum(-known, 1e-4))
    return found


def logistic_curve(features: np.ndarray, correct: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fit a logistic regression on standardized features [N, F]; return what it says of others."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(features, correct)
    return lambda new: model.predict_proba(new)[:, 1]


def isotonic_of(column: str) -> Fit:
    """Return the fit of an isotonic curve of one column."""

    def fit(records: Records) -> Stated:
        model = isotonic(getattr(records, column), records.correct)
        return lambda r: model(getattr(r, column))

    return fit


FITTED: Mapping[str, tuple[str, Fit]] = MappingProxyType(
    {
        "lookup": ("grpo", lookup),
        "logprob": ("grpo", isotonic_of("logprob")),
        "logprob_type": ("grpo", isotonic_per_type),
        "logistic": ("grpo", logistic),
        "adapter_isotonic": ("adapter", isotonic_of("confidence")),
        "adapter_tokens_isotonic": ("adapter_tokens", isotonic_of("confidence")),
    }
)


def with_fitted(runs: dict[str, Run]) -> dict[str, Run]:
    """Return the trained rows and those made of them; on the validation problems each half is
    fitted on the other one.
    """
    found = dict(runs)
    for name, (start, fit) in FITTED.items():
        if fitted := runs.get(start, {}).get("heldout"):
            stated = fit(fitted)
            parts = {
                part: records.stating(stated(records)) for part, records in runs[start].items()
            }
            found[name] = parts | {"heldout": fitted_by_halves(fitted, fit)}
    return found


def fitted_by_halves(r: Records, fit: Fit) -> Records:
    """Return the responses with a confidence fitted on the other half of the problems."""
    even, stated = r.problem % 2 == 0, np.empty(len(r.problem))
    for half in (even, ~even):
        stated[half] = fit(rows_of(r, ~half))(rows_of(r, half))
    return r.stating(stated)


def rows_of(r: Records, chosen: np.ndarray) -> Records:
    return Records(*(getattr(r, name)[chosen] for name in (f.name for f in fields(r))))
