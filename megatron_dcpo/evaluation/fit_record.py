"""What a post-hoc predictor was fitted on, and how confident it was then: kept in its file, so that
``dcpo serve`` can refuse another model, another prompt or another sampling, choose a threshold for
a risk, and notice a drift, and so that ``dcpo evaluate`` can say that the answers are others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from megatron_dcpo.calibration.metrics import bin_rows
from megatron_dcpo.data.prompts import ASKS, find_template
from megatron_dcpo.evaluation.model_files import digest_of_files
from megatron_dcpo.evaluation.predictor_file import Header
from megatron_dcpo.evaluation.samples import Sample, settings_next_to
from megatron_dcpo.types import CONFIDENCE_TAG

_PLACE = "@@the problem@@"  # where a template puts the problem
_ARRAYS = ("held_out_confidences", "held_out_correct", "counts", "held_out_problems")
_LEAST_OF_A_REASON = 20
# names of the arrays in the predictor's file begin with it
_PREFIX = "record/"

Value = TypeVar("Value", str, int, float)


@dataclass(frozen=True)
class FittedOn:
    """The labelled answers of a predictor: each field has the distinct values that there were.

    ``instructions`` has, for each template and form of the answer, the texts that the template puts
    around a problem. ``forms`` are those of ``data.prompts.ASKS``, ``thinking`` values of
    ``data.thinking``. ``weights`` are digests of the models' files (``model_files.py``), none for
    models of a server. An earlier release kept neither of the last two.
    """

    models: tuple[str, ...]
    templates: tuple[str, ...]
    instructions: tuple[tuple[str, ...], ...]
    temperatures: tuple[float, ...]
    top_ps: tuple[float, ...]
    top_ks: tuple[int, ...]
    markers: tuple[str, ...]
    forms: tuple[str, ...]
    thinking: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    def fits_model(self, model: str) -> bool:
        """Return whether a model, or the directory that it names, is one of the fitted ones."""
        return any(model == one or _is_same_directory(model, one) for one in self.models)

    def mixed(self) -> list[str]:
        """Return in words what differs among the evaluations of the answers."""
        values: dict[str, Sequence[object]] = {"model": self.models}
        values |= {name: getattr(self, _COMPARED[name]) for name in _OF_AN_EVALUATION}
        return [f"{name} {_words(found)}" for name, found in values.items() if len(found) > 1]

    def differences(self, asked: FittedOn) -> list[str]:
        """Return in words what ``asked``, other answers, have and these have not."""
        found = []
        other_models = [model for model in asked.models if not self.fits_model(model)]
        if other_models:
            found.append(_difference("model", other_models, self.models))
        elif self.weights and set(asked.weights) - set(self.weights):
            found.append("the model's files have changed since")
        for name, field in _COMPARED.items():
            fitted = getattr(self, field)
            others = [value for value in getattr(asked, field) if value not in fitted]
            if fitted and others:
                found.append(_difference(name, others, fitted))
        return found


# the name of a setting, and its field in FittedOn
_COMPARED = {
    "template": "templates",
    "temperature": "temperatures",
    "top_p": "top_ps",
    "top_k": "top_ks",
    "marker": "markers",
    "thinking": "thinking",
    "form of the answer": "forms",
}

# of them one evaluation has one value
_OF_AN_EVALUATION = ("temperature", "top_p", "top_k", "marker", "thinking")


def _difference(name: str, now: Sequence[object], fitted: Sequence[object]) -> str:
    return f"{name} {_words(now)}, fitted was {_words(fitted)}"


def _words(values: Sequence[object]) -> str:
    return " and ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)


def _is_same_directory(one: str, other: str) -> bool:
    return os.path.isdir(one) and os.path.realpath(one) == os.path.realpath(other)


@dataclass(frozen=True)
class FitRecord:
    """``fitted_on`` is None if it is not known. ``held_out_confidences`` and ``held_out_correct``
    [H] are the predictions on held-out answers and their labels, empty if none was held out.
    ``counts`` [20] is the histogram of the predictions on held-out answers, or else on all.
    ``finish_reasons`` are those of the fitted answers (:func:`finish_reasons_of`).
    ``held_out_problems`` [H] has for each held-out answer a number of its problem; an earlier
    release kept none, and each answer is then taken as its own problem.
    """

    fitted_on: FittedOn | None
    held_out_confidences: np.ndarray
    held_out_correct: np.ndarray
    counts: np.ndarray
    finish_reasons: tuple[str, ...] = ()
    held_out_problems: np.ndarray | None = None

    def header(self) -> dict[str, Any]:
        """Return what the header of a predictor's file says of the record."""
        fitted_on = None if self.fitted_on is None else asdict(self.fitted_on)
        return {"fitted_on": fitted_on, "finish_reasons": list(self.finish_reasons)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a predictor's file that are the record's."""
        arrays = {_PREFIX + name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in arrays.items() if array is not None}


def record_of(
    fitted_on: FittedOn | None, held_out: Sequence[Sample], predictions: Sequence[float | None]
) -> FitRecord:
    """Return the record of a fit. ``held_out`` are samples with a post-hoc confidence;
    ``predictions`` those whose distribution is kept.
    """
    confidences = []
    correct = []
    problems = []
    numbers: dict[tuple[str, str], int] = {}
    for sample in held_out:
        if sample.measures.posthoc_confidence is not None:
            confidences.append(sample.measures.posthoc_confidence)
            correct.append(float(sample.correct))
            problems.append(numbers.setdefault(sample.problem_key, len(numbers)))
    known = [value for value in predictions if value is not None]
    return FitRecord(
        fitted_on=fitted_on,
        held_out_confidences=np.array(confidences, np.float64),
        held_out_correct=np.array(correct, np.float64),
        counts=bin_rows(known, np.zeros(len(known))).count,
        held_out_problems=np.array(problems, np.int32),
    )


def finish_reasons_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the finish reasons that at least 20 of the samples have: of fewer, a fit learns too
    little to say anything of such answers.
    """
    counts = Counter(sample.response.finish_reason for sample in samples)
    return tuple(sorted(reason for reason, n in counts.items() if n >= _LEAST_OF_A_REASON))


def read_record(
    header: Header, arrays: Mapping[str, np.ndarray]
) -> tuple[FitRecord | None, dict[str, np.ndarray]]:
    """Return the record in a predictor's file, None in one that was saved without, and the other
    arrays.
    """
    rest = {}
    saved = {}
    for name, array in arrays.items():
        if name.startswith(_PREFIX):
            saved[name.removeprefix(_PREFIX)] = array
        else:
            rest[name] = array
    if not saved:
        return None, rest
    fitted_on = None
    if header.fitted_on is not None:
        fitted_on = FittedOn(**dict(header.fitted_on))
    record = FitRecord(
        fitted_on=fitted_on,
        held_out_confidences=saved["held_out_confidences"],
        held_out_correct=saved["held_out_correct"],
        counts=saved["counts"],
        finish_reasons=header.finish_reasons,
        held_out_problems=saved.get("held_out_problems"),
    )
    return record, rest


def fitted_on_of(paths: Iterable[str], samples: Sequence[Sample]) -> FittedOn | None:
    """Return what the ``samples`` of these files were, from the ``settings.json`` next to each of
    them; None if one has none, or an incomplete one.
    """
    settings = []
    for path in paths:
        found = settings_next_to(path)
        if found is None:
            return None
        settings.append(found)
    try:
        return _fitted_on_settings(settings, samples)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _fitted_on_settings(
    settings: Sequence[Mapping[str, Any]], samples: Sequence[Sample]
) -> FittedOn:
    forms = _distinct(["code" if s.is_code else s.prompt.form for s in samples])
    markers = _distinct([str(one.get("marker", CONFIDENCE_TAG)) for one in settings])
    templates = []
    for one in settings:
        templates.append(str(one["template"]))
        for source in one.get("sources", ()):
            if source.get("template"):
                templates.append(str(source["template"]))
    instructions = [
        instruction(template, marker, form)
        for template in _distinct(templates)
        for marker in markers
        for form in forms
    ]
    return FittedOn(
        models=_distinct([str(one["model"]) for one in settings]),
        templates=_distinct(templates),
        instructions=tuple(dict.fromkeys(instructions)),
        temperatures=_distinct([float(one["temperature"]) for one in settings]),
        top_ps=_distinct([float(one["top_p"]) for one in settings]),
        top_ks=_distinct([int(one["top_k"]) for one in settings]),
        markers=markers,
        forms=forms,
        thinking=_distinct([str(one.get("thinking", "off")) for one in settings]),
        weights=_distinct([digest for one in settings if (digest := digest_of_files(one))]),
    )


def _distinct(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def instruction(template: str, marker: str, form: str) -> tuple[str, ...]:
    """Return the texts that a template puts before and after a problem, none for one that leaves it
    as it is, or that is not there any more.
    """
    if form not in ASKS:
        form = "math"
    try:
        instructed = find_template(template).instruct(_PLACE, marker, form)
    except Exception:  # a template of the user's is a program, or a file that is gone
        return ()
    if isinstance(instructed, str):
        texts = [instructed]
    else:
        texts = [message["content"] for message in instructed]
    text = _PLACE.join(texts)
    parts = [part.strip() for part in text.split(_PLACE)]
    return tuple(part for part in parts if part)
