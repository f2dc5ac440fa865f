"""Agents in processes of their own: what they return, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.agents import (
    AgentHost,
    AgentRollout,
    verdict_of,
)
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Response, ResponseKey
from tests.helpers.chat_policy import ScriptedEngine, prompt_of

AGENT = """
import asyncio, contextlib, os, subprocess, sys, time
import numpy, numpy.random
import openai

async def ask(client, text="What is 6 x 7?", **options):
    messages = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="x", messages=messages, **options)

async def run(problem, client):
    await ask(client, problem["problem"])
    return await globals()[problem["row"]["does"]](problem, client)

async def nothing(problem, client):
    return None

async def scores(problem, client):
    return 0.25

async def logs(problem, client):
    return {"score": 1, "steps": 3}

async def scalars(problem, client):
    return {"score": numpy.float32(0.25), "steps": numpy.int64(3)}

async def draws(problem, client):
    return {"score": 1, "drawn": float(numpy.random.random())}

async def asks(problem, client):
    return {"score": 1, "directly": os.environ["no_proxy"]}

async def told(problem, client):
    assert problem["answer"] == "42" and problem["messages"] and problem["prompt"]
    assert os.environ["OPENAI_API_KEY"] == client.api_key
    return {"score": 1, "seed": problem["seed"]}

async def crashes(problem, client):
    return 1 / 0

async def exits(problem, client):
    os._exit(3)

async def hangs(problem, client):
    while True:
        time.sleep(1)

async def waits(problem, client):
    await asyncio.sleep(1000)

async def forks(problem, client):
    words = [sys.executable, "-c", "import time; time.sleep(1000)", problem["row"]["mark"]]
    subprocess.Popen(words)
    return None

async def leaves(problem, client):
    if os.fork() == 0:
        time.sleep(1000)
    return 0.5

async def strays(problem, client):
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                os.write(int(name), b"5")
    os._exit(0)

async def eats(problem, client):
    return len(bytearray(1 << 30))

async def floods(problem, client):
    while True:
        await ask(client)

async def floods_quietly(problem, client):
    for _ in range(50):
        try:
            await ask(client)
        except openai.BadRequestError:
            pass
    return None

async def forges(problem, client):
    other = client.with_options(api_key="another", max_retries=0)
    try:
        await ask(other)
    except openai.AuthenticationError:
        return {"score": 0.5}

async def kills(problem, client):
    os.kill(os.getppid(), 9)
    time.sleep(1000)

async def nested(problem, client):
    value = []
    for _ in range(problem["row"]["levels"]):
        value = [value]
    return {"score": 0.5, "trace": value}

async def wrong(problem, client):
    return {"score": 7}

async def large(problem, client):
    return {"score": 1, "text": "x" * (1 << 21)}
