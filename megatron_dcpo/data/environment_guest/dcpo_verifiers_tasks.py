"""Environments of verifiers that export a ``Taskset`` (``verifiers.v1``): tasks with data, and
rewards of a trace. They are in releases 0.3 and later.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from dcpo_environment import Refused, check_range, described, plain_numbers, text_messages

_WEIGHT = "_vf_weight"  # where verifiers keeps the weight of a reward


def open_taskset(name: str, description: Mapping[str, Any]) -> TasksetEnvironment:
    """Return the environment with the options as its configuration. Raises :class:`Refused`."""
    try:
        import verifiers.v1 as vf
    except ImportError:
        raise Refused(
            "it has no load_environment, and this release of verifiers has no verifiers.v1, which "
            "its taskset would need; install verifiers 0.3 or later"
        ) from None
    try:
        options = {"id": name, **nested(description["options"])}
        config = vf.taskset_config_type(name).model_validate(options)
        taskset = vf.load_taskset(config)
        kind = vf.task_type(name)
        turns = vf.environment_class(name)
    except Exception as error:
        raise Refused(_first(error)) from None
    _check_turns(vf, turns, [*taskset.toolsets(config), *kind.toolsets(config.task)])
    _check_task(vf, kind)
    return TasksetEnvironment(vf, taskset, kind, description)


def _check_turns(
    vf: Any,  # noqa: ANN401 - the module verifiers.v1
    turns: type,
    tools: list[Any],
) -> None:
    """Raise :class:`Refused` unless the environment has one turn without tools."""
    if turns is not vf.SingleAgentEnv:
        raise Refused(
            f"it defines turns or agents itself ({turns.__name__}); of tasksets "
            "only those of one turn are supported"
        )
    if tools:
        raise Refused(
            f"it has tools ({type(tools[0]).__name__}); of tasksets only those without "
            "tools are supported"
        )


def _check_task(vf: Any, kind: type) -> None:  # noqa: ANN401 - the module verifiers.v1
    """Raise :class:`Refused` if a task does more than to score the text of a response."""
    own = [
        method
        for method in ("setup", "finalize")
        if getattr(kind, method) is not getattr(vf.Task, method)
    ]
    if own or getattr(kind, "NEEDS_CONTAINER", False):
        what = f"own {own[0]}" if own else "container"
        raise Refused(
            f"{kind.__name__} prepares a runtime for each response (its {what}); only environments "
            "that score the text alone are supported"
        )
    if _tagged(kind, "intercept"):
        raise Refused(
            f"{kind.__name__} changes requests or replies ({_tagged(kind, 'intercept')[0]}), which "
            "would not happen here"
        )


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose names have dots, ``task.power``, as mappings in mappings."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        holder = values
        *parents, last = name.split(".")
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[last] = value
    return values


def _tagged(kind: type, tag: str) -> list[str]:
    """Return the names of the methods of a class with the attribute that a decorator sets."""
    return [name for name in dir(kind) if hasattr(getattr(kind, name, None), tag)]


def _first(error: Exception) -> str:
    """Return the first thing wrong with a configuration, or what loading it raised."""
    if not hasattr(error, "errors"):
        return f"loading it failed with {described(error)}"
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    return f"its option {name!r}: {first['msg']}"


class TasksetEnvironment:
    """An environment of one turn (``dcpo_environment.Environment``)."""

    more_than_one_turn = ""

    def __init__(
        self,
        vf: Any,  # noqa: ANN401 - the module verifiers.v1
        taskset: Any,  # noqa: ANN401 - its Taskset
        kind: Any,  # noqa: ANN401 - a subclass of its Task
        description: Mapping[str, Any],
    ) -> None:
        self.vf = vf
        self.taskset = taskset
        self.kind = kind
        self.description = description

    def rows(self) -> Iterator[dict[str, Any]]:
        size = self.description["size"]
        if self.description["part"]:
            raise Refused(
                f"part={self.description['part']}: it has no parts; if one of its options says "
                "which problems it gives, name that"
            )
        if getattr(self.taskset, "INFINITE", False) and size is None:
            raise Refused("it makes problems without end; say how many with size=N")
        own = set(self.kind.data_type().model_fields) - set(self.vf.TaskData.model_fields)
        for number, task in enumerate(islice(self.taskset, size)):
            if number == 0:
                self.check(task)
            data = task.data
            given = data.model_dump(mode="json", exclude_none=True)
            if data.prompt is None:
                raise Refused(
                    "its conversation is opened by a user that it plays; only environments of one "
                    "turn are supported"
                )
            answer = given.get("answer")
            yield {
                "messages": self.prompt(data),
                "answer": answer if isinstance(answer, str | int | float) else "",
                "input": given,
                "numbers": plain_numbers({k: given[k] for k in given if k in own}),
            }

    def prompt(self, data: Any) -> Any:  # noqa: ANN401 - verifiers' TaskData
        """Return the messages of a task, the system prompt first."""
        prompt = data.prompt
        messages = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = text_messages(prompt)
        if data.system_prompt:
            return [{"role": "system", "content": data.system_prompt}, *messages]
        return messages

    def check(self, task: Any) -> None:  # noqa: ANN401 - verifiers' Task
        """Raise :class:`Refused` if the rewards of a task need more than the text of a response, or
        may leave [0, 1] without a declared range.
        """
        weights: dict[str, float] = {}
        for reward in task.hooks("reward"):
            weight = getattr(reward, _WEIGHT, 1.0)
            parameter = inspect.signature(reward).parameters.get("runtime")
            if parameter is not None and parameter.default is parameter.empty:
                raise Refused(
                    f"its reward {reward.__name__} runs programs in a runtime; only rewards of the "
                    "text alone are supported"
                )
            if weight:
                weights[reward.__name__] = weight
        judges = [judge.reward_name for judge in task.plugged_judges()]
        judges += [name for name, value in task.config if isinstance(value, self.vf.JudgeConfig)]
        if judges and not self.description["judge"]:
            raise Refused(
                f"its rewards ask a judge model ({judges[0]}); add judge=true if its address and "
                "key are set, and see judging.test_seconds"
            )
        for judge in task.plugged_judges():
            weights[judge.reward_name] = judge.config.weight
        check_range(weights, self.description["range"])

    def prepare(self) -> None:
        raise Refused(
            "it is a taskset, which makes its rollouts with a harness that installs programs; "
            "rollout.agent=environment is for environments with load_environment and for NeMo Gym"
        )

    async def run(
        self,
        given: Any,  # noqa: ANN401 - the data of a task
        base_url: str,
        api_key: str,
    ) -> tuple[float, dict[str, Any]]:
        raise NotImplementedError

    async def score(self, given: Any, text: str) -> tuple[float, dict[str, Any]]:  # noqa: ANN401
        vf = self.vf
        data = self.kind.data_type().model_validate(given)
        task = self.kind(data, self.taskset.config.task)
        trace = vf.Trace(
            task=vf.TraceTask(type=self.kind.__name__, data=data, key=task.key, hash=task.hash),
            state=_state(self.kind),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=self._nodes(data, text),
            is_completed=True,
            ok=True,
        )
        await task.score(trace)
        logged = dict(trace.metrics)
        for name, reward in trace.rewards.items():
            if reward is None:
                raise ValueError(f"its reward {name} gave no score")
            logged[name] = reward.score
        return trace.reward, logged

    def _nodes(self, data: Any, text: str) -> list[Any]:  # noqa: ANN401 - verifiers' TaskData
        """Return the prompt and the response, as the trace of one turn has them."""
        vf = self.vf
        of_role = {
            "system": vf.SystemMessage,
            "user": vf.UserMessage,
            "assistant": vf.AssistantMessage,
        }
        nodes = []
        said = [*self.prompt(data), {"role": "assistant", "content": text}]
        for place, message in enumerate(said):
            node = vf.MessageNode(
                parent=place - 1 if place else None,
                message=of_role[message["role"]](content=message["content"]),
                sampled=place == len(said) - 1,
            )
            nodes.append(node)
        return nodes


def _state(kind: type) -> Any:  # noqa: ANN401 - verifiers' State
    from verifiers.v1.state import state_cls

    return state_cls(kind)()
