"""``dcpo objective``: rewards, advantages and loss of a few responses in JSON, in
float64 and without a model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from pydantic import ValidationError

from megatron_dcpo import codec
from megatron_dcpo.errors import UserError, did_you_mean, validation_message
from megatron_dcpo.objectives import METHODS, Method, ObjectiveConfig, build_method
from megatron_dcpo.objectives.options import option_names
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.types import (
    ConfidenceStatus,
    Judgement,
    MicroBatch,
    Prompt,
    Response,
    TokenOutputs,
    TrainingSample,
)

STATUSES: tuple[str, ...] = get_args(ConfidenceStatus)
ALIASES = {
    "range": "out_of_range",
    "trailing": "trailing_text",
    "unparseable": "unparsable",
    "no_marker": "missing",
    "multiple_markers": "multiple",
    "length": "truncated",
}
REQUIRED = ("old_logprobs", "logprobs")
COLUMNS = ("old_logprobs", "engine_logprobs", "ref_logprobs", "teacher_logprobs")
PER_TOKEN = ("logprobs", *COLUMNS, "entropy")
# of rows of samples.jsonl and of a training's samples, which may be given as they are
BESIDE_RECORDS = (
    *("version", "training_step", "pieces", "asked", "judged_by"),
    *("token_confidence", "min_logprob", "mean_entropy", "reasoning_logprob"),
    *("consistency_confidence", "features", "posthoc_confidence", "posthoc_by"),
)
_SEE_HELP = "; dcpo objective --help shows an input"


def evaluate(group: Mapping[str, Any]) -> dict[str, Any]:
    """Score ``{"method", "options", "responses"}``; every list of the result is in response order.

    Values a method does not have (the target of ``grpo``) are null. Raises :class:`UserError` for
    bad input.
    """
    _check_keys(group, ("method", "options", "responses"), "input")
    method = build_method(parse_options(group.get("method", "dcpo"), group.get("options") or {}))
    responses = group.get("responses")
    if (
        not isinstance(responses, list)
        or not responses
        or not all(isinstance(r, dict) for r in responses)
    ):
        raise UserError(f"input: responses must be a non-empty list of objects{_SEE_HELP}")
    samples = [
        sample(parse_judgement(response, i), response["old_logprobs"], i)
        for i, response in enumerate(responses)
    ]
    scores = method.group_scores(samples)
    targets, R, R_c, A_r, A_c = map(_list, method.scaled_scores(samples, scores))
    scored = method.score(samples, scores)
    return {
        "targets": targets,
        "R": R,
        "R_c": R_c,
        "advantages": {"reasoning": A_r, "confidence": A_c},
        "token_advantages": [s.advantages.tolist() for s in scored if s.advantages is not None],
        "loss": loss(method, scored, responses),
    }


def sample(judgement: Judgement, old_logprobs: Sequence[float], index: int) -> TrainingSample:
    """Return a sample with only a judgement and old log-probs."""
    ids = np.zeros(judgement.length, np.int64)
    old = np.asarray(old_logprobs, np.float64)
    response = Response(
        prompt_id=judgement.prompt_id,
        sample_index=index,
        token_ids=ids,
        logprobs=old,
        finish_reason="stop",
        weights_version=0,
    )
    return TrainingSample(
        prompt=Prompt(
            prompt_id=judgement.prompt_id, messages=(), token_ids=(), ground_truth="", task=""
        ),
        response=response,
        judgement=judgement,
        old_logprobs=old,
    )


def loss(
    method: Method, samples: Sequence[TrainingSample], responses: Sequence[Mapping[str, Any]]
) -> float:
    """Return the loss of all scored responses as one micro-batch, float64. Raises
    :class:`UserError`.
    """
    tensors = {
        name: _flat(r[name] for r in responses)
        for name in PER_TOKEN
        if all(name in r for r in responses)
    }
    if any(method.options.blocks("entropy_coef")) and "entropy" not in tensors:
        raise UserError(
            "objective.entropy_coef needs entropy for every response, and the input has none"
        )
    batch = loss_batch(samples, {name: tensors[name] for name in COLUMNS if name in tensors})
    outputs = TokenOutputs(
        tensors["logprobs"], tensors.get("entropy", torch.zeros_like(tensors["logprobs"]))
    )
    try:
        losses, _ = method.loss(batch, outputs)
    except ValueError as error:
        raise UserError(str(error)) from None
    return float(losses.sum())


def loss_batch(
    samples: Sequence[TrainingSample], columns: Mapping[str, torch.Tensor]
) -> MicroBatch:
    """Return scored samples as one micro-batch in float64 with more ``columns``. A loss can read
    it, but no model.
    """
    lengths = [len(s.response_ids) for s in samples]
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens=nothing,
        position_ids=nothing,
        packed_seq_params=None,
        rows=nothing,
        targets=nothing,
        sequence_ids=torch.arange(len(samples)).repeat_interleave(
            torch.tensor(lengths, dtype=torch.int64)
        ),
        samples=tuple(samples),
        R=torch.tensor([s.judgement.R for s in samples], dtype=torch.float64),
        columns={
            "advantages": _flat(s.advantages for s in samples),
            "block_ids": _flat((s.block_ids for s in samples), np.int64),
            "weights": _flat(s.weights for s in samples),
            **columns,
        },
    )


def parse_options(method: object, options: object) -> ObjectiveConfig:
    """Return ``options`` of ``method``, checked. Raises :class:`UserError` naming the nearest valid
    name.
    """
    if not isinstance(options, dict):
        raise UserError(f"options must be an object, got {type(options).__name__}")
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"unknown method {repr(method)[:40]}{did_you_mean(str(method), METHODS)}")
    _check_keys(options, [name for name in option_names() if name != "name"], "options")
    try:
        return ObjectiveConfig(**options, name=method)
    except ValidationError as error:
        raise UserError(f"options: {validation_message(error)}") from None


def parse_judgement(response: Mapping[str, Any], index: int) -> Judgement:
    """Return the judgement of one response of the input, a row of the codec whose version
    may be left out.

    The confidence of a malformed response is what it states (``stated``). Raises
    :class:`UserError`, which names the response, also for a key that no row has.
    """
    where = f"responses[{index}]"
    _check_keys(response, known_keys(), where)
    row = {"version": codec.VERSION, **response}
    if "status" in row:
        row["status"] = _status(row["status"], where)
    if "prompt_id" in row:
        row["prompt_id"] = str(row["prompt_id"])
    confidence = row.get("confidence")
    if confidence is not None and row.get("status") != "ok":
        row["stated"] = _number(confidence, "confidence", where)
        row["confidence"] = None
    row.setdefault("confidence", None)
    try:
        codec.check_version(row)
        judgement = codec.from_row(Judgement, row)
    except ValueError as error:
        raise UserError(f"{where}: {error}{_SEE_HELP}") from None
    if judgement.boundary is None or judgement.boundary > judgement.length:
        raise UserError(
            f"{where}: boundary must lie between 0 and length={judgement.length}, got "
            f"{judgement.boundary}"
        )
    for name in REQUIRED:
        if name not in response:
            raise UserError(f"{where}: {name} is missing{_SEE_HELP}")
    for name in PER_TOKEN:
        if name in response:
            _check_numbers(response[name], judgement.length, f"{where}: {name}")
    return judgement


def known_keys() -> list[str]:
    """Return what a response of the input may have: the columns of its tokens, and what a row of
    the codec has.
    """
    of_records = (*codec.keys_of(Judgement), *codec.keys_of(Response), *codec.keys_of(Prompt))
    return list(dict.fromkeys((*of_records, *PER_TOKEN, *BESIDE_RECORDS)))


def read(path: str) -> Mapping[str, Any]:
    """Return the JSON object in ``path``, or on stdin. Raises :class:`UserError`."""
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            text = Path(path).read_text(encoding="utf-8")
        group = parse_json(text)
    except (OSError, ValueError) as error:
        raise UserError(f"--input {path}: {' '.join(str(error).split())}") from None
    if not isinstance(group, dict):
        raise UserError(
            f"--input {path}: expected an object with method, options and responses{_SEE_HELP}"
        )
    return group


def _status(value: object, where: str) -> ConfidenceStatus:
    name = str(value).lower().replace("-", "_").replace(" ", "_")
    name = ALIASES.get(name, name)
    for status in get_args(ConfidenceStatus):
        if name == status:
            return status
    raise UserError(f"{where}: unknown status {value!r}{did_you_mean(name, STATUSES)}")


def _number(value: object, name: str, where: str) -> float:
    if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UserError(f"{where}: {name} must be a finite number, got {str(value)[:40]!r}")


def _check_numbers(values: object, length: int, where: str) -> None:
    if not isinstance(values, list) or len(values) != length:
        got = type(values).__name__
        if isinstance(values, list):
            got = f"{len(values)} values"
        raise UserError(f"{where} must have one value for each of the {length} tokens, got {got}")
    for value in values:
        _number(value, "each value", where)


def _check_keys(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in entry:
        if name not in known:
            raise UserError(f"{where}: unknown key {name!r}{did_you_mean(name, known)}")


def _flat(rows: Iterable[Any], dtype: type = np.float64) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, dtype=dtype) for row in rows]))


def _list(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
