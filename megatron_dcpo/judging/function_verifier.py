"""A user's verifier: a function, named by its import path, that runs in killable worker processes.

The names of its parameters tell which signature it has:

* ``verify(response, answer, *, problem, **columns)`` gets those columns of the data's row that it
  has parameters for;
* ``compute_score(data_source, solution_str, ground_truth, extra_info=None)`` is verl's;
* ``reward(prompts, completions, **columns)`` is TRL's. It gets lists of one element, a text, or
  messages if the row's ``prompt`` is a list of messages.

The function sees the reasoning block only. It returns a bool, a number in [0, 1], or a mapping with
such a ``score`` and values to log; it may be ``async``. Anything else, an exception included, is a
``verifier_error``: the response counts as wrong, and the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dcpo.codec import LARGEST
from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.answers import Attempt, Outcome
from megatron_dcpo.judging.pool import PoolWork, WorkerPool
from megatron_dcpo.runtime.plugins import load_object, raised
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.types import HASH_SEED, VERIFIER_ERROR

logger = logging.getLogger(__name__)

OPTION = "judging.verifier"
# limits of the values that a function may add to the record of a response
LOGGED_KEYS = 32
LOGGED_CHARACTERS = 200
_SHOWN_BITS = 4096  # of an integer; Python writes no more than 4300 digits
_SIGNATURES = (
    "verify(response, answer, *, problem, **columns), "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) "
    "or reward(prompts, completions, **columns)"
)


class VerifierFailed(UserError):
    """Too many responses of a step or a benchmark could not be judged."""


class FunctionVerifier:
    """The verifier (``judge.Verifier``) that calls the function at ``path``. Raises
    :class:`UserError` if there is no function with a known signature.
    """

    def __init__(self, path: str, options: JudgingConfig) -> None:
        load_function(path)
        self.options = options
        self.warn = warn_once(path)
        work = PoolWork(
            f"{__name__}:load",
            lost,
            cpu_seconds=options.test_seconds,
            wall_seconds=options.test_seconds,
            memory_bytes=options.memory_mb << 20,
            arguments=(path,),
            remember=False,
            beyond_imports=True,
            hash_seed=HASH_SEED,
        )
        self.pool = WorkerPool(replace(work, pairs_per_worker=4))

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Return the outcome of each reasoning block."""
        requests = []
        for attempt in attempts:
            arguments = [attempt.reasoning, attempt.truth, attempt.row or {}]
            requests.append((json.dumps(arguments, default=str),))
        results = self.pool.verify(requests)
        return [outcome_of(result, self.options, self.warn) for result in results]


def warn_once(name: str) -> Callable[[str], None]:
    """Return a function that logs the first error of the verifier ``name``."""
    said: list[str] = []

    def warn(why: str) -> None:
        if not said:
            said.append(why)
            logger.warning(
                "%s=%s: %s; the response counts as wrong and in format/verifier_error; further "
                "errors are only counted",
                OPTION,
                name,
                printable(one_line(why, 300)),
            )

    return warn


def outcome_of(result: object, options: JudgingConfig, warn: Callable[[str], None]) -> Outcome:
    """Return the outcome for the result from a worker or a server."""
    logged: dict[str, Any] = {}
    if isinstance(result, Mapping) and "error" in result and "score" not in result:
        why: str | None = str(result["error"])
    else:
        why, logged = checked_result(result)
    if why is not None:
        warn(why)
        return Outcome(False, VERIFIER_ERROR, 0.0 if options.graded else None, {})
    score = logged["score"]
    return Outcome(
        correct=score >= options.threshold,
        category=None,
        score=score if options.graded else None,
        logged=logged,
    )


def checked_result(result: object) -> tuple[str | None, dict[str, Any]]:
    """Return what is wrong with a result, None if nothing is, and the result as a mapping with a
    finite ``score``.

    An entry ``error`` beside a score that can be used is logged like any other. Entries without a
    value are left out.
    """
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    score: Any = values.get("score")
    if hasattr(score, "item"):  # a scalar of NumPy or torch
        score = score.item()
    is_number = isinstance(score, bool | int | float)
    if not is_number or not 0 <= score <= 1:  # no comparison holds for NaN
        why = (
            f"returned {result!r:.80}; expected a bool, a number in [0, 1], or a mapping with "
            "such a score"
        )
        if values.get("error") is not None:
            why = str(values["error"])
        return why, {}
    checked: dict[str, Any] = {"score": float(score)}
    for key, value in list(values.items())[: LOGGED_KEYS + 1]:
        if key != "score" and value is not None:
            checked[printable(key)[:LOGGED_CHARACTERS]] = _plain(value)
    return None, checked


