"""An environment of one turn: sums, answered behind ``=>``. Its options make it one of those that
are refused.
"""

from __future__ import annotations

import os
import time
from typing import Any

import verifiers as vf

SYSTEM = {"role": "system", "content": "Answer behind =>."}


def problems(numbers: range) -> vf.Dataset:
    rows = []
    for a in numbers:
        asked = {"role": "user", "content": f"{a}+{a}="}
        rows.append(
            {"prompt": [SYSTEM, asked], "answer": str(2 * a), "info": {"size": a}}
        )
    return vf.Dataset(rows)


def said(completion: list[dict[str, str]]) -> str:
    return completion[-1]["content"].rpartition("=>")[2].strip()


async def right(completion: list[dict[str, str]], answer: str) -> float:
    text = completion[-1]["content"]
    if "raise" in text:
        raise ValueError("cannot score this")
    if "hang" in text:
        time.sleep(60)
    if "die" in text:
        os._exit(7)
    if "2.5" in text:
        return 2.5
    assert "0.987654" not in text, "a confidence"
    return float(said(completion) == answer)


def brief(completion: list[dict[str, str]], info: dict[str, int]) -> float:
    return float(len(completion[-1]["content"]) < 20) if info["size"] < 99 else 0.0


def noisy(completion: list[dict[str, str]]) -> float:
    raise ValueError("a metric, which has no weight")


def compared(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


class OwnRollout(vf.SingleTurnEnv):
    async def rollout(self) -> None:
        return None


def load_environment(
    kind: str = "", weights: tuple[float, ...] = (1.0, 0.0), tests: int = 2
) -> vf.MultiTurnEnv:
    print("an environment prints")
    if kind == "raises":
        raise ValueError("no data here")
    rubric: vf.Rubric = vf.RubricGroup(
        [vf.Rubric([right, brief], list(weights)), vf.Rubric([noisy], [0.0])]
    )
    if kind == "judge":
        rubric = vf.JudgeRubric([right])
    if kind == "group_reward":
        rubric = vf.Rubric([compared])
    kinds = {"turns": vf.MultiTurnEnv, "group": vf.EnvGroup, "rollout": OwnRollout}
    held_out = problems(range(100, 100 + tests)) if tests else None
    return kinds.get(kind, vf.SingleTurnEnv)(rubric, problems(range(1, 6)), held_out)