"""


def write(folder: Path, text: str, name: str = "agent.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return f"{folder / name}:run"


@contextmanager
def rollout(answer: Any = lambda text: "It is 42.", **changed: Any) -> Iterator[AgentRollout]:
    engine: Any = ScriptedEngine(answer)
    given: dict[str, Any] = {
        "agent_sessions": 8,
        "agent_seconds": 20.0,
        "agent_calls": 6,
        "asks_confidence": False,
    }
    made = AgentRollout(
        engine=engine,
        chat=engine.chat,
        config=AgentsConfig(**{**given, **changed}),
        model="policy",
        sequence_tokens=4000,
        marker="<conf>",
    )
    try:
        yield made
    finally:
        made.close()


def sampled(
    made: AgentRollout, *does: str, times: int = 1, most: int = 2000, **row: Any
) -> dict[ResponseKey, Response]:
    samples = []
    for name in does:
        prompt = prompt_of([{"role": "user", "content": f"{name}?"}], made.chat, name)
        prompt = type(prompt)(
            **{**vars(prompt), "row": {"does": name, **row}, "problem": "What is 6 x 7?"}
        )
        samples += [(prompt, index) for index in range(times)]
    sampling = SamplingConfig(max_tokens=most)
    return {one.key: one for group in made.stream(samples, sampling, 2) for one in group}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentRollout]:
    path = write(tmp_path_factory.mktemp("agents"), AGENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dcpo.rollout.agents.MEMORY_BYTES", 128 << 20)
        with rollout(agent=path, agent_seconds=3.0) as made:
            yield made


def test_what_agents_return_are_verdicts(agents: AgentRollout) -> None:
    got = sampled(agents, "nothing", "scores", "logs", "scalars", "told", times=2)
    assert len(got) == 10
    assert all(one.failure is None for one in got.values())
    verdicts = {name: got[name, 0].verdict for name in ("nothing", "scores", "logs", "scalars")}
    assert verdicts == {
        "nothing": None,
        "scores": {"score": 0.25},
        "logs": {"score": 1.0, "steps": 3},
        "scalars": {"score": 0.25, "steps": 3},
    }
    told = [got["told", index].verdict for index in range(2)]
    assert all(each is not None for each in told)
    assert told[0] != told[1], "each response has a seed of its own"
    response = got["nothing", 1]
    assert response.key == ("nothing", 1)
    assert agents.chat.text_of(response.token_ids) == "It is 42.<|im_end|>"
    assert (response.weights_version, response.step) == (3, 2)
    assert response.counted is not None
    assert response.counted["agent_calls"] == 1


def test_one_that_fails_is_left_out_and_the_others_go_on(agents: AgentRollout) -> None:
    """Nothing that fails is a wrong answer."""
    failing = ("crashes", "exits", "hangs", "waits", "eats", "wrong", "large", "strays")
    got = sampled(agents, *failing, "scores")
    for name in failing:
        one = got[name, 0]
        assert one.failure, name
        assert len(one.token_ids) == 0
        assert one.verdict is None
    assert "ZeroDivisionError" in str(got["crashes", 0].failure)
    assert "agent.py" in str(got["crashes", 0].failure)
    assert "3" in str(got["exits", 0].failure)
    assert got["scores", 0].failure is None


@pytest.mark.parametrize("levels", [90, 975, 1500])
def test_a_verdict_is_no_deeper_than_json_is_read(tmp_path: Path, levels: int) -> None:
    """Whatever the agent's module does with Python's limit, which was ours then."""
    path = write(tmp_path, AGENT + "\nsys.setrecursionlimit(100_000)")
    with rollout(agent=path) as made:
        got = sampled(made, "nested", "scores", levels=levels)
    assert got["scores", 0].failure is None
    assert (got["nested", 0].failure is None) == (levels < 100)


def test_a_session_whose_budget_is_used_up_is_truncated_and_stays(agents: AgentRollout) -> None:
    got = sampled(agents, "floods", "floods_quietly")
    for one in got.values():
        assert one.failure is None
        assert one.counted is not None
        assert one.counted["agent_calls"] == 6
        assert one.finish_reason == "length"
    (short,) = sampled(agents, "floods", most=24).values()
    assert len(short.token_ids) <= 24
    assert short.finish_reason == "length"


def test_the_key_of_another_session_opens_nothing(agents: AgentRollout) -> None:
    (one,) = sampled(agents, "forges").values()
    assert one.verdict == {"score": 0.5}


def test_what_an_agent_has_started_ends_with_it(agents: AgentRollout) -> None:
    mark = f"dcpo-mark-{os.getpid()}"
    (one,) = sampled(agents, "forks", mark=mark).values()
    assert one.failure is None
    deadline = time.monotonic() + 5
    while _is_running(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_session_ends_with_its_process_whatever_that_has_forked(agents: AgentRollout) -> None:
    (one,) = sampled(agents, "leaves").values()
    assert one.verdict == {"score": 0.5}


def test_sessions_draw_other_numbers_each_and_the_same_again(tmp_path: Path) -> None:
    with rollout(agent=write(tmp_path, AGENT)) as made:
        first, second = (sampled(made, "draws", times=3) for _ in range(2))
    drawn = [one.verdict["drawn"] for one in first.values() if one.verdict]
    assert len(set(drawn)) == len(first) == 3
    assert all(second[key].verdict == one.verdict for key, one in first.items())


def _is_running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_hundred_sessions_leave_nothing_behind(agents: AgentRollout) -> None:
    """Case 8: no descriptors, but for connections that are just being closed; the endpoint knows no
    session and waits for no call.
    """
    sampled(agents, "nothing", times=5)
    before = len(os.listdir("/proc/self/fd"))
    got = sampled(agents, "nothing", "scores", times=50)
    assert len(got) == 100
    assert len(os.listdir("/proc/self/fd")) <= before + 20
    assert agents.endpoint._sessions == {}
    assert agents.endpoint._waiting == {}


def test_the_same_samples_make_the_same_responses(agents: AgentRollout) -> None:
    first = sampled(agents, "scores", "told", times=3)
    second = sampled(agents, "told", "scores", times=3)
    for key, one in first.items():
        other = second[key]
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.verdict == other.verdict


def test_a_rollout_that_is_given_up_ends_its_agents(agents: AgentRollout) -> None:
    prompt = prompt_of([{"role": "user", "content": "?"}], agents.chat, "p")
    prompt = type(prompt)(**{**vars(prompt), "row": {"does": "waits"}, "problem": "x"})
    nothing = type(prompt)(**{**vars(prompt), "row": {"does": "nothing"}, "prompt_id": "q"})
    stream = agents.stream([(prompt, 0), (nothing, 0)], SamplingConfig(max_tokens=99), 1)
    assert [one.prompt_id for one in next(stream)] == ["q"]
    stream.close()
    assert agents.endpoint._sessions == {}
    # what comes late from there is not taken for a session of the next one
    assert len(sampled(agents, "scores", times=3)) == 3


def test_the_policy_is_asked_for_its_confidence(tmp_path: Path) -> None:
    def answer(text: str) -> str:
        return " 0.75" if text.endswith("<conf> Confidence:") else "It is 42."

    path = write(tmp_path, AGENT)
    with rollout(answer, agent=path, asks_confidence=True) as made:
        got = sampled(made, "scores", "nothing", times=2)
    for one in got.values():
        text = made.chat.text_of(one.token_ids)
        assert text == "It is 42.\n<conf> Confidence: 0.75<|im_end|>"
        assert one.loss_mask is not None
        assert made.chat.text_of(one.token_ids[one.loss_mask]) == "It is 42. 0.75<|im_end|>"
    assert got["scores", 1].verdict == {"score": 0.25}


def test_hosts_that_are_asked_without_a_proxy_stay_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the policy is, whatever proxy the others have."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "tools.example")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with rollout(agent=write(tmp_path, AGENT)) as made:
        (one,) = sampled(made, "asks").values()
    assert one.verdict is not None
    assert {"tools.example", "127.0.0.1"} <= set(one.verdict["directly"].split(","))


@pytest.mark.parametrize(
    "text",
    ["def other(): pass", "import no_such_module", "1 / 0", "(", "run = 3", "def run(problem): 1"],
)
def test_an_agent_that_cannot_be_loaded_ends_the_run_at_its_start(
    tmp_path: Path, text: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=r"rollout\.agent=.*agent\.py:run"), rollout(agent=path):
        pass


def test_a_python_that_cannot_be_run_ends_the_run_at_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, AGENT)
    for python in (str(tmp_path / "nothing"), path.partition(":")[0]):
        with (
            pytest.raises(UserError, match=r"rollout\.agent=.*agent\.py:run"),
            rollout(agent=path, agent_python=python),
        ):
            pass


def test_a_python_that_ends_fails_its_sessions_and_is_started_again(tmp_path: Path) -> None:
    """It has a PYTHONPATH of its own, and nothing of this package."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    text = (
        AGENT
        + """
async def lonely(problem, client):
    return {"score": 1, "ours": "megatron_dcpo" in sys.modules, "path": "PYTHONPATH" in os.environ}
"""
    )
    with rollout(agent=write(tmp_path, text), agent_python=str(python)) as made:
        (one,) = sampled(made, "lonely").values()
        assert one.verdict == {"score": 1.0, "ours": False, "path": False}
        (lost,) = sampled(made, "kills").values()
        assert lost.failure
        (again,) = sampled(made, "scores").values()
        assert again.verdict == {"score": 0.25}


