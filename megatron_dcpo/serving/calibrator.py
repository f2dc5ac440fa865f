"""A predictor of ``dcpo calibrate`` for answers that are being served, and what it refuses: a
request that is not of the kind on which it was fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.fit_record import FitRecord, FittedOn
from megatron_dcpo.evaluation.posthoc_predictors import TOP_LOGPROBS, TURNS, Posthoc, task_column
from megatron_dcpo.runtime.served_models import ModelRow

# the names under which an upstream knows each of its models
Names = Mapping[str, Sequence[str]]

# kinds of confidence that one answer alone does not have
_NEEDS_OTHERS = ("consistency", "posthoc")
# they read what is stated and no log-probs
_STATED = ("verbal", TURNS)
_READS_TOPS = ("mean", "full", "token_entropy")
PLAIN = "raw"  # the template that sends plain text, without a chat template


@dataclass(frozen=True)
class Calibrator:
    """``fitted_on`` is None if mismatches are accepted: then no request is refused, and none is
    completed.
    """

    predictor: Posthoc
    fitted_on: FittedOn | None

    @property
    def record(self) -> FitRecord | None:
        """Return the record of the fit, None in a file that was saved without."""
        return self.predictor.record

    @property
    def name(self) -> str:
        """Return what the confidence is, for instance ``isotonic of verbal``."""
        return f"{self.predictor.method} of {self.predictor.source}"

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Return the finish reasons of the answers that were fitted."""
        return () if self.record is None else self.record.finish_reasons

    @property
    def reads_logprobs(self) -> bool:
        """Return whether the log-probs of the tokens have to be asked for."""
        return self.predictor.source not in _STATED

    @property
    def is_of_turns(self) -> bool:
        """Return whether the number of each turn has to be asked for."""
        return self.predictor.source == TURNS

    @property
    def top_logprobs(self) -> int:
        """Return how many of the largest log-probs of each token are read."""
        return TOP_LOGPROBS if self.predictor.source in _READS_TOPS else 0

    @property
    def column(self) -> str | None:
        """Return the name of the label from which the task, or the turn of a text, is read, None if
        none is.
        """
        return "turn" if self.is_of_turns else task_column(self.predictor.source)

    @property
    def tasks(self) -> list[str]:
        """Return the tasks, or the turns, whose answers were fitted, for a predictor that reads
        them.
        """
        return [str(task) for task in self.predictor.weights["tasks"].tolist()]

    def knows_task(self, task: str) -> bool:
        """Return whether answers to this task were fitted."""
        return task in self.tasks

    def completed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with the sampling options of the fit, as far as the client has left them
        out and all fitted answers had the same.
        """
        filled = dict(body)
        if self.fitted_on is None:
            return filled
        for option, values in _sampling(self.fitted_on).items():
            # a top_k of 0 is no limit, which servers know by the option's absence
            is_limit = option != "top_k" or values[0] != 0
            if len(values) == 1 and is_limit and filled.get(option) is None:
                filled[option] = values[0]
        return filled

    def mismatch(self, body: Mapping[str, Any], api: str, names: Names) -> str:
        """Return how a request differs from those that were fitted, "" if it does not.

        A prompt of token ids cannot be compared with a template, and counts as its.
        """
        if self.fitted_on is None:
            return ""
        model = str(body.get("model") or "")
        if not _is_fitted_model(model, names, self.fitted_on):
            fitted = ", ".join(self.fitted_on.models)
            return f"the model is {model or 'not named'}, fitted was {fitted}"
        for option, values in _sampling(self.fitted_on).items():
            value = body.get(option)
            if value is None and option == "top_k":
                value = 0
            if value not in values:
                fitted = " and ".join(f"{one:g}" for one in values)
                given = "not given" if value is None else value
                return f"{option} is {given}, fitted was {fitted}"
        if api == "chat" and set(self.fitted_on.templates) == {PLAIN}:
            return "this is a chat, fitted was plain text (template raw): use /v1/completions"
        for text in prompt_texts(body, api):
            if not _is_of_template(text, self.fitted_on):
                templates = ", ".join(self.fitted_on.templates)
                return f"the prompt lacks the instruction of the template {templates}"
        return ""


def load_calibrator(path: str | Path, accept_mismatch: bool = False) -> Calibrator:
    """Read a predictor. Raises :class:`UserError` for one that cannot be applied to a single
    answer, and for one that does not say what it was fitted on, unless mismatches are accepted.
    """
    predictor = Posthoc.load(path)
    if predictor.source in _NEEDS_OTHERS:
        raise UserError(
            f"{path}: it reads {predictor.source}, which a single answer does not have; fit "
            "another one, for instance dcpo calibrate --kind logistic"
        )
    if accept_mismatch:
        return Calibrator(predictor, None)
    record = predictor.record
    if record is None or record.fitted_on is None:
        raise UserError(
            f"{path}: it does not say on which model, template and sampling it was fitted; fit it "
            "again with dcpo calibrate, the samples.jsonl next to their settings.json, or give "
            "--accept-mismatch"
        )
    if len(record.fitted_on.markers) != 1:
        raise UserError(
            f"{path}: it was fitted on several confidence tags "
            f"({', '.join(record.fitted_on.markers)}); fit one for each"
        )
    return Calibrator(predictor, record.fitted_on)


def names_of(rows: Sequence[ModelRow]) -> Names:
    """Return the names of each model that an upstream lists: its id, and vLLM's ``root``, which is
    the directory or the name on the hub.
    """
    names = {}
    for row in rows:
        known = [row["id"]]
        root = row.get("root")
        if isinstance(root, str) and root not in known:
            known.append(root)
        names[row["id"]] = known
    return names


def check_models(calibrator: Calibrator, path: str, names: Names) -> None:
    """Raise :class:`UserError` if an upstream offers none of the models that were fitted."""
    fitted_on = calibrator.fitted_on
    if fitted_on is None:
        return
    if any(_is_fitted_model(model, names, fitted_on) for model in names):
        return
    raise UserError(
        f"{path}: it was fitted on {', '.join(fitted_on.models)}, and the upstream offers "
        f"{', '.join(names) or 'no model'}; fit one on its answers (dcpo evaluate --endpoint), or "
        "give --accept-mismatch"
    )


def _sampling(fitted_on: FittedOn) -> dict[str, tuple[float, ...]]:
    return {
        "temperature": fitted_on.temperatures,
        "top_p": fitted_on.top_ps,
        "top_k": fitted_on.top_ks,
    }


def _is_fitted_model(model: str, names: Names, fitted_on: FittedOn) -> bool:
    """Return whether a model is one of the fitted ones, under any of its names. A request without a
    model is for the only one that there is.
    """
    known = names.get(model, (model,))
    if not model and len(names) == 1:
        known = next(iter(names.values()))
    return any(fitted_on.fits_model(one) for one in known)


def prompt_texts(body: Mapping[str, Any], api: str) -> list[str]:
    """Return the texts of the prompts of a request: the messages of a chat together, or each
    prompt of a completion that is not token ids.
    """
    if api == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list):
            return []
        return ["\n".join(_text_of(message) for message in messages)]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        return [one for one in prompt if isinstance(one, str)]
    return []


def _text_of(message: object) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def _is_of_template(text: str, fitted_on: FittedOn) -> bool:
    return any(all(part in text for part in parts) for parts in fitted_on.instructions)
