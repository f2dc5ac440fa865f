"""The calculator's agent and program, as sessions with an engine that says what a script says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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
STATED = "\n<conf> Confidence:"
TURNS = SCRIPT | {
    f"347*8=[347*8]{STATED}": " 0.6",
    f"347*8=[347*8]6772 \\boxed{{{STATED}": " 0.9",
    "347*8=[347*8]6772 \\boxed{": REST.partition("{")[2],
    f"347*52=[347*52]{STATED}": " 0.5",
    f"347*52=[347*52]E1{STATED}": " much",
    "347*52=[347*52]E1": " \\boxed{1}\n<conf> Confidence: 0.1",
    f"12*2=42 \\boxed{{24}}{STATED}": " 0.3",
}


@pytest.fixture(scope="module", params=["dcpo.yaml", "program.yaml"])
def rollout(request: pytest.FixtureRequest) -> Iterator[AgentRollout]:
    with closing(scripted(request.param, SCRIPT)) as made:
        yield made


@pytest.fixture(scope="module")
def responses(rollout: AgentRollout) -> dict[str, Response]:
    return sessions_of(rollout, ("347*8=", "347*52=", "347+8=", "12*2=", "12*3="))


def scripted(config: str, script: Mapping[str, str]) -> AgentRollout:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart" / "policy")
    chat = ChatTokens(tokenizer, token_bytes(tokenizer), (tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(lambda text: script[text], chat)
    options = load_config(FOLDER / config).rollout
    return AgentRollout(engine, chat, options, "policy", 64, "<conf>")


def sessions_of(rollout: AgentRollout, problems: Sequence[str]) -> dict[str, Response]:
    samples = []
    for problem in problems:
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


def test_in_turns_there_is_a_confidence_after_call_and_display() -> None:
    with closing(scripted("turns.yaml", TURNS)) as rollout:
        problems = ("347*8=", "347*52=", "12*2=")
        got = sessions_of(rollout, problems)
    shown, error, alone = (got[problem] for problem in problems)
    assert shown.turn_confidences == ((1, 0.6), (2, 0.9))
    assert error.turn_confidences == ((1, 0.5), (2, None))
    assert alone.turn_confidences == ()
    assert [one.verdict for one in (shown, error, alone)] == [{"score": 1}, {"score": 0}, None]
    assert shown.loss_mask is not None
    sampled = shown.token_ids[shown.branch_tokens :][shown.loss_mask[shown.branch_tokens :]]
    assert rollout.chat.text_of(sampled) == f"[347*8]{REST}<|endoftext|>"


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


def test_demonstrations_of_a_confidence_before_the_end(tmp_path: Path) -> None:
    script, out = FOLDER / "demonstrations.py", tmp_path / "shown.jsonl"
    options = ("--out", out, "--rows", "400", "--between", "0.5")
    subprocess.run([sys.executable, script, *options], check=True, capture_output=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    between = [row for row in rows if row["prompt"].endswith(STATED)]
    assert 120 < len(between) < 280
    after_call = [row for row in between if row["prompt"].endswith(f"]{STATED}")]
    assert 0 < len(after_call) < len(between)
    assert all(0 <= float(row["response"]) <= 1 for row in between)


def test_the_picture_of_turns(tmp_path: Path) -> None:
    """Sessions with a call are counted, and no others."""
    samples = tmp_path / "samples"
    samples.mkdir()
    rows = []
    for number in range(6):
        text = f"[999*99]{'E9' if number % 2 else '10989'}"
        rows.append(
            {
                "training_step": 1,
                "prompt_id": f"p/{number // 4}",
                "text": text,
                "correct": 1.0 - number % 2,
                "confidence": 0.75,
                "turn_confidences": [[1, 0.5], [2, 0.25 if number % 2 else None]],
            }
        )
    rows.append({"training_step": 1, "prompt_id": "p/2", "text": "6", "correct": 1.0})
    (samples / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = FOLDER / "picture_turns.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "turns.png").stat().st_size > 1000
    assert "product shown (n = 3): accuracy 1.000" in done.stdout
    assert "after the display: 0.250 (0.250 to 0.250)" in done.stdout
    assert "after the display less after the call: -0.250 (-0.250 to -0.250)" in done.stdout
