r"""Post-hoc confidence: predictors that are trained on judged samples and leave the policy as it
is.

- ``confclass`` predicts the share of correct repeats of the problem (a soft target) from the 20
  largest log-probs of every token;
- ``logistic`` is a logistic regression on the stated confidence, the sum and mean of the
  reasoning's log-probs, and the length;
- ``temperature`` is :math:`\sigma(\mathrm{logit}(c)/T)` of one kind of confidence c;
- ``platt`` is :math:`\sigma(a\,\mathrm{logit}(c)+b)`;
- ``isotonic`` is the best non-decreasing step function of c.

``logistic`` reads whether a confidence is stated, its logit, the sum s of the reasoning block's
log-probs, log(1 - s), their mean and the number of tokens, standardized, with an L2 penalty. From
other inputs it reads less or more: ``reasoning`` leaves out what is stated, and ``task`` adds the
task to ``reasoning``: an intercept and a slope over log(1 - s) for each, as deviations from those
of all tasks, which the penalty keeps small. **With the task it is the row to beat**: training a
policy to state its confidence pays only if the stated confidence knows more than that
(docs/lab/README.md). A response of a task that was not fitted gets the intercept and the slope of
all tasks.

``turns`` is for the numbers that agents were asked for at each turn
(docs/serve.md#each-turn-of-an-agent): the logit of what is stated, with an intercept and a slope
for each turn in the same way. From the last turn on that 20 numbers are of, all have the same.

A kind in nats (``logprob``, the sum of the reasoning block's log-probs) has no logit; ``platt``
scales the value itself.

ConfClass has the settings of the DCPO paper (docs/is_it_worth_anything.md#post-hoc-confidence): 20
runs, top-20 log-probs, a three-layer perceptron of width 2048, cross-entropy with soft targets, lr
1e-4. The paper leaves the rest open. Here the input is the mean over the tokens of the 20 sorted
log-probs (``full`` adds their standard deviation and those of the last token), standardized;
training uses Adam, batches of 256, and early stopping on a tenth of the fitted problems. The
scalings are controls: if one of them does as well, the classifier has learned nothing but the
scale. Fitting, stopping and reporting never share a problem: a hash splits the problems, so that
the split is the same in every run and for every method.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.data.problem_kinds import columns_of, kind_of
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.fit_record import FitRecord, read_record
from megatron_dcpo.evaluation.predictor_file import (
    VERSION,
    PredictorInputs,
    check_arrays,
    read_file,
)
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS, RANKING_ONLY
from megatron_dcpo.runtime.files import write_atomically

# per token, if a kind of confidence or a predictor reads them
TOP_LOGPROBS = 20
# lower ones are clipped to it: some engines return -9999
LOWEST_LOGPROB = -30.0
WIDTH = 2048
STOPPING_SHARE = 0.1  # of the problems that are not held out
_EDGE = 1e-6  # logit(0) and logit(1) are infinite

# what a logistic regression may read
TURNS = "turns"
FEATURES = ("response", "reasoning", "task", TURNS)
_REASONING_INPUTS = 4
TASK_COLUMN = "kind"
MOST_TASKS = 200  # a column with more values is nearly a name of the problem
# the place of log(1 - s) among the features of the reasoning, whose slope a task may change
_SURPRISE = 1
_LEAST_OF_A_TURN = 20  # numbers for a curve

logger = logging.getLogger(__name__)

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Posthoc:
    """A fitted predictor. Its ``source`` is ``mean`` or ``full`` features, one of ``FEATURES``
    (``task:COLUMN`` if the task is in another column than ``TASK_COLUMN``), or the kind of
    confidence that is scaled. ``record`` says what it was fitted on, None outside of ``dcpo
    calibrate``.
    """

    method: str
    source: str
    weights: Weights
    record: FitRecord | None = None

    def predict(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the confidence in [0, 1] of each sample, None for one that lacks the inputs."""
        predictions: list[float | None] = [None] * len(samples)
        try:
            inputs, known = inputs_of(samples, self.source)
            if not len(known):
                return predictions
            if "tasks" in self.weights:
                fitted = self.weights["tasks"]
                tasks = _labels_of([samples[i] for i in known], self.source, fitted)
                inputs = with_tasks(inputs, tasks, fitted)
                _say_new_tasks(tasks, fitted, task_column(self.source) or "turn")
            scaled = _on_scale(self.method, self.source, inputs)
            values = _PREDICT[self.method](self.weights, scaled)
            for index, value in zip(known, values, strict=True):
                predictions[index] = float(value)
        except (LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {one_line(error, 200)}"
            raise UserError(
                f"the post-hoc predictor cannot be applied to these samples ({why})"
            ) from None
        return predictions

    def apply(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with ``posthoc_confidence``."""
        predictions = self.predict(samples)
        return [
            sample.measured(posthoc_confidence=confidence, posthoc_by=self.method)
            for sample, confidence in zip(samples, predictions, strict=True)
        ]

    def save(self, path: str | Path) -> None:
        header: dict[str, Any] = {
            "version": VERSION,
            "method": self.method,
            "source": self.source,
        }
        arrays: dict[str, Any] = dict(self.weights)
        if self.record is not None:
            header |= self.record.header()
            arrays |= self.record.arrays()
        arrays["header"] = np.array(json.dumps(header))
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomically(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Posthoc:
        """Read a predictor. Raises :class:`UserError` for a file that ``save`` has not written."""
        header, arrays = read_file(path)
        try:
            source = _checked_source(header.method, header.source)
            check_arrays(header.method, _inputs(header.method, source), arrays)
        except UserError as error:
            raise UserError(f"{path}: not a predictor of dcpo calibrate ({error})") from None
        record, weights = read_record(header, arrays)
        return cls(header.method, source, MappingProxyType(weights), record)


# ------------------------------------------------------------------------------------------- inputs


def features(top_logprobs: np.ndarray | None) -> list[float] | None:
    """Return the features [3 * 20] of log-probs [T, K] in falling order: their mean and standard
    deviation over the tokens, and those of the last token.
    """
    if top_logprobs is None or top_logprobs.size == 0:
        return None
    rows = np.full((len(top_logprobs), TOP_LOGPROBS), LOWEST_LOGPROB)
    width = min(TOP_LOGPROBS, top_logprobs.shape[1])
    rows[:, :width] = np.maximum(top_logprobs[:, :width], LOWEST_LOGPROB)
    values = np.concatenate([rows.mean(0), rows.std(0), rows[-1]])
    return [round(float(value), 6) for value in values]


def inputs_of(samples: Sequence[Sample], source: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [n, D] and the indices [n] of the samples that have them; of the source
    ``task`` those of the reasoning (:func:`with_tasks` adds the task's).
    """
    rows: list[list[float] | None]
    if source == "response":
        rows = [response_features(s) for s in samples]
    elif source == "reasoning" or task_column(source) is not None:
        rows = [reasoning_features(s) for s in samples]
    elif source == TURNS:
        stated = [s.judgement.confidence for s in samples]
        rows = [None if c is None else [float(_logit(np.array(c)))] for c in stated]
    elif source in ("mean", "full"):
        width = TOP_LOGPROBS if source == "mean" else 3 * TOP_LOGPROBS
        rows = []
        for sample in samples:
            known_features = sample.measures.features
            rows.append(None if known_features is None else known_features[:width])
    else:
        values = metrics.as_confidences([CONFIDENCE_KINDS[source](s) for s in samples])
        lowest = 0.0
        highest = 1.0
        if source in RANKING_ONLY:
            lowest = -math.inf
            highest = 0.0
        rows = [[value] if lowest <= value <= highest else None for value in values]
    known = [index for index, row in enumerate(rows) if row is not None]
    return np.array([rows[index] for index in known], np.float64), np.array(known, int)


def response_features(sample: Sample) -> list[float] | None:
    """Return six inputs: whether a confidence is stated, its logit, the sum s of the reasoning's
    log-probs, log(1 - s), the mean log-prob, and the number of tokens. None if the log-probs are
    not known.
    """
    features = reasoning_features(sample)
    if features is None:
        return None
    confidence = sample.judgement.confidence
    stated = confidence is not None
    logit = float(_logit(np.array(confidence))) if stated else 0.0
    return [float(stated), logit, *features]


def reasoning_features(sample: Sample) -> list[float] | None:
    """Return four inputs: the sum s of the reasoning's log-probs, log(1 - s), the mean log-prob,
    and the number of tokens. None if the log-probs are not known.
    """
    s = sample.measures.reasoning_logprob
    length = sample.judgement.boundary
    if s is None or length is None:
        return None
    return [s, math.log1p(-s), s / max(length, 1), float(length)]


# -------------------------------------------------------------------------------------------- tasks


def task_column(source: str) -> str | None:
    """Return the column that a source reads the task from; None if it reads none."""
    name, _, column = source.partition(":")
    if name != "task":
        return None
    return column or TASK_COLUMN


def _reads_label(source: str) -> bool:
    """Return whether a source reads the task, or the turn."""
    return source == TURNS or task_column(source) is not None


def tasks_of(samples: Sequence[Sample], column: str) -> list[str | None]:
    """Return the task of each sample (:func:`kind_of` the column), None for a sample without one.

    Raises :class:`UserError` if no sample has the column.
    """
    tasks = [kind_of(sample.prompt, column) for sample in samples]
    if all(task is None for task in tasks):
        others = ", ".join(columns_of([sample.prompt for sample in samples]))
        raise UserError(
            f"no task: none of the {len(samples)} responses has a text or a whole number in the "
            f"column {column}; name another one with dcpo calibrate --task-column ({others}), or "
            "fit without the task: --features reasoning"
        )
    return tasks


def _labels_of(
    samples: Sequence[Sample], source: str, fitted: np.ndarray | None = None
) -> list[str | None]:
    """Return the task of each sample, or for the source ``turns`` its turn, later ones counting as
    the last of the ``fitted``; in a fit as the last one that enough samples are of, or of later
    ones.
    """
    column = task_column(source)
    if column is not None:
        return tasks_of(samples, column)
    turns = [sample.turn for sample in samples]
    if fitted is not None:
        last = max(map(int, fitted))
    else:
        last = min(sorted(turns, reverse=True)[:_LEAST_OF_A_TURN][-1], MOST_TASKS)
    return [str(min(turn, last)) for turn in turns]


def with_tasks(inputs: np.ndarray, tasks: Sequence[str | None], fitted: np.ndarray) -> np.ndarray:
    """Return inputs [n, D] with a column for each of the K ``fitted`` tasks, 1 where the response
    is of that task, [n, D + K].
    """
    names = np.array([task or "" for task in tasks])
    known = np.array([task is not None for task in tasks])
    is_task = (names[:, None] == fitted[None, :]) & known[:, None]
    return np.hstack([inputs, is_task.astype(np.float64)])


def _say_new_tasks(tasks: Sequence[str | None], fitted: np.ndarray, column: str) -> None:
    """Log how many responses are of no task that was fitted."""
    counts = Counter(task for task in tasks if task not in set(fitted.tolist()))
    if not counts:
        return
    names = ", ".join(sorted(str(name) for name in counts if name is not None)[:5])
    logger.warning(
        "%d of %d responses have another %s than those that were fitted (%s), or none: they get "
        "the intercept and the slope of all tasks",
        counts.total(),
        len(tasks),
        column,
        names or "none",
    )


def _on_scale(method: str, source: str, inputs: np.ndarray) -> np.ndarray:
    """Return the values that a scaling is linear in: the logits of probabilities, or values in nats
    unchanged. The other methods read their inputs as they are.
    """
    if method in ("temperature", "platt") and source not in RANKING_ONLY:
        return _logit(inputs)
    return inputs


def is_held_out(problem: str, share: float, seed: int) -> bool:
    """Return whether a problem, with all its repeats, belongs to the held-out share."""
    digest = hashlib.blake2b(f"{seed}/{problem}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def problem_of(sample: Sample) -> str:
    """Return the name of a sample's problem."""
    return "/".join(sample.problem_key)


def soft_targets(samples: Sequence[Sample]) -> np.ndarray:
    """Return, for each sample, the share of correct repeats of its problem [N]."""
    groups: dict[str, list[bool]] = {}
    for sample in samples:
        groups.setdefault(problem_of(sample), []).append(sample.correct)
    return np.array([np.mean(groups[problem_of(sample)]) for sample in samples])


# ------------------------------------------------------------------------------------------ fitting

_FEATURES = "features (sample with dcpo evaluate --repeats 20 --features)"
_LOGPROBS = (
    "log-probs of its reasoning (sample with dcpo evaluate --model, or from an endpoint that "
    "returns log-probs)"
)
_NEEDS = {
    "response": _LOGPROBS,
    "reasoning": _LOGPROBS,
    "task": _LOGPROBS,
    TURNS: "a well-formed confidence",
    "mean": _FEATURES,
    "full": _FEATURES,
}


def needs_of(source: str) -> str:
    """Return what a sample has to have for a source to be read, in words."""
    return _NEEDS.get(source.partition(":")[0], f"a confidence of the kind {source}")


def fit(
    method: str,
    samples: Sequence[Sample],
    source: str | None = None,
    *,
    held_out: float = 0.2,
    seed: int = 0,
    epochs: int = 200,
    width: int = WIDTH,
) -> tuple[Posthoc, list[Sample]]:
    """Fit a predictor on the problems that are not held out, or on all if ``held_out`` is 0.

    Returns the predictor and the held-out samples with its predictions.

    Raises :class:`UserError` if there is nothing to learn from: no inputs, only one class, or no
    problem on one side of the split.
    """
    source = _checked_source(method, source)
    outside = [is_held_out(problem_of(sample), held_out, seed) for sample in samples]
    targets = np.array([float(sample.correct) for sample in samples])
    if method == "confclass":
        targets = soft_targets(samples)
    weights: Weights

    def side(name: str, chosen: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        index = [i for i, taken in enumerate(chosen) if taken]
        if not index:
            raise UserError(f"no problem is {name}; give more problems, or another --held-out")
        inputs, known = inputs_of([samples[i] for i in index], source)
        if not len(known):
            raise UserError(
                f"--kind {method}: none of the {len(index)} responses that are {name} has "
                f"{needs_of(source)}"
            )
        return inputs, targets[np.array(index)[known]]

    if held_out:
        side("held out", outside)
    inputs, goals = side("fitted", [not out for out in outside])
    if goals.min() == goals.max():
        outcome = "correct" if goals.min() else "wrong"
        raise UserError(f"every response is {outcome}: nothing to learn from")
    if method == "confclass":
        # The problems that decide when to stop are neither fitted nor reported on, unless there are
        # so few problems that they have to be fitted as well.
        fitted = stopping = (inputs, goals)
        stops = [
            is_held_out(f"stop/{problem_of(sample)}", STOPPING_SHARE, seed) for sample in samples
        ]
        inside = [not out and not stop for out, stop in zip(outside, stops, strict=True)]
        watched = [not out and stop for out, stop in zip(outside, stops, strict=True)]
        if any(inside) and any(watched):
            fitted = side("fitted", inside)
            stopping = side("fitted", watched)
        weights = _fit_perceptron(fitted, stopping, seed, epochs, width)
    elif _reads_label(source):
        fitted_on = [sample for sample, out in zip(samples, outside, strict=True) if not out]
        _, known = inputs_of(fitted_on, source)
        fitted_on = [fitted_on[index] for index in known]
        tasks = _labels_of(fitted_on, source)
        weights = _fit_with_tasks(inputs, tasks, goals)
    else:
        weights = _FIT[method](_on_scale(method, source, inputs), goals)
    predictor = Posthoc(method, source, MappingProxyType(dict(weights)))
    held_out_samples = [s for s, out in zip(samples, outside, strict=True) if out]
    return predictor, predictor.apply(held_out_samples)


def _checked_source(method: str, source: str | None) -> str:
    """Return the source that a method reads, its default if ``source`` is None. Raises
    :class:`UserError` for a source that it does not read.
    """
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if source is None:
        source = {"confclass": "mean", "logistic": "response"}.get(method, "token")
    reads = {"confclass": ("mean", "full"), "logistic": FEATURES}.get(
        method, tuple(CONFIDENCE_KINDS)
    )
    if source.partition(":")[0] not in reads:
        raise UserError(f"{method} does not read {source!r}; it reads {', '.join(reads)}")
    if method == "temperature" and source in RANKING_ONLY:
        raise UserError(
            f"temperature does not read {source}, which is not a probability; use platt or isotonic"
        )
    return source


def _inputs(method: str, source: str) -> PredictorInputs:
    """Return what a method reads of each answer."""
    count = 1
    if method == "confclass":
        count = TOP_LOGPROBS if source == "mean" else 3 * TOP_LOGPROBS
    elif method == "logistic":
        count = {"response": 2 + _REASONING_INPUTS, TURNS: 1}.get(source, _REASONING_INPUTS)
    return PredictorInputs(count=count, with_task=_reads_label(source))


def _logit(c: np.ndarray) -> np.ndarray:
    p = np.clip(c, _EDGE, 1.0 - _EDGE)
    return np.log(p) - np.log1p(-p)


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def _log_loss(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross-entropy of logits z [N] with targets y [N] in [0, 1]."""
    return float(np.mean(np.logaddexp(0.0, z) - y * z))


def _scale_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return mean and standard deviation of each column of inputs [N, D]."""
    return {"mean": x.mean(0), "deviation": np.maximum(x.std(0), 1e-6)}


def _standardized(scale: Weights, x: np.ndarray) -> np.ndarray:
    return (x - scale["mean"]) / scale["deviation"]


def _fit_temperature(z: np.ndarray, y: np.ndarray) -> Weights:
    from scipy.optimize import minimize_scalar

    optimum = minimize_scalar(
        lambda t: _log_loss(z / np.exp(t), y), bounds=(-7.0, 7.0), method="bounded"
    )
    return {"temperature": np.exp(np.array(optimum.x))}


def _fit_platt(z: np.ndarray, y: np.ndarray) -> Weights:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1e10, max_iter=1000, tol=1e-10).fit(z[:, None], y)
    return {"slope": model.coef_[0, 0], "intercept": model.intercept_[0]}


def _fit_logistic(x: np.ndarray, y: np.ndarray) -> Weights:
    from sklearn.linear_model import LogisticRegression

    scale = _scale_of(x)
    model = LogisticRegression(C=1.0, max_iter=1000, tol=1e-8).fit(_standardized(scale, x), y)
    return {**scale, "slopes": model.coef_[0], "intercept": model.intercept_[0]}


def _predict_logistic(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Return the probabilities of inputs [N, D], or [N, D + K] with a column for each of K
    tasks.
    """
    width = len(weights["slopes"])
    z = _standardized(weights, x[:, :width])
    logits = z @ weights["slopes"] + weights["intercept"]
    if "tasks" in weights:
        is_task = x[:, width:]
        logits = logits + is_task @ weights["task_intercepts"]
        logits = logits + (is_task @ weights["task_slopes"]) * z[:, _sloped(width)]
    return _sigmoid(logits)


def _sloped(width: int) -> int:
    """Return the place of the input whose slope a task may change: log(1 - s) among those of the
    reasoning, and the only one of a turn.
    """
    return min(_SURPRISE, width - 1)


def _fit_with_tasks(x: np.ndarray, tasks: Sequence[str | None], y: np.ndarray) -> Weights:
    """Fit a logistic regression on inputs [N, D], of which the first are the reasoning's or the one
    is what is stated, and the tasks [N], each of which has an intercept and a slope of its own. A
    single task has no deviations: the fit is that without tasks.
    """
    from sklearn.linear_model import LogisticRegression

    names = np.array(sorted({task for task in tasks if task is not None}))
    if len(names) > MOST_TASKS:
        raise UserError(
            f"--task-column: {len(names)} different values in {len(tasks)} responses are no tasks "
            f"(at most {MOST_TASKS}); name another column"
        )
    scale = _scale_of(x)
    z = _standardized(scale, x)
    width = x.shape[1]
    is_task = with_tasks(x, tasks, names)[:, width:]
    if len(names) == 1:
        is_task = np.zeros_like(is_task)
    model = LogisticRegression(C=1.0, max_iter=1000, tol=1e-8)
    model.fit(np.hstack([z, is_task, is_task * z[:, [_sloped(width)]]]), y)
    coefficients = model.coef_[0]
    return {
        **scale,
        "slopes": coefficients[:width],
        "intercept": model.intercept_[0],
        "tasks": names,
        "task_intercepts": coefficients[width : width + len(names)],
        "task_slopes": coefficients[width + len(names) :],
    }


def _fit_isotonic(c: np.ndarray, y: np.ndarray) -> Weights:
    from sklearn.isotonic import IsotonicRegression

    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(c, y)
    return {"x": model.X_thresholds_, "y": model.y_thresholds_}


Labelled = tuple[np.ndarray, np.ndarray]  # inputs [N, D] and targets [N]


def _fit_perceptron(
    fitted: Labelled, stopping: Labelled, seed: int, epochs: int, width: int
) -> Weights:
    """Fit three layers on standardized inputs; return the weights of the epoch with the least
    cross-entropy on the ``stopping`` problems.
    """
    import torch

    x, y = fitted
    x_stop, y_stop = stopping
    scale = _scale_of(x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        inputs = torch.tensor(_standardized(scale, x), dtype=torch.float32)
        inputs_stop = torch.tensor(_standardized(scale, x_stop), dtype=torch.float32)
        target = torch.tensor(y, dtype=torch.float32)
        target_stop = torch.tensor(y_stop, dtype=torch.float32)
        loss = torch.nn.BCEWithLogitsLoss()
        best = float("inf")
        waited = 0
        state = model.state_dict()
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs)).split(256):
                optimizer.zero_grad()
                loss(model(inputs[rows]).squeeze(-1), target[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                now = float(loss(model(inputs_stop).squeeze(-1), target_stop))
            if now < best - 1e-6:
                best = now
                waited = 0
                state = {name: value.clone() for name, value in model.state_dict().items()}
            else:
                waited += 1
                if waited >= 10:
                    break
    weights = dict(scale)
    for position, number in (("0", "1"), ("2", "2"), ("4", "3")):
        for kind in ("weight", "bias"):
            weights[f"{kind}{number}"] = state[f"{position}.{kind}"].numpy()
    return weights


# --------------------------------------------------------------------------------------- predicting


def _predict_perceptron(weights: Weights, x: np.ndarray) -> np.ndarray:
    h = _standardized(weights, x)
    for layer in ("1", "2"):
        h = np.maximum(h @ weights[f"weight{layer}"].T + weights[f"bias{layer}"], 0.0)
    return _sigmoid((h @ weights["weight3"].T + weights["bias3"])[:, 0])


_FIT: Mapping[str, Callable[[np.ndarray, np.ndarray], Weights]] = MappingProxyType(
    {
        "logistic": _fit_logistic,
        "temperature": lambda x, y: _fit_temperature(x[:, 0], y),
        "platt": lambda x, y: _fit_platt(x[:, 0], y),
        "isotonic": lambda x, y: _fit_isotonic(x[:, 0], y),
    }
)
_PREDICT: Mapping[str, Callable[[Weights, np.ndarray], np.ndarray]] = MappingProxyType(
    {
        "confclass": _predict_perceptron,
        "logistic": _predict_logistic,
        "temperature": lambda w, x: _sigmoid(x[:, 0] / w["temperature"]),
        "platt": lambda w, x: _sigmoid(w["slope"] * x[:, 0] + w["intercept"]),
        "isotonic": lambda w, x: np.interp(x[:, 0], w["x"], w["y"]),
    }
)
METHODS: tuple[str, ...] = tuple(_PREDICT)