def ready_and(then: str) -> tuple[str, ...]:
    """A process that says that it can start agents, and then does something else."""
    says = "import os, sys, time; print('0 0 15\\n{\"ready\": true}', end='', flush=True); "
    return sys.executable, "-c", says + then


@pytest.mark.parametrize(
    "then",
    [
        "sys.stdin.read()",
        "os.close(1); sys.stdin.read()",
        "print('1 2', flush=True); sys.stdin.read()",
    ],
    ids=["says nothing", "has said its last", "says what nobody understands"],
)
def test_a_session_waits_for_no_process_that_does_not_answer(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, swapped, ended but for its last lines: the next session gets another process."""
    monkeypatch.setattr("megatron_dcpo.rollout.agents._KILL_SECONDS", 0.5)

    async def outcomes() -> None:
        host = AgentHost("agent", ready_and(then), 0.5)
        first = await host.start()
        began = time.monotonic()
        assert "error" in await host.run({}, "", "")
        assert time.monotonic() - began < 10
        assert await host.start() is not first
        await host.close()

    asyncio.run(outcomes())


# -------------------------------------------------------------------------------------- commands
COMMAND = """
import json, os, subprocess, sys, urllib.request

problem = json.load(sys.stdin)
assert problem == json.loads(os.environ["DCPO_PROBLEM"])
body = {"model": "x", "messages": [{"role": "user", "content": problem["problem"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
reply = json.load(urllib.request.urlopen(request))
does = problem["row"]["does"]
if does == "scores":
    print("some words\\n" + json.dumps({"score": 0.5, "words": 2}))
elif does == "shows":
    print(json.dumps({"score": 0.5, "text": "a\u2028b" + "x" * 100_000}, ensure_ascii=False))
elif does == "leaves":
    subprocess.Popen(["sleep", "1000"])
    print(json.dumps({"score": 0.5}))
elif does == "nothing":
    print(42)
elif does == "fails":
    sys.exit("no tool")
elif does == "prints":
    print("x" * (1 << 24))
elif does == "loops":
    while True:
        print("x" * 1000)
"""


def test_a_plain_program_is_an_agent(tmp_path: Path) -> None:
    write(tmp_path, COMMAND, "program.py")
    command = f"{sys.executable} {tmp_path / 'program.py'}"
    with rollout(command=command, agent_seconds=5.0) as made:
        got = sampled(made, "scores", "nothing", "fails", "prints", "loops")
    assert got["scores", 0].verdict == {"score": 0.5, "words": 2}
    assert got["nothing", 0].verdict is None
    assert got["prints", 0].verdict is None
    assert "no tool" in str(got["fails", 0].failure)
    assert got["loops", 0].failure
    assert np.mean([one.failure is None for one in got.values()]) == 0.6


def test_the_verdict_of_a_program_is_its_whole_last_line_once_it_has_ended(tmp_path: Path) -> None:
    """Whatever stands in it, however long it is, and whatever the program has started."""
    write(tmp_path, COMMAND, "program.py")
    with rollout(command=f"{sys.executable} {tmp_path / 'program.py'}", agent_seconds=20.0) as made:
        got = sampled(made, "shows", "leaves")
    scores = [one.verdict and one.verdict["score"] for one in got.values()]
    assert scores == [0.5, 0.5]


def test_a_program_that_is_not_there_fails_by_name(tmp_path: Path) -> None:
    with rollout(command=f"{tmp_path / 'nothing'} --here") as made:
        (one,) = sampled(made, "scores").values()
    assert "nothing" in str(one.failure)


@pytest.mark.parametrize(
    ("outcome", "fails", "verdict"),
    [
        ({"value": None}, False, None),
        ({"value": True}, False, {"score": 1.0}),
        ({"value": {"score": 0.5, "n": 2}}, False, {"score": 0.5, "n": 2}),
        ({"value": {"n": 2}}, True, None),
        ({"error": ""}, True, None),
    ],
)
def test_outcomes(outcome: dict[str, Any], fails: bool, verdict: Any) -> None:
    why, found = verdict_of(outcome)
    assert bool(why) == fails
    assert found == verdict


def test_an_engine_that_fails_ends_the_sessions_and_the_next_rollout_works(tmp_path: Path) -> None:
    """Case 12: what was handed over stands, nothing else is taken from it."""
    with rollout(agent=write(tmp_path, AGENT)) as made:
        engine: Any = made.engine
        serve = engine.serve

        def failing(*arguments: Any) -> Iterator[list[Response]]:
            for number, responses in enumerate(serve(*arguments)):
                if number == 100:
                    raise EngineError("killed")
                yield responses

        engine.serve = failing
        with pytest.raises(EngineError):
            sampled(made, "waits")
        engine.serve = serve
        assert made.endpoint._sessions == {}
        got = sampled(made, "scores", times=2)
        assert all(one.failure is None for one in got.values())
