"""An environment of one turn: sums, answered behind ``=>``. Its options make it one of several
turns or with a tool, or one of those that are refused.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import verifiers as vf

SYSTEM = {"role": "system", "content": "Answer behind =>."}


def problems(numbers: range) -> vf.Dataset:
    rows = []
    for a in numbers:
        asked = {"role": "user", "content": f"{a}+{a}="}
        rows.append({"prompt": [SYSTEM, asked], "answer": str(2 * a), "info": {"size": a}})
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
    async def rollout(self, *arguments: Any) -> dict[str, Any]:
        return await super().rollout(*arguments)


class Counting(vf.MultiTurnEnv):
    """Says how far the policy has come, in its three turns."""

    async def env_response(
        self, messages: list[dict[str, Any]], state: dict[str, Any]
    ) -> list[dict[str, Any]]:
        assert "0.987654" not in messages[-1]["content"], "a confidence"
        turns = sum(message["role"] == "assistant" for message in messages)
        if "go on" in messages[-1]["content"]:
            turns = 0
        return [{"role": "user", "content": f"Turn {turns}."}] if turns < 3 else []


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Adding(vf.MultiTurnEnv):
    """Adds for the policy."""

    oai_tools = TOOLS

    async def env_response(
        self, messages: list[dict[str, Any]], state: dict[str, Any]
    ) -> list[dict[str, Any]]:
        results = []
        for call in messages[-1].get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            shown = str(arguments["a"] + arguments["b"])
            results.append({"role": "tool", "tool_call_id": call["id"], "content": shown})
        return results


def fail() -> None:
    raise ValueError("no data here")


def be_killed() -> None:
    print("all is well", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def load_without_end() -> None:
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(60)


# what making the environment does first
LOADING = {
    "raises": fail,
    "asks": input,
    "ends": lambda: sys.exit(0),
    "is_killed": be_killed,
    "writes_bytes": lambda: os.write(2, b"\xff\xfe\n"),
    "sleeps": load_without_end,
}


def load_environment(
    kind: str = "", weights: tuple[float, ...] = (1.0, 0.0), tests: int = 2
) -> vf.MultiTurnEnv:
    print("an environment prints")
    if kind in LOADING:
        LOADING[kind]()
    rubric: vf.Rubric = vf.RubricGroup(
        [vf.Rubric([right, brief], list(weights)), vf.Rubric([noisy], [0.0])]
    )
    if kind == "judge":
        rubric = vf.JudgeRubric([right])
    if kind == "group_reward":
        rubric = vf.Rubric([compared])
    kinds = {"turns": Counting, "tools": Adding, "rollout": OwnRollout}
    held_out = problems(range(100, 100 + tests)) if tests else None
    trained = problems(range(1, 6))
    if kind == "leaves_a_process":
        trained[0]["info"]["child"] = subprocess.Popen(["sleep", "60"]).pid
    if kind == "shuffled":
        random.shuffle(trained)
        trained[0]["info"]["draws"] = np.random.random(3)
        trained[0]["info"]["one"] = np.array([5])
    if kind == "group":
        return vf.EnvGroup([Counting(rubric, trained), Adding(rubric, trained)])
    return kinds.get(kind, vf.SingleTurnEnv)(rubric, trained, held_out)
