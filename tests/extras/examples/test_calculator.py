"""The calculator's agent and program, as sessions with an engine that says what a script says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_dcpo.config import load_config
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt, Response
from tests.helpers.chat_policy import ScriptedEngine
from tests.helpers.paths import EXAMPLES

FOLDER = EXAMPLES / "calculator"
REST = " \\boxed{2776}\n<conf> Confidence: 0.99"
SCRIPT = {
    "347*8=": "[347*8]99 what it makes up behind its call is thrown away",
    "347*8=[347*8]6772": REST,
    "347*52=": "[347*52]",
    "347*52=[347*52]E": "1 \\boxed{1}",
    "347+8=": "[347+8]",
    "347+8=[347+8]E": "1 \\boxed{1}",
    "12*2=": "42 \\boxed{24}",
    "12*3=": "6[12*3]",
}


@pytest.fixture(scope="module", params=["dcpo.yaml", "program.yaml"])
def rollout(request: pytest.FixtureRequest) -> Iterator[AgentRollout]:
    config = load_config(FOLDER / request.param)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart" / "policy")
    chat = ChatTokens(tokenizer, token_bytes(tokenizer), (tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(lambda text: SCRIPT[text], chat)
    made = AgentRollout(engine, chat, config.rollout, "policy", 64, "<conf>")
    yield made
    made.close()


@pytest.fixture(scope="module")
def responses(rollout: AgentRollout) -> dict[str, Response]:
    samples = []
    for problem in ("347*8=", "347*52=", "347+8=", "12*2=", "12*3="):
        ids = tuple(rollout.chat.encode(problem))
        samples.append((Prompt(problem, (), ids, "2776", "t", problem=problem), 0))
    got = rollout.stream(samples, SamplingConfig(max_tokens=64), 1)
    return {one.prompt_id: one for together in got for one in together}


def text_of(rollout: AgentRollout, response: Response, *, sampled: bool) -> str:
    """What the policy has sampled of a response, or what was written."""
    assert response.failure is None
    mask = response.loss_mask
    assert mask is not None
    return rollout.chat.text_of(response.token_ids[mask == sampled])


def test_a_call_is_answered_and_the_policy_goes_on(
    rollout: AgentRollout, responses: dict[str, Response]
) -> None:
    response = responses["347*8="]
    assert text_of(rollout, response, sampled=True) == f"[347*8]{REST}<|endoftext|>"
    assert text_of(rollout, response, sampled=False) == "6772"
    assert response.contexts == ()
    is_program = bool(rollout.config.command)
    assert response.verdict == ({"score": 1.0} if is_program else None)


@pytest.mark.parametrize("problem", ["347*52=", "347+8="])
def test_what_the_display_cannot_show_is_an_error(
    rollout: AgentRollout, responses: dict[str, Response], problem: str
) -> None:
    assert text_of(rollout, responses[problem], sampled=False) == "E"


@pytest.mark.parametrize(("problem", "text"), [("12*2=", "42 \\boxed{24}"), ("12*3=", "6[12*3]")])
def test_without_a_call_a_response_is_one_turn(
    rollout: AgentRollout, responses: dict[str, Response], problem: str, text: str
) -> None:
    sampled = text_of(rollout, responses[problem], sampled=True)
    assert sampled.removesuffix("<|endoftext|>") == text
    assert text_of(rollout, responses[problem], sampled=False) == ""


def test_the_demonstrations_train_nothing_of_the_calculator(tmp_path: Path) -> None:
    script = FOLDER / "demonstrations.py"
    out = tmp_path / "shown.jsonl"
    subprocess.run(
        [sys.executable, script, "--out", out, "--rows", "400"], check=True, capture_output=True
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    calls = [row for row in rows if "spans" in row]
    assert 60 < len(calls) < 180
    errors = 0
    for row in calls:
        (span,) = row["spans"]
        assert span["weight"] == 0
        shown = row["response"][span["start"] : span["end"]]
        left, right = row["prompt"].rstrip("=").split("*")
        product = str(int(left) * int(right))
        errors += shown == "E"
        assert shown == "E" or shown[::-1] == product
        assert row["response"].startswith(f"[{left}*{right}]{shown}")
        if shown != "E":
            assert f"{shown} \\boxed{{{product}}}\n<conf>" in row["response"]
    assert 0 < errors < len(calls)


def test_the_picture_tells_responses_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    picture = importlib.import_module("picture")
    kinds = [picture.kind_of(t) for t in ("6 \\boxed{6}", "[2*3]6 ", "[999*99]E9", "[2*3")]
    assert kinds == ["no call", "product shown", "error shown", "no call"]
