"""The verifier that an environment of others brings (``data/environments.py``): the reward of its
rubric, mapped to [0, 1].

Responses are scored by workers of a pool in the environment's own Python, one at a time, with the
limits that a user's function has. The environment sees the reasoning block only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.environments import (
    GUEST,
    RUNS_FILE,
    environment_digest,
    parse_environment,
)
from megatron_dcpo.judging.answers import FREE, Attempt, Outcome
from megatron_dcpo.judging.verdicts import lost, outcome_of, warn_once
from megatron_dcpo.judging.verifier_kind import VerifierKind
from megatron_dcpo.judging.worker_pool import PoolWork, WorkerPool
from megatron_dcpo.runtime.brought import ENVIRONMENT_COLUMN, HASH_SEED

_NO_VERDICT = {"score": 0.0}
_WORKER = Path(__file__).with_name("worker.py")


class EnvironmentVerifier:
    """The verifier (``judge.Verifier``) of the environment at ``path``. Raises :class:`UserError`
    if the path cannot be read.
    """

    def __init__(self, path: str, options: JudgingConfig) -> None:
        spec = parse_environment(path)
        self.options = options
        self.warn = warn_once(path)
        work = PoolWork(
            "dcpo_environment:load",
            lost,
            cpu_seconds=options.test_seconds,
            wall_seconds=options.test_seconds,
            memory_bytes=options.memory_mb << 20,
            arguments=(spec.described(),),
            remember=False,
            beyond_imports=True,
            hash_seed=HASH_SEED,
            program=(spec.python, "-c", RUNS_FILE, str(GUEST), str(_WORKER)),
            search_path=spec.search_path,
        )
        self.pool = WorkerPool(work)

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Return the outcome of each reasoning block. A rollout of several turns that comes here
        has no verdict, because its budget was used up before the environment gave one: it has
        failed.
        """
        results: list[Any] = [_NO_VERDICT] * len(attempts)
        asked = []
        for place, attempt in enumerate(attempts):
            found = (attempt.row or {})[ENVIRONMENT_COLUMN]
            if "more_than_one_turn" not in found:
                asked.append((place, (json.dumps([attempt.reasoning, found["input"]]),)))
        scored = self.pool.verify([request for _, request in asked])
        for (place, _), result in zip(asked, scored, strict=True):
            results[place] = result
        return [outcome_of(result, self.options, self.warn) for result in results]


def scores_digest(path: str) -> str:
    """Return a text that differs between environments whose scores may differ: their sources and
    options, but not the place of their Python, nor the choice of problems.
    """
    spec = parse_environment(path)
    chosen = [spec.kind, spec.name, spec.options, spec.range, spec.judge]
    return json.dumps(chosen, default=dict) + environment_digest(path)


ENVIRONMENT = VerifierKind(
    form=FREE,
    build=lambda name, options, tests: EnvironmentVerifier(name, options),
    digest=scores_digest,
)