def _plain(value: Any) -> bool | int | float | str:  # noqa: ANN401 -- of NumPy or torch
    """Return a value that JSON and the metrics can hold: a number that can be computed with, or a
    printable text that is not too long.
    """
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, int | float) and abs(value) < LARGEST:  # not so for NaN
        return value
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return printable(value, lines=True)[:LOGGED_CHARACTERS]


def lost(why: str) -> dict[str, str]:
    """Return the result for a response whose worker gave none."""
    return {"error": why}


def check_error_rate(judgements: Sequence[Any], largest: float, what: str) -> None:
    """Raise :class:`VerifierFailed` if more than the share ``largest`` of the judgements by users'
    verifiers are errors.
    """
    failed = [j.category == VERIFIER_ERROR for j in judgements if j.logged is not None]
    if failed and sum(failed) > largest * len(failed):
        raise VerifierFailed(
            f"{OPTION}: {sum(failed)} of {len(failed)} responses ({what}) could not be judged, "
            f"more than judging.max_error_rate={largest:g}; the warning above says why"
        )


def with_verdicts(
    verifier: Callable[[Sequence[Attempt]], Sequence[Outcome]], options: JudgingConfig
) -> Callable[[Sequence[Attempt]], Sequence[Outcome]]:
    """Return a verifier that takes the verdict of an agent or its environment where there is one,
    by ``judging.threshold`` and ``judging.graded``, and asks ``verifier`` where there is none.
    """

    def judged(attempts: Sequence[Attempt]) -> Sequence[Outcome]:
        others = iter(verifier([one for one in attempts if one.verdict is None]))
        return [
            next(others)
            if one.verdict is None
            else outcome_of(one.verdict, options, logger.warning)
            for one in attempts
        ]

    return judged


# -------------------------------------------------------------------------- in the worker's process


def load(path: str) -> Callable[[str], Any]:
    """Return the function that a worker calls for each response. It returns the result as plain
    values, or ``{"error": why}``.
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
            why, result = checked_result(result)
        except (Exception, SystemExit) as error:
            why = raised(error)
        return result if why is None else {"error": why}

    return judge


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def load_function(path: str) -> Callable[[str, str, Mapping[str, Any]], Any]:
    """Return the function at ``path`` as a function of reasoning block, ground truth and row.
    Raises :class:`UserError` if there is none with a known signature.
    """
    function = load_object(path, OPTION)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a function, or a builtin without a signature
        raise UserError(
            f"{OPTION}={path}: expected {_SIGNATURES}; got {type(function).__name__}"
        ) from None
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(**values: object) -> object:
        if not everything:
            values = {k: v for k, v in values.items() if k in parameters}
        return function(**values)

    if "solution_str" in parameters:
        return lambda text, truth, row: call(
            data_source=row.get("data_source", ""),
            solution_str=text,
            ground_truth=row.get("answer", truth),
            extra_info=row.get("extra_info"),
        )
    if "completions" in parameters:
        return lambda text, truth, row: call(**_as_in_trl(text, {"answer": truth, **row}))
    if "response" in parameters:
        return lambda text, truth, row: call(
            **{"problem": "", "answer": truth, **row, "response": text}
        )
    raise UserError(f"{OPTION}={path}: expected {_SIGNATURES}; got ({', '.join(parameters)})")


def _as_in_trl(text: str, row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the arguments of a reward function of TRL: each column as a list of one value."""
    columns: dict[str, list[Any]] = {}
    for name, value in row.items():
        if name not in ("prompt", "completion"):
            columns[name] = [value]
    if isinstance(row.get("prompt"), list):
        columns["prompts"] = [row["prompt"]]
        columns["completions"] = [[{"role": "assistant", "content": text}]]
    else:
        columns["prompts"] = [row.get("problem", "")]
        columns["completions"] = [text]
    return columns
