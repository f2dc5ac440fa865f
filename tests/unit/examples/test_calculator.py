"""The calculator's rollout: a call is one response of two turns, and its tokens are nobody's."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_dcpo.rollout import RolloutContext, SamplingConfig
from megatron_dcpo.rollout.function import checked_stream, load_rollout_function
from megatron_dcpo.types import Prompt, Response
from tests.helpers.paths import EXAMPLES

PATH = f"{EXAMPLES / 'calculator' / 'rollout.py'}:rollout"
TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart" / "policy")
REST = " \\boxed{2776}\n<conf> Confidence: 0.99"


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


class Scripted:
    """An engine that answers what a script says to a text."""

    eos_token_ids = (TOKENIZER.eos_token_id,)

    def __init__(self, script: dict[str, str]) -> None:
        self.script = script
        self.limits: list[int] = []

    def stream(self, samples: Any, sampling: SamplingConfig, step: int) -> Iterator[list[Response]]:
        self.limits.append(sampling.max_tokens)
        for prompt, index in samples:
            ids = [*encode(self.script[TOKENIZER.decode(prompt.token_ids)])]
            ids.append(TOKENIZER.eos_token_id)
            yield [
                Response(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    token_ids=np.array(ids),
                    logprobs=np.full(len(ids), -0.5, np.float32),
                    finish_reason="stop",
                    weights_version=1,
                    step=step,
                )
            ]


def answered(script: dict[str, str]) -> list[Response]:
    """The responses to the first problem of the script."""
    problem = next(iter(script))
    prompt = Prompt("p", (), tuple(encode(problem)), "", "t")
    engine: Any = Scripted(script)
    context = RolloutContext(
        engine=engine, tokenizer=TOKENIZER, sampling=SamplingConfig(max_tokens=64), step=1
    )
    stream = checked_stream(
        function=load_rollout_function(PATH),
        path=PATH,
        samples=[(prompt, 0), (prompt, 1)],
        context=context,
        vocab_size=len(TOKENIZER),
    )
    responses = [one for together in stream for one in together]
    assert max(len(response.token_ids) for response in responses) <= 64
    assert set(engine.limits) == {64 - 12 - 4}, "both turns fit into a response"
    return responses


def text_of(response: Response, *, sampled: bool) -> str:
    """What the policy has sampled of a response, or what was written."""
    mask = response.loss_mask
    assert mask is not None
    return str(TOKENIZER.decode(response.token_ids[mask == sampled]))


def test_a_call_is_answered_and_the_policy_goes_on() -> None:
    for response in answered(
        {
            "347*8=": "[347*8]99 what it makes up behind its call is thrown away",
            "347*8=[347*8]6772": REST,
        }
    ):
        assert text_of(response, sampled=True) == f"[347*8]{REST}<|endoftext|>"
        assert text_of(response, sampled=False) == "6772"


@pytest.mark.parametrize("call", ["[347*52]", "[347+8]", "[*]", "[]", "[347*]"])
def test_what_the_display_cannot_show_is_an_error(call: str) -> None:
    for response in answered({"347*52=": call, f"347*52={call}E": "1 \\boxed{1}"}):
        assert text_of(response, sampled=False) == "E"


@pytest.mark.parametrize(
    "text", ["6772 \\boxed{2776}", "6[347*8]", "[347*8", "[" * 20, "x" * 20 + "]"]
)
def test_without_a_call_a_response_is_one_turn(text: str) -> None:
    for response in answered({"347*8=": text}):
        assert text_of(response, sampled=True) == f"{text}<|endoftext|>"
        assert text_of(response, sampled=False) == ""


def test_the_demonstrations_train_nothing_of_the_calculator(tmp_path: Path) -> None:
    script = EXAMPLES / "calculator" / "demonstrations.py"
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
    monkeypatch.syspath_prepend(str(EXAMPLES / "calculator"))
    monkeypatch.delitem(sys.modules, "rollout", raising=False)
    picture = importlib.import_module("picture")
    kinds = [picture.kind_of(t) for t in ("6 \\boxed{6}", "[2*3]6 ", "[999*99]E9", "[2*3")]
    assert kinds == ["no call", "product shown", "error shown", "no call"]
