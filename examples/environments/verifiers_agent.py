"""Environments of PrimeIntellect's verifiers (``load_environment``, releases 0.1.8 to 0.3) as
agents, in the Python that has them (docs/agents.md). The name behind the colon is the environment:

    environments/bin/python verifiers_agent.py --rows quickstart_calculator > rows.jsonl

    data: {path: rows.jsonl, template: chat}
    rollout:
      agent: verifiers_agent.py:quickstart_calculator
      agent_python: environments/bin/python

The environment makes its rollout itself, its rubric gives the reward, and each function's value is
logged. A reward function that raises is a failed session, no reward of 0.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import sys

import verifiers as vf

# by environment: the arguments of its load_environment, and what its reward can be if not 0 to 1
OPTIONS = {"quickstart_products": {"count": 400}}
RANGES = {"quickstart_products": (0.0, 1.2)}
MARKER = "<conf>"  # opens the stated confidence, which rewards are not to see
_KEY = "OPENAI_API_KEY"
_NO_LIMIT = 24 * 3600.0  # seconds of a call; the session has a limit
# verifiers' names for an answer without content
_EMPTY = ("EmptyModelResponseError", "InvalidModelResponseError")


class RewardFailed(BaseException):
    """A reward function has raised. A rubric would take an ``Exception`` for a reward of 0."""


def __getattr__(name):
    """Return the agent of the environment ``name``, which is loaded once, before sessions."""
    if name.startswith("_"):
        raise AttributeError(name)
    environment = vf.load_environment(name, **OPTIONS.get(name, {}))
    for one in members(environment):
        for rubric in rubrics(one.rubric):
            weighted = zip(rubric.funcs, rubric.weights, strict=True)
            rubric.funcs = [strict(each) if weight else each for each, weight in weighted]
    client_at("http://127.0.0.1:9/v1", "-")  # the first one imports much
    low, high = RANGES.get(name, (0.0, 1.0))

    async def run(problem, client):
        policy = client_at(os.environ["OPENAI_BASE_URL"], os.environ[_KEY])
        state = await environment.rollout(problem["row"]["input"], policy, "policy", {})
        error = state.get("error")
        if type(error).__name__ in _EMPTY:
            # the policy's fault: left out, it would never be learned from
            return {"score": 0.0, "no_answer": 1.0}
        if error is not None:
            raise error
        hide_confidence(state)
        await scored(environment.rubric, state)
        reward = state["reward"]
        if not low <= reward <= high:
            raise ValueError(f"the reward {reward} is outside of {low} to {high} (RANGES)")
        logged = {"reward": reward, **(state["metrics"] or {})}
        return {**logged, "score": (reward - low) / (high - low)}

    return run


def members(environment):
    """Return the environments of a group, or the one that is none."""
    parts = getattr(environment, "envs", None) or ()
    return [one for part in parts for one in members(part)] or [environment]


def rubrics(rubric):
    """Return the rubrics that have reward functions, in or below a rubric."""
    parts = getattr(rubric, "rubrics", None) or ()
    return [one for part in parts for one in rubrics(part)] or [rubric]


def strict(function):
    """Return a reward function whose exceptions a rubric does not catch."""

    @functools.wraps(function)
    async def called(*arguments, **options):
        try:
            value = function(*arguments, **options)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            raise RewardFailed(f"{function.__name__}: {type(error).__name__}: {error}") from error

    return called


async def scored(rubric, state):
    """Let a rubric score a rollout that has ended."""
    if "score_sem" in inspect.signature(rubric.score_rollout).parameters:  # up to 0.1.8
        import contextlib

        await rubric.score_rollout(state, contextlib.AsyncExitStack())
    else:
        await rubric.score_rollout(state)


def hide_confidence(state):
    """Cut what the policy has said in a rollout at its confidence."""
    if isinstance(state["completion"], str):
        state["completion"] = state["completion"].partition(MARKER)[0]
        return
    for message in state["completion"]:
        content = message["content"]
        if message["role"] == "assistant" and isinstance(content, str):
            short = content.partition(MARKER)[0]
            if isinstance(message, dict):
                message["content"] = short
            else:
                message.content = short


def client_at(base_url, api_key):
    """Return the client of the policy at an address, as the release of verifiers has it."""
    try:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig
    except ImportError:  # before 0.1.10 or so
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=_NO_LIMIT)
    os.environ[_KEY] = api_key
    return resolve_client(ClientConfig(api_base_url=base_url, api_key_var=_KEY, timeout=_NO_LIMIT))


def rows(name, part):
    """Yield the problems of an environment."""
    environment = vf.load_environment(name, **OPTIONS.get(name, {}))
    build = "build_eval_dataset" if part == "eval" else "build_dataset"
    if hasattr(environment, build):  # later releases make them on demand
        getattr(environment, build)()
    for row in environment.eval_dataset if part == "eval" else environment.dataset:
        info = row.get("info")
        info = json.loads(info) if isinstance(info, str) and info else info or {}
        numbers = {
            k: v for k, v in info.items() if isinstance(v, (int, float)) and math.isfinite(v)
        }
        # a row needs an answer to show, which the reward does not read
        answer = row.get("answer")
        shown = str(answer) if isinstance(answer, (str, int, float)) else ""
        yield {
            **numbers,
            "problem": plain(row["prompt"]),
            "answer": shown or "-",
            "input": dict(row),
        }


def plain(prompt):
    """Return a prompt as a text, or as messages of role and content."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": each["role"], "content": each["content"]} for each in prompt]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True, metavar="ENV", help="print its problems")
    parser.add_argument("--part", choices=["train", "eval"], default="train")
    arguments = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # an environment may print
    for row in rows(arguments.rows, arguments.part):
        print(json.dumps(row), file=out)
