"""A stand-in for ``verifiers.v1`` (0.3 and 0.4), with the names that are relied on: a taskset of
tasks, whose rewards are methods with a weight that read a trace.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict


class TaskData(BaseModel):
    idx: int | None = None
    prompt: Any = None
    system_prompt: str | None = None


class TaskConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    task: TaskConfig = TaskConfig()


class JudgeConfig(BaseModel):
    pass


class SystemMessage(BaseModel):
    role: str = "system"
    content: str


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str


@dataclass
class MessageNode:
    parent: int | None
    message: Any
    sampled: bool


@dataclass
class Trace:
    task: Any
    state: Any
    agent: Any
    nodes: list[MessageNode]
    is_completed: bool
    ok: bool
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return sum(one.score * one.weight for one in self.rewards.values())

    @property
    def last_reply(self) -> str:
        return self.nodes[-1].message.content.strip()


@dataclass
class TraceTask:
    type: str
    data: Any
    key: str
    hash: str


@dataclass
class AgentConfig:
    pass


@dataclass
class AgentInfo:
    config: AgentConfig


class SingleAgentEnv:
    pass


def reward(weight: float = 1.0) -> Callable[..., Any]:
    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.reward = True  # type: ignore[attr-defined]
        function._vf_weight = weight  # type: ignore[attr-defined]
        return function

    return mark


class Task:
    key = hash = "same"
    DATA = TaskData

    def __init__(self, data: TaskData, config: TaskConfig) -> None:
        self.data = data
        self.config = config

    async def setup(self, trace: Trace, runtime: object) -> None:
        return None

    async def finalize(self, trace: Trace, runtime: object) -> None:
        return None

    @classmethod
    def data_type(cls) -> type[TaskData]:
        return cls.DATA

    @classmethod
    def toolsets(cls, config: object) -> list[object]:
        return []

    def plugged_judges(self) -> list[object]:
        return []

    def hooks(self, tag: str) -> list[Callable[..., Any]]:
        found = [getattr(self, name) for name in dir(type(self))]
        return [one for one in found if hasattr(one, tag)]

    async def score(self, trace: Trace, runtime: object = None) -> None:
        for hook in self.hooks("reward"):
            if "runtime" in inspect.signature(hook).parameters:
                continue
            score = await hook(trace=trace)
            trace.rewards[hook.__name__] = SimpleNamespace(score=score, weight=hook._vf_weight)


class Taskset:
    INFINITE = False
    CONFIG = TasksetConfig
    TASK = Task

    def __init__(self, config: TasksetConfig) -> None:
        self.config = config

    def __iter__(self) -> Iterator[Task]:
        for index, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": index})
            yield task

    def load(self) -> Iterator[Task]:
        raise NotImplementedError

    @classmethod
    def toolsets(cls, config: object) -> list[object]:
        return []


def _exported(name: str, base: type) -> Any:
    module = importlib.import_module(name.replace("-", "_"))
    for one in module.__all__:
        if issubclass(getattr(module, one), base):
            return getattr(module, one)
    return None


def taskset_config_type(name: str) -> type[TasksetConfig]:
    return _exported(name, Taskset).CONFIG


def load_taskset(config: TasksetConfig) -> Taskset:
    return _exported(config.id, Taskset)(config)


def task_type(name: str) -> type[Task]:
    return _exported(name, Taskset).TASK


def environment_class(name: str) -> type:
    return _exported(name, SingleAgentEnv) or SingleAgentEnv
