"""A stand-in for verifiers 0.1.8 to 0.3, with the names and the behavior that are relied on:
``load_environment``, a dataset, a rubric that turns what a reward function raises into 0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import openai

__version__ = "0.0.stand-in"


class Dataset(list):
    """Rows, as the ``datasets`` library has them."""

    def select(self, indices: range) -> Dataset:
        return Dataset(self[index] for index in indices)


class Rubric:
    def __init__(self, funcs: list[Callable[..., Any]], weights: list[float] | None = None) -> None:
        self.funcs = funcs
        self.weights = weights or [1.0] * len(funcs)
        self.class_objects: dict[str, Any] = {}

    def _is_group_func(self, function: Callable[..., Any]) -> bool:
        return "completions" in inspect.signature(function).parameters

    async def score_rollout(self, state: dict[str, Any]) -> None:
        metrics = {}
        total = 0.0
        for function, weight in zip(self.funcs, self.weights, strict=True):
            known = {**state["input"], **state}
            parameters = inspect.signature(function).parameters
            try:
                value = function(**{k: v for k, v in known.items() if k in parameters})
                value = float(await value if inspect.isawaitable(value) else value)
            except Exception:  # as the real one: logged, and 0
                value = 0.0
            metrics[function.__name__] = value
            total += weight * value
        state["reward"] = total
        state["metrics"] = metrics


class RubricGroup(Rubric):
    def __init__(self, rubrics: list[Rubric]) -> None:
        super().__init__([])
        self.rubrics = rubrics

    async def score_rollout(self, state: dict[str, Any]) -> None:
        total = 0.0
        metrics: dict[str, float] = {}
        for rubric in self.rubrics:
            await rubric.score_rollout(state)
            total += state["reward"]
            metrics |= state["metrics"]
        state["reward"] = total
        state["metrics"] = metrics


class JudgeRubric(Rubric):
    pass


class EmptyModelResponseError(Exception):
    pass


class MultiTurnEnv:
    message_type = "chat"
    max_turns = 10
    oai_tools: list[dict[str, Any]] | None = None

    def __init__(
        self, rubric: Rubric, dataset: Dataset | None = None, eval_dataset: Dataset | None = None
    ) -> None:
        self.rubric = rubric
        self.dataset = dataset
        self.eval_dataset = eval_dataset

    async def env_response(
        self, messages: list[dict[str, Any]], state: dict[str, Any]
    ) -> list[dict[str, Any]]:
        return []

    async def rollout(
        self,
        row: dict[str, Any],
        client: openai.AsyncOpenAI,
        model: str,
        sampling_args: dict[str, Any],
    ) -> dict[str, Any]:
        state = await self.setup_state(await self.init_state(row, client, model, sampling_args))
        state["error"] = None
        messages = list(state["prompt"])
        options: dict[str, Any] = {"tools": self.oai_tools} if self.oai_tools else {}
        for _ in range(self.max_turns):
            try:
                reply = await client.chat.completions.create(
                    model=model, messages=messages, **options, **sampling_args
                )
            except openai.BadRequestError as error:
                if "context length" not in str(error):
                    state["error"] = error
                break
            message = reply.choices[0].message
            if not message.content and not message.tool_calls:
                state["error"] = EmptyModelResponseError("no content and no calls")
                break
            messages.append(message.model_dump(exclude_none=True))
            more = await self.env_response(messages, state)
            if not more:
                break
            messages += more
        state["completion"] = messages[len(state["prompt"]) :]
        return state

    async def init_state(
        self, row: dict[str, Any], client: object, model: str, sampling_args: object
    ) -> dict[str, Any]:
        return {"input": dict(row), "prompt": row["prompt"]}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


class SingleTurnEnv(MultiTurnEnv):
    pass


class EnvGroup(MultiTurnEnv):
    """Rows say with ``task`` of which environment they are."""

    def __init__(self, envs: list[MultiTurnEnv]) -> None:
        rows = Dataset()
        for number, environment in enumerate(envs):
            rows += [{**row, "task": number} for row in environment.dataset or ()]
        super().__init__(GroupRubric(envs), rows, rows)
        self.envs = envs

    async def rollout(self, row: dict[str, Any], *others: Any) -> dict[str, Any]:
        return await self.envs[row["task"]].rollout(row, *others)


class GroupRubric(Rubric):
    def __init__(self, envs: list[MultiTurnEnv]) -> None:
        super().__init__([])
        self.envs = envs

    async def score_rollout(self, state: dict[str, Any]) -> None:
        await self.envs[state["input"]["task"]].rubric.score_rollout(state)


def load_environment(name: str, **options: Any) -> MultiTurnEnv:
    try:
        return importlib.import_module(name.replace("-", "_")).load_environment(**options)
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{name}'") from error
