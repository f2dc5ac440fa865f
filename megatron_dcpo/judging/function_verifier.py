"""A user's verifier: a function by import path, which runs in killable worker processes.

Its signature is told by its parameter names:

* ``verify(response, answer, *, problem, **columns)``: of the row of the data what it has parameters
for;
* verl's ``compute_score(data_source, solution_str, ground_truth, extra_info=None)``;
* TRL's ``reward(prompts, completions, **columns)``: lists of one, texts, or messages where the
row's ``prompt`` is.

It sees the reasoning block only, and returns a bool, a number in [0, 1], or a mapping with such a
``score`` and what is to be logged; it may be ``async``. Whatever else it does is a
``verifier_error``: the response is wrong, and the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.answers import Attempt, Outcome
from megatron_dcpo.judging.pool import PoolWork, WorkerPool
from megatron_dcpo.runtime.plugins import load_object
from megatron_dcpo.types import VERIFIER_ERROR

logger = logging.getLogger(__name__)

OPTION = "judging.verifier"
LOGGED_KEYS, LOGGED_CHARACTERS = (
    32,
    200,
)  # of what a function may add to the records of a response
_SIGNATURES = (
    "verify(response, answer, *, problem, **columns), compute_score(data_source, solution_str, "
    "ground_truth, "
    "extra_info=None) or reward(prompts, completions, **columns)"
)


class VerifierFailed(UserError):
    """Too many responses of a step, or of a benchmark, were not judged."""


class FunctionVerifier:
    """The verifier (``judge.Verifier``) that calls the function at ``path``. Raises
    :class:`UserError` where there is none with a known signature.
    """

    def __init__(self, path: str, options: JudgingConfig) -> None:
        load_function(path)
        self.options, self.warn = options, warn_once(path)
        work = PoolWork(
            f"{__name__}:load",
            _lost,
            cpu_seconds=options.test_seconds,
            wall_seconds=options.test_seconds,
            memory_bytes=options.memory_mb << 20,
            arguments=(path,),
            remember=False,
            beyond_imports=True,
            hash_seed="0",
        )
        self.pool = WorkerPool(replace(work, pairs_per_worker=4))

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Return the outcome of each reasoning block."""
        asked = [
            (json.dumps([a.reasoning, a.truth, a.row or {}], default=str),)
            for a in attempts
        ]
        return [
            outcome_of(result, self.options, self.warn)
            for result in self.pool.verify(asked)
        ]


def warn_once(name: str) -> Callable[[str], None]:
    """Return what logs the first error of the verifier ``name``."""
    said: list[str] = []

    def warn(why: str) -> None:
        if not said:
            said.append(why)
            logger.warning(
                "%s=%s: %s; the response counts as wrong and in format/verifier_error; further "
                "errors are only counted",
                OPTION,
                name,
                one_line(why, 300),
            )

    return warn


def outcome_of(
    result: object, options: JudgingConfig, warn: Callable[[str], None]
) -> Outcome:
    """Return the outcome of what a worker, or a server, answered."""
    if isinstance(result, Mapping) and "error" in result:
        why: str | None = str(result["error"])
    else:
        why, result = _checked(result)
    if why is not None:
        warn(why)
        return Outcome(False, VERIFIER_ERROR, 0.0 if options.graded else None, {})
    score = result["score"]
    return Outcome(
        score >= options.threshold, None, score if options.graded else None, result
    )


def _checked(result: object) -> tuple[str | None, dict[str, Any]]:
    """Return what is wrong with a result, None where nothing is, and the result as a mapping with a
    finite ``score``.
    """
    found = dict(result) if isinstance(result, Mapping) else {"score": result}
    score: Any = found.get("score")
    score = score.item() if hasattr(score, "item") else score  # of NumPy or torch
    if (
        not isinstance(score, bool | int | float) or not 0 <= score <= 1
    ):  # NaN is neither
        return (
            f"returned {result!r:.80}; expected a bool, a number in [0, 1], or a mapping with "
            "such a score",
            {},
        )
    logged = {
        str(k)[:LOGGED_CHARACTERS]: _plain(v)
        for k, v in list(found.items())[: LOGGED_KEYS + 1]
        if k != "score"
    }
    return None, {"score": float(score), **logged}


def _plain(value: Any) -> bool | int | float | str:  # noqa: ANN401 -- of NumPy or torch
    """Return a value that JSON has: a number, or a text that is not too long."""
    value = (
        value.item()
        if hasattr(value, "item") and getattr(value, "size", 1) == 1
        else value
    )
    if isinstance(value, bool | int) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    return str(value)[:LOGGED_CHARACTERS]


def _lost(why: str) -> dict[str, str]:
    return {"error": why}


def check_error_rate(judgements: Sequence[Any], largest: float, what: str) -> None:
    """Raise :class:`VerifierFailed` where more than ``largest`` of what users' verifiers judged are
    errors; the judgements may be samples of an evaluation.
    """
    own = [j.category == VERIFIER_ERROR for j in judgements if j.logged is not None]
    if own and sum(own) > largest * len(own):
        raise VerifierFailed(
            f"{OPTION}: {sum(own)} of {len(own)} responses ({what}) could not be judged, more than "
            f"judging.max_error_rate={largest:g}; the warning above says why"
        )


# -------------------------------------------------------------------------- in the worker's process


def load(path: str) -> Callable[[str], Any]:
    """Return what a worker calls for each response: it gives the result as plain values, or
    ``{"error": why}``.
    """
    call = load_function(path)

    def judge(text: str) -> object:
        reasoning, truth, row = json.loads(text)
        try:
            result = call(reasoning, truth, row)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            if isinstance(result, list) and len(result) == 1:
                result = result[0]
            why, result = _checked(result)
        except (Exception, SystemExit) as error:
            why = _first_line(error)
        return result if why is None else {"error": why}

    return judge


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def load_function(path: str) -> Callable[[str, str, Mapping[str, Any]], Any]:
    """Return the function at ``path`` as one of reasoning block, ground truth and row. Raises
    :class:`UserError`.
    """
    function = load_object(path, OPTION)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        raise UserError(
            f"{OPTION}={path}: expected {_SIGNATURES}; got {type(function).__name__}"
        ) from None
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(**values: object) -> object:
        return function(
            **{k: v for k, v in values.items() if everything or k in parameters}
        )

    if "solution_str" in parameters:
        return lambda text, truth, row: call(
            data_source=row.get("data_source", ""),
            solution_str=text,
            ground_truth=row.get("answer", truth),
            extra_info=row.get("extra_info"),
        )
    if "completions" in parameters:
        return lambda text, truth, row: call(
            **_as_in_trl(text, {"answer": truth, **row})
        )
    if "response" in parameters:
        return lambda text, truth, row: call(
            **{"problem": "", "answer": truth, **row, "response": text}
        )
    raise UserError(
        f"{OPTION}={path}: expected {_SIGNATURES}; got ({', '.join(parameters)})"
    )


def _as_in_trl(text: str, row: Mapping[str, Any]) -> dict[str, list[Any]]:
    chat = isinstance(row.get("prompt"), list)
    prompt = row["prompt"] if chat else row.get("problem", "")
    columns = {
        name: [value]
        for name, value in row.items()
        if name not in ("prompt", "completion")
    }
    return columns | {
        "prompts": [prompt],
        "completions": [[{"role": "assistant", "content": text}] if chat else text],
    }


def _first_line(error: BaseException) -> str:
    """Return the exception, and the line of the innermost frame, as one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    where = (
        f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"
        if own
        else ""
    )
    return f"{type(error).__name__}: {one_line(error, 150)}{where}"
