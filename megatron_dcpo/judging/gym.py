"""Score an answer to a problem of Reasoning Gym by the rule of its task. This is a user's verifier
that comes with the package.
"""

from __future__ import annotations

import functools
from typing import Any

import reasoning_gym as _imported_before_the_clock  # noqa: F401

from megatron_dcpo.data.gym_tasks import dataset_of
from megatron_dcpo.judging.answers import extract_boxed


def score(response: str, *, problem: str, reasoning_gym: dict[str, Any]) -> float:
    """Return the score of the boxed answer, in [0, 1]; 0 without a box."""
    task, index = reasoning_gym["task"], reasoning_gym["index"]
    entry = _entry(task, index)
    answer = extract_boxed(response)
    if entry["question"] != problem:
        raise ValueError(
            f"problem {index} of {task} differs in the installed release of reasoning-gym; install "
            "the release that made the data"
        )
    if answer is None:
        return 0.0
    return float(dataset_of(task).score_answer(answer.strip(), entry))


@functools.lru_cache(maxsize=256)  # the responses to one problem come together
def _entry(task: str, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = dataset_of(task)[index]
    return entry
