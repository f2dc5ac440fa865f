"""The environment with a tool: what its demonstrations teach, and the picture of its turns."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_dcpo.config import load_config
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt
from tests.helpers.chat_policy import ScriptedEngine
from tests.helpers.paths import EXAMPLES

FOLDER = EXAMPLES / "tool_environment"
STATED = "\n<conf> Confidence:"
AGENT = """
async def run(problem, client):
    tool = {"type": "function", "function": {"name": "multiply"}}
    asked = {"model": "policy", "tools": [tool]}
    messages = problem["messages"]
    reply = await client.chat.completions.create(messages=messages, **asked)
    said = reply.choices[0].message.model_dump(exclude_none=True)
    shown = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "E"}
    await client.chat.completions.create(messages=[*messages, said, shown], **asked)
    return 0.0
"""


def test_the_confidence_behind_a_call_is_taught_as_it_is_asked(tmp_path: Path) -> None:
    """Token for token, for which the calls are not in the problems."""
    script = FOLDER / "demonstrations.py"
    options = ("--out", tmp_path, "--rows", "400", "--between", "0.5")
    subprocess.run([sys.executable, script, *options], check=True, capture_output=True)
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    between = [row for row in map(json.loads, lines) if row["prompt"].endswith(STATED)]
    assert 120 < len(between) < 280
    assert all(0 <= float(row["response"]) <= 1 for row in between)
    taught = {row["prompt"] for row in between[:20]}
    calls = {}
    for prompt in taught:
        problem, equals, call = prompt.removesuffix(STATED).partition("=")
        calls[problem + equals] = call

    def answer(text: str) -> str:
        if text.endswith(STATED):
            return " 0.25"
        if "</tool_call>" in text:
            return "1 \\boxed{1}\n<conf> Confidence: 0.5"
        return calls[text]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    chat = ChatTokens(tokenizer, token_bytes(tokenizer), (tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(answer, chat)
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"rollout.agent={tmp_path / 'agent.py'}:run"
    python = f"rollout.agent_python={sys.executable}"
    config = load_config(FOLDER / "turns.yaml", [agent, python]).rollout
    samples = []
    for problem in calls:
        messages = ({"role": "user", "content": problem},)
        ids = tuple(chat.encode_chat(messages, ()))
        samples.append((Prompt(problem, messages, ids, "1", "t", problem=problem), 0))
    with closing(AgentRollout(engine, chat, config, "policy", 256, "<conf>")) as rollout:
        stream = rollout.stream(samples, SamplingConfig(max_tokens=144), 1)
        sessions = [one for together in stream for one in together]
    assert [one.turn_confidences for one in sessions] == [((1, 0.25),)] * len(calls)
    asked = {tuple(call.prompt.token_ids) for call in engine.calls}
    assert {tuple(tokenizer(prompt)["input_ids"]) for prompt in taught} <= asked


def test_the_picture_of_turns(tmp_path: Path) -> None:
    """Sessions with one call are counted, and no others."""
    call = '<tool_call>{"name": "multiply"}</tool_call><|endoftext|>'
    rows: list[dict[str, Any]] = []
    for number in range(6):
        row = {
            "training_step": 1,
            "prompt_id": f"p/{number // 4}",
            "text": f"{call}{'E9' if number % 2 else '10989'}",
            "correct": 1.0 - number % 2,
            "confidence": 0.25 if number % 2 else None,
            "turn_confidences": [[1, 0.5]],
        }
        rows.append(row)
    alone = {"training_step": 1, "prompt_id": "p/2", "text": "6", "correct": 1.0}
    rows += [alone, {**rows[1], "turn_confidences": [[1, 0.5], [2, 0.5]]}]
    (tmp_path / "samples").mkdir()
    samples = tmp_path / "samples" / "step_000001.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = FOLDER / "draw_turns.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "turns.png").stat().st_size > 1000
    assert "error shown (n = 3): accuracy 0.000" in done.stdout
    assert "after the call: 0.500 (0.500 to 0.500)" in done.stdout
    assert "at the end less after the call: -0.250 (-0.250 to -0.250)" in done.stdout
