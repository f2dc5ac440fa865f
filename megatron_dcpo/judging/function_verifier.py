"""A user's verifier: a function, named by its import path, that runs in killable worker processes.

The names of its parameters tell which signature it has:

* ``verify(response, answer, *, problem, **columns)`` gets those columns of the data's row that it
  has parameters for;
* ``compute_score(data_source, solution_str, ground_truth, extra_info=None)`` is verl's;
* ``reward(prompts, completions, **columns)`` is TRL's. It gets lists of one element, a text, or
  messages if the row's ``prompt`` is a list of messages.

The function sees the reasoning block only. It returns a bool, a number in [0, 1], or a mapping with
such a ``score`` and values to log; it may be ``async``. Anything else, an exception included, is no
judgement: the response is left out, and the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import BOXED, FREE, Attempt, Outcome, Verifier
from megatron_dcpo.judging.verdicts import OPTION, checked_result, lost, outcome_of, warn_once
from megatron_dcpo.judging.verifier_kind import PackedTests, VerifierKind
from megatron_dcpo.judging.worker_pool import PoolWork, WorkerPool
from megatron_dcpo.runtime.brought import HASH_SEED
from megatron_dcpo.runtime.plugins import load_object, raised, source_digest

logger = logging.getLogger(__name__)

_SIGNATURES = (
    "verify(response, answer, *, problem, **columns), "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) "
    "or reward(prompts, completions, **columns)"
)


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

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome | None]:
        """Return the outcome of each reasoning block."""
        requests = []
        for attempt in attempts:
            arguments = [attempt.reasoning, attempt.truth, attempt.row or {}]
            requests.append((json.dumps(arguments, default=str),))
        results = self.pool.verify(requests)
        return [outcome_of(result, self.options, self.warn) for result in results]


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


def _build(name: str, options: JudgingConfig, tests: PackedTests) -> Verifier:
    return FunctionVerifier(name, options)


def _digest(name: str) -> str:
    return name + source_digest(name, OPTION)


FUNCTION = VerifierKind(form=FREE, build=_build, check_name=load_function, digest=_digest)
REASONING_GYM = replace(FUNCTION, form=BOXED)
