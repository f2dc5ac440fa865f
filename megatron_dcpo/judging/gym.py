"""Score an answer to a problem of Reasoning Gym by its task's own rule: a user's verifier that the
package brings.
"""

from __future__ import annotations

import functools
from typing import Any

import reasoning_gym as _imported_before_the_clock  # noqa: F401

from megatron_dcpo.data.gym import dataset_of
from megatron_dcpo.judging.answers import extract_boxed


def score(response: str, *, problem: str, reasoning_gym: dict[str, Any]) -> float:
    """Return the score of the boxed answer, in [0, 1]; 0 without a box."""
    task, index = reasoning_gym["task"], reasoning_gym["index"]
    entry, answer = _entry(task, index), extract_boxed(response)
    if entry["question"] != problem:
        raise ValueError(
            f"problem {index} of {task} is another one here: not the same release of reasoning-gym"
        )
    return (
        0.0
        if answer is None
        else float(dataset_of(task).score_answer(answer.strip(), entry))
    )


@functools.lru_cache(maxsize=256)  # the responses to one problem come together
def _entry(task: str, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = dataset_of(task)[index]
    return entry
