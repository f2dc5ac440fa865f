"""The agents of verifiers' and NeMo Gym's environments, in another Python: with fakes of what they
use of the packages, and with the packages where ``DCPO_VERIFIERS_PYTHON`` and
``DCPO_NEMO_GYM_PYTHON`` name Pythons that have them.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt, Response
from tests.helpers.chat_policy import ScriptedEngine, prompt_of
from tests.helpers.paths import EXAMPLES

VERIFIERS = EXAMPLES / "environments" / "verifiers_agent.py"
GYM = EXAMPLES / "environments" / "nemo_gym_agent.py"
HERE = Path(__file__).parent


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Another Python: this one by another path, with the fakes of a package."""
    script = tmp_path / "python"
    fakes = HERE / "fakes" / f"of_{request.param}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={fakes} exec {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def rows_of(python: str, file: Path, name: str, *words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, str(file), "--rows", name, *words], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def rollout(agent: str, python: str, answer: Callable[[str], str]) -> Iterator[AgentRollout]:
    engine: Any = ScriptedEngine(answer)
    config = AgentsConfig(
        agent=agent,
        agent_python=python,
        agent_sessions=8,
        agent_seconds=60.0,
        agent_calls=6,
    )
    made = AgentRollout(
        engine=engine,
        chat=engine.chat,
        config=config,
        model="policy",
        sequence_tokens=4000,
        marker="<conf>",
    )
    try:
        yield made
    finally:
        made.close()


def sampled(made: AgentRollout, rows: list[dict[str, Any]]) -> list[Response]:
    samples = []
    for number, row in enumerate(rows):
        prompt = prompt_of(row["problem"], made.chat, f"{number}")
        samples.append((Prompt(**{**vars(prompt), "row": row}), 0))
    stream = made.stream(samples, SamplingConfig(max_tokens=2000), 1)
    got = {one.prompt_id: one for together in stream for one in together}
    return [got[f"{number}"] for number in range(len(rows))]


@pytest.mark.parametrize("python", ["verifiers"], indirect=True)
def test_an_environment_of_verifiers_makes_its_rollout_and_gives_the_reward(python: str) -> None:
    """Two turns each; a confidence is not seen, and what a reward function raises is no reward."""
    rows = rows_of(python, VERIFIERS, "sums")
    assert rows[0]["problem"] == [{"role": "user", "content": "1+1="}]
    assert (rows[0]["answer"], rows[0]["size"]) == ("2", 1)
    assert len(rows_of(python, VERIFIERS, "sums", "--part", "eval")) == 1

    def answer(text: str) -> str:
        if "3+3" in text:
            return "raise"
        return "" if "4+4" in text else "It is 2.\n<conf> Confidence: 0.987"

    with rollout(f"{VERIFIERS}:sums", python, answer) as made:
        right, wrong, failed, empty = sampled(made, rows)
    assert right.verdict == {"score": 1.0, "reward": 1.0, "right": 1.0}
    assert wrong.verdict == {"score": 0.0, "reward": 0.0, "right": 0.0}
    assert right.counted is not None
    assert (right.counted["agent_calls"], right.counted["segments"]) == (2, 1)
    assert "cannot score this" in str(failed.failure)
    assert empty.verdict == {"score": 0.0, "no_answer": 1.0}


@pytest.mark.parametrize("python", ["verifiers"], indirect=True)
def test_an_environment_that_is_not_there_is_one_line_at_the_start(python: str) -> None:
    with (
        pytest.raises(UserError, match=r"rollout\.agent=.*:missing: .*'missing'") as refused,
        rollout(f"{VERIFIERS}:missing", python, lambda text: ""),
    ):
        pass
    assert "\n" not in str(refused.value)


def count(text: str) -> str:
    """What a policy says that uses the counter of NeMo Gym's example."""
    added = re.findall(r"\badd (\d+)", text)
    calls = [f'{{"name": "increment_counter", "arguments": {{"count": {n}}}}}' for n in added]
    calls.append('{"name": "get_counter_value", "arguments": {}}')
    done = text.count("<tool_response>\n")
    if done < len(calls):
        return f"<tool_call>{calls[done]}</tool_call>"
    return "Done.\n<conf> Confidence: 0.987"


@pytest.mark.parametrize("python", ["gym"], indirect=True)
def test_an_agent_of_nemo_gym_asks_its_server_and_the_policy(python: str) -> None:
    rows = rows_of(python, GYM, "letters")
    assert rows[0]["problem"][0]["content"] == "Say b."
    with rollout(f"{GYM}:letters", python, lambda text: "b\n<conf> Confidence: 0.987") as made:
        right, wrong = sampled(made, rows)
    assert right.verdict == {"score": 1.0, "reward": 1.0}
    assert wrong.verdict == {"score": 0.0, "reward": 0.0}
    assert right.counted is not None
    assert right.counted["agent_calls"] == 1


@pytest.mark.full
def test_the_real_nemo_gym() -> None:
    """Its example of a server that keeps a session, by its own agent."""
    python = os.environ.get("DCPO_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("DCPO_NEMO_GYM_PYTHON names no Python with NeMo Gym")
    name = "example_session_state_mgmt"
    rows = rows_of(python, GYM, name)
    with rollout(f"{GYM}:{name}", python, count) as made:
        got = sampled(made, rows[:3])
    for one in got:
        assert one.verdict is not None, one.failure
        assert one.verdict["score"] == 1.0
        assert one.counted is not None
        assert (one.counted["agent_calls"], one.counted["segments"]) == (4, 1)


@pytest.mark.full
def test_the_real_verifiers() -> None:
    """The tool of ``examples/tool_environment``, which is installed there."""
    python = os.environ.get("DCPO_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("DCPO_VERIFIERS_PYTHON names no Python with verifiers and the environment")
    rows = rows_of(python, VERIFIERS, "quickstart_calculator")[:4]

    def answer(text: str) -> str:
        a, b = re.findall(r"(\d+)\*(\d+)=", text)[-1]
        if "<tool_response>\n" not in text:
            asked = f'{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}'
            return f"<tool_call>{asked}</tool_call>"
        shown = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        return f"\\boxed{{{shown[::-1]}}}\n<conf> Confidence: 0.9"

    with rollout(f"{VERIFIERS}:quickstart_calculator", python, answer) as made:
        got = sampled(made, rows)
    for row, one in zip(rows, got, strict=True):
        assert one.verdict is not None, one.failure
        assert one.verdict["score"] == float(len(row["answer"]) <= 4)
        assert one.verdict["total_tool_calls"] == 1
        assert one.counted is not None
        assert (one.counted["agent_calls"], one.counted["segments"]) == (2, 1)
