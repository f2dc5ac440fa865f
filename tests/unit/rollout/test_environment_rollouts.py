"""Environments of others that make their own rollouts through the door: several turns, tools,
groups, rewards, and what becomes of those that fail. ``DCPO_VERIFIERS_CLASSIC_PYTHON`` names a
Python with the real verifiers for the last test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.datasets import Record, load_records
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.verifiers import verifiers
from megatron_dcpo.rollout.agents import AgentRollout, options_of
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt, Response, ResponseKey
from tests.helpers.chat_policy import ScriptedEngine, prompt_of
from tests.helpers.environments import COUNTS, LETTERS, use_stand_ins

SUMS = "verifiers:sums-env"
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 3}}</tool_call>'


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


class Limits:
    agent = "environment"
    command = ""
    agent_sessions = 8
    agent_seconds = 20.0
    agent_calls = 6
    asks_confidence = True


def prompts_of(records: list[Record], engine: Any) -> list[Prompt]:
    prompts = []
    for record in records:
        made = prompt_of(record.messages, engine.chat, record.prompt_id)
        prompts.append(replace(made, row=record.row, ground_truth=record.answer))
    return prompts


@contextmanager
def rollout(
    path: str, answer: Callable[[str], str], **changed: Any
) -> Iterator[tuple[AgentRollout, list[Prompt]]]:
    """A rollout of an environment by a policy that says what ``answer`` says to a text."""
    engine: Any = ScriptedEngine(answer)
    prompts = prompts_of(load_records(path), engine)
    limits: Any = type("Changed", (Limits,), changed)
    made = AgentRollout(engine, engine.chat, options_of(limits, 4000, "<conf>", prompts), "policy")
    try:
        yield made, prompts
    finally:
        made.close()


def sampled(
    made: AgentRollout, prompts: list[Prompt], times: int = 1, most: int = 2000
) -> dict[ResponseKey, Response]:
    samples = [(prompt, index) for prompt in prompts for index in range(times)]
    stream = made.stream(samples, SamplingConfig(max_tokens=most), 1)
    return {one.key: one for together in stream for one in together}


def text_of(made: AgentRollout, response: Response, *, is_sampled: bool) -> str:
    mask = response.loss_mask
    assert mask is not None
    return made.chat.text_of(response.token_ids[mask == is_sampled])


def last_of(text: str) -> str:
    """What the user has said last."""
    return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def test_turns_are_the_environments_and_its_rubric_gives_the_reward() -> None:
    """Reward 1.0 * right + 0.5 * brief in the declared range; no confidence is seen there: the
    stand-in fails if it is.
    """

    def answer(text: str) -> str:
        return f"{last_of(text)} => 4\n<conf> Confidence: 0.987654"

    path = f"{SUMS}?kind=turns&weights=[1,0.5]&range=0..1.5&size=2"
    with rollout(path, answer) as (made, prompts):
        got = sampled(made, prompts, times=2)
    right, wrong = got["sums-env/1", 1], got["sums-env/0", 1]
    assert right.verdict == {"score": 1.0, "reward": 1.5, "right": 1.0, "brief": 1.0, "noisy": 0.0}
    assert wrong.verdict is not None
    assert wrong.verdict["score"] == pytest.approx(0.5 / 1.5)
    assert right.contexts == ()
    assert right.counted is not None
    assert right.counted["agent_calls"] == 3
    said = text_of(made, right, is_sampled=True)
    assert said.count("=> 4") == 3
    assert said.count("0.987654") == 1, "only behind the last answer"
    assert "Turn 2." in text_of(made, right, is_sampled=False)


def test_tools_are_called_and_the_policy_is_asked_for_its_confidence() -> None:
    def answer(text: str) -> str:
        if text.endswith("<conf> Confidence:"):
            return " 0.7"
        return "=> 4" if "<tool_response>\n5" in text else CALL

    with rollout(f"{SUMS}?kind=tools&size=2", answer) as (made, prompts):
        got = sampled(made, prompts)
    right = got["sums-env/1", 0]
    assert right.verdict is not None
    assert right.verdict["score"] == 1.0
    assert text_of(made, right, is_sampled=True) == f"{CALL}<|im_end|>=> 4 0.7<|im_end|>"
    assert right.contexts, "the first prompt holds the tools"


def test_a_group_is_run_as_it_is() -> None:
    with rollout(f"{SUMS}?kind=group", lambda text: "=> 4") as (made, prompts):
        got = sampled(made, prompts)
    calls = [one.counted["agent_calls"] for one in got.values() if one.counted]
    assert sorted(calls) == [1.0] * 5 + [3.0] * 5
    right = [key[0] for key, one in got.items() if one.verdict and one.verdict["score"] == 1]
    assert sorted(right) == ["sums-env/1", "sums-env/6"]


def test_one_that_fails_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """What the rubric turns into 0, a reward out of range, a hang and a death are no rewards."""
    faults = {"1+1=": "raise", "2+2=": "2.5", "3+3=": "hang", "4+4=": "die", "5+5=": "=> 10"}

    def answer(text: str) -> str:
        return next(says for asked, says in faults.items() if f"{asked}<" in text)

    with rollout(f"{SUMS}?kind=turns", answer, agent_seconds=5.0) as (made, prompts):
        got = sampled(made, prompts)
    failures = [got[f"sums-env/{number}", 0].failure for number in range(5)]
    assert "ValueError: cannot score this" in str(failures[0])
    assert "sums_env.py" in str(failures[0])
    assert "range=LOW..HIGH" in str(failures[1])
    assert "5 seconds" in str(failures[2])
    assert "status 7" in str(failures[3])
    assert failures[4] is None
    assert len(caplog.records) == 1


def test_an_answer_of_nothing_gets_the_least_reward() -> None:
    """A confidence alone is nothing to an environment. It stays, so that it is learned from."""
    path = f"{SUMS}?kind=turns&size=1&weights=[1,-0.5]&range=-0.5..1"
    with rollout(path, lambda text: "<conf> Confidence: 0.9") as (made, prompts):
        (one,) = sampled(made, prompts).values()
    assert one.failure is None
    assert one.verdict == {"score": 0.0, "reward": -0.5, "no_answer": 1.0}


def test_a_session_whose_budget_is_used_up_has_failed() -> None:
    """With a verdict if the environment gives one all the same, as it does for a text that has
    become too long; without one where the calls are used up.
    """
    path = f"{SUMS}?kind=turns&size=1"
    limits = {"agent_calls": 2, "asks_confidence": False}
    with rollout(path, lambda text: "go on => 2", **limits) as (made, prompts):
        (calls,) = sampled(made, prompts).values()
        (tokens,) = sampled(made, prompts, most=40).values()
    assert (calls.failure, calls.verdict, calls.finish_reason) == (None, None, "length")
    assert (tokens.failure, tokens.finish_reason) == (None, "length")
    assert tokens.verdict is not None
    verifier, _ = verifiers(JudgingConfig(), {})(path)
    (outcome,) = verifier([Attempt(None, "", "=> 2", prompts[0].row)])
    assert (outcome.correct, outcome.category) == (False, None)


def test_other_problems_beside_them_are_asked_once() -> None:
    def answer(text: str) -> str:
        return " 0.5" if text.endswith("<conf> Confidence:") else "=> 2"

    with rollout(f"{SUMS}?kind=turns&size=1", answer) as (made, prompts):
        plain = prompt_of([{"role": "user", "content": "6 x 7?"}], made.chat, "plain")
        got = sampled(made, [*prompts, plain], times=2)
    one = got["plain", 1]
    assert (one.verdict, one.contexts) == (None, ())
    assert made.chat.text_of(one.token_ids) == "=> 2\n<conf> Confidence: 0.5<|im_end|>"
    assert got["sums-env/0", 0].verdict is not None


def test_the_same_samples_make_the_same_responses() -> None:
    with rollout(f"{SUMS}?kind=turns&size=2", lambda text: "=> 4") as (made, prompts):
        first, second = (sampled(made, order, times=2) for order in (prompts, prompts[::-1]))
    for key, one in first.items():
        assert one.token_ids.tolist() == second[key].token_ids.tolist()
        assert one.verdict == second[key].verdict


def test_without_an_environment_nothing_would_run() -> None:
    limits: Any = Limits()
    with pytest.raises(UserError, match=r"rollout\.agent=environment.*nothing would run"):
        options_of(limits, 100, "<conf>", [])


def test_an_environment_that_has_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ScriptedEngine(lambda text: "")
    prompts = prompts_of(load_records(f"{SUMS}?kind=turns"), engine)
    monkeypatch.delenv("PYTHONPATH")
    limits: Any = Limits()
    options = options_of(limits, 100, "<conf>", prompts)
    with pytest.raises(UserError, match="verifiers:sums-env: ") as refused:
        AgentRollout(engine, engine.chat, options, "policy")
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------------------------------- NeMo Gym
def test_an_agent_of_nemo_gym_asks_its_servers_and_the_policy() -> None:
    """Tools, a session that is seeded, and the reward of verify; one that the agent gives up."""

    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return "Done.\n<conf> Confidence: 0.9"
        count = last_of(text).removeprefix("Add ").removesuffix(".")
        return f'<tool_call>{{"name": "add", "arguments": {{"count": {count}}}}}</tool_call>'

    with rollout(f"nemo_gym:session?data={COUNTS}", answer) as (made, prompts):
        got = sampled(made, prompts, times=3)
    verdicts = [got[f"session/{number}", index].verdict for number in (0, 1) for index in range(3)]
    assert verdicts == [{"score": 0.0}] * 3 + [{"score": 1.0}] * 3
    right = got["session/1", 0]
    assert right.counted is not None
    assert right.counted["agent_calls"] == 2
    assert '{"count":12}' in text_of(made, right, is_sampled=False)
    assert "0.9" in text_of(made, right, is_sampled=True)
    assert "no time" in str(got["session/2", 0].failure)


def test_a_server_without_an_agent_makes_no_rollouts() -> None:
    with (
        pytest.raises(UserError, match="has 0 agents"),
        rollout(f"nemo_gym:letters?data={LETTERS}", lambda text: ""),
    ):
        pass


def test_a_taskset_makes_no_rollouts() -> None:
    with (
        pytest.raises(UserError, match="it is a taskset"),
        rollout("verifiers:tasks_env?size=1&range=-1..2", lambda text: ""),
    ):
        pass


@pytest.mark.full
def test_the_real_nemo_gym() -> None:
    """Its example of a server that keeps a session, by its own agent."""
    python = os.environ.get("DCPO_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("DCPO_NEMO_GYM_PYTHON names no Python with NeMo Gym")
    path = f"nemo_gym:example_session_state_mgmt?python={python}"
    with pytest.raises(UserError, match=r"example\.jsonl") as refused:
        load_records(path)

    def answer(text: str) -> str:
        added = re.findall(r"\badd (\d+)", text)
        counts = [f'{{"name": "increment_counter", "arguments": {{"count": {n}}}}}' for n in added]
        calls = [*counts, '{"name": "get_counter_value", "arguments": {}}']
        done = text.count("<tool_response>\n")
        return f"<tool_call>{calls[done]}</tool_call>" if done < len(calls) else "Done."

    path += f"&data={str(refused.value).rpartition(' ')[2]}"
    with rollout(path, answer, agent_seconds=60.0) as (made, prompts):
        got = sampled(made, prompts[:3], times=2)
    for one in got.values():
        assert one.verdict == {"score": 1.0}
        assert one.counted is not None
        assert (one.counted["agent_calls"], one.counted["segments"]) == (4, 1)


# --------------------------------------------------------------------------------------- verifiers
REAL = """
import time
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: one
        b: the other
    '''
    return a + b

def right(completion, answer, **kwargs):
    text = completion[-1]["content"] or ""
    assert "0.9" not in text, "a confidence"
    if "raise" in text:
        raise ValueError("cannot score this")
    return float(answer in text)

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state, **kwargs):
        state["told"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["told"] += 1
        return [{"role": "user", "content": "Too low." if state["told"] < 2 else "Once more."}]

class Keeper(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.add_tool(self.look, args_to_skip=["place"])

    async def look(self, key: str, place: str) -> str:
        '''Look up a key.

        Args:
            key: what to look up
        '''
        return f"{key}@{place}"

    async def setup_state(self, state, **kwargs):
        state["place"] = state["answer"]
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "place": state["place"]}

def load_environment(kind):
    rows = [{"question": f"What is {a}+{a}?", "answer": str(2 * a)} for a in (10, 11, 12)]
    given = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right])}
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **given)
    if kind == "guess":
        return Guess(max_turns=3, **given)
    if kind == "keeper":
        return Keeper(max_turns=3, **given)
    return vf.EnvGroup([load_environment("tools"), load_environment("guess")])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "calls"), [("tools", 2), ("guess", 3), ("keeper", 2), ("group", None)]
)
def test_the_real_verifiers(
    kind: str, calls: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("DCPO_VERIFIERS_CLASSIC_PYTHON")
    if not python:
        pytest.skip("DCPO_VERIFIERS_CLASSIC_PYTHON names no Python with the real verifiers")
    (tmp_path / "real_env.py").write_text(REAL)
    monkeypatch.chdir(tmp_path)

    def answer(text: str) -> str:
        if "What is 12+12?" in text and "Too low" not in text:
            return "raise"
        if "tool_response>\n" in text:
            shown = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
            return f"It is {shown}.\n<conf> Confidence: 0.9"
        if '"add"' in text:
            return CALL.replace("3", "11").replace("2", "11", 1)
        if '"look"' in text:
            return '<tool_call>{"name": "look", "arguments": {"key": "k"}}</tool_call>'
        return "It is 22.\n<conf> Confidence: 0.9"

    path = f"verifiers:real-env?python={python}&kind={kind}"
    with rollout(path, answer) as (made, prompts):
        got = sampled(made, prompts, times=2)
    right = got["real-env/1", 1]
    assert right.verdict is not None
    assert right.verdict["score"] == 1.0, made.chat.text_of(right.token_ids)
    assert right.counted is not None
    if calls is not None:
        assert right.counted["agent_calls"] == right.verdict["num_turns"] == calls
    assert right.counted["segments"] == 1
    failed = got["real-env/2", 0].failure
    assert kind == "guess" or "cannot score this" in str(failed)
