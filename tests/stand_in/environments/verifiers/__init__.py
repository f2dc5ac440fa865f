"""A stand-in for verifiers 0.1.8 to 0.3, with the names and the behavior that are relied on:
``load_environment``, a dataset, a rubric that turns what a reward function raises into 0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

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


class MultiTurnEnv:
    message_type = "chat"

    def __init__(
        self, rubric: Rubric, dataset: Dataset | None = None, eval_dataset: Dataset | None = None
    ) -> None:
        self.rubric = rubric
        self.dataset = dataset
        self.eval_dataset = eval_dataset

    async def rollout(self) -> None:
        raise NotImplementedError

    async def init_state(
        self, row: dict[str, Any], client: object, model: str, sampling_args: object
    ) -> dict[str, Any]:
        return {"input": dict(row), "prompt": row["prompt"]}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


class SingleTurnEnv(MultiTurnEnv):
    pass


class EnvGroup(MultiTurnEnv):
    pass


def load_environment(name: str, **options: Any) -> MultiTurnEnv:
    try:
        return importlib.import_module(name.replace("-", "_")).load_environment(**options)
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{name}'") from error
