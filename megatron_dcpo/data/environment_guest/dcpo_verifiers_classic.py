"""Environments of verifiers that are made by ``load_environment``: a dataset, and a rubric of
weighted reward functions. They are in releases 0.1.8 to 0.3.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, get_origin

from dcpo_environment import Refused, check_range, described, plain_numbers, text_messages

# what an environment of one turn does not do in its own way: then its prompts and scores are all
_ONE_TURN = ("rollout", "get_prompt_messages", "get_model_response")
_KEY = "OPENAI_API_KEY"
# errors of verifiers that say that the policy has answered nothing
_OF_THE_POLICY = ("EmptyModelResponseError", "InvalidModelResponseError")
_NO_LIMIT = 24 * 3600.0  # seconds of a call; the session has a limit
# parameters of reward functions that get the responses of a group
_OF_A_GROUP = {"states", "prompts", "completions", "answers", "tasks", "infos"}


def open_classic(module: ModuleType, description: Mapping[str, Any]) -> ClassicEnvironment:
    """Return the environment that ``load_environment`` of the module makes with the options. Raises
    :class:`Refused`.
    """
    import verifiers as vf

    if not hasattr(vf, "load_environment"):
        raise Refused(
            f"it has load_environment, which verifiers {vf.__version__} no longer supports; "
            "install verifiers 0.3 or older"
        )
    options = description["options"]
    known = inspect.signature(module.load_environment).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    unknown = [option for option in options if option not in known]
    if unknown and not takes_all:
        raise Refused(f"it has no option {unknown[0]!r}; valid: {', '.join(known) or 'none'}")
    try:
        environment = vf.load_environment(module.__name__, **options)
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise Refused(f"loading it failed with {described(cause)}") from None
    for one in members(environment):
        _check_rubric(vf, one, description)
    return ClassicEnvironment(environment, _more_than_one_turn(vf, environment), description)


def members(environment: Any) -> list[Any]:  # noqa: ANN401 - verifiers has no types here
    """Return the environments of a group, or the one that is none."""
    parts = getattr(environment, "envs", None)
    if parts is None:
        return [environment]
    return [member for part in parts for member in members(part)]


def _more_than_one_turn(vf: Any, environment: Any) -> str:  # noqa: ANN401 - verifiers has no types
    """Return why an environment is not one of one turn without tools, "" if it is."""
    kind = type(environment)
    if isinstance(environment, vf.EnvGroup):
        return "it is a group of environments"
    if not isinstance(environment, vf.SingleTurnEnv):
        return f"it has several turns or tools ({kind.__name__})"
    if getattr(environment, "tool_defs", None) or getattr(environment, "oai_tools", None):
        return "it has tools"
    own = [
        method
        for method in _ONE_TURN
        if getattr(kind, method, None) is not getattr(vf.SingleTurnEnv, method, None)
    ]
    return f"{kind.__name__} has its own {own[0]}" if own else ""


def _check_rubric(
    vf: Any,  # noqa: ANN401 - verifiers has no types here
    environment: Any,  # noqa: ANN401
    description: Mapping[str, Any],
) -> None:
    """Raise :class:`Refused` if the rubric compares the responses of a group, asks a judge model
    without leave, or may give a reward outside of [0, 1] that is not declared.
    """
    scores = inspect.signature(environment.rubric.score_rollout).parameters
    if "state" not in scores or not hasattr(environment, "init_state"):
        raise Refused("its release of verifiers is too old; install 0.1.8 or later")
    weights: dict[str, float] = {}
    for rubric in leaves(environment.rubric):
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
            name = getattr(function, "__name__", repr(function))
            if _compares(function):
                raise Refused(
                    f"its reward function {name} compares the responses of a group; only functions "
                    "of one response are supported"
                )
            if weight:
                weights[name] = weights.get(name, 0.0) + weight
        asks = isinstance(rubric, vf.JudgeRubric) or {"judge", "judge_client"} & set(
            rubric.class_objects
        )
        if asks and not description["judge"]:
            raise Refused(
                f"its rubric asks a judge model ({type(rubric).__name__}); add judge=true if its "
                "address and key are set, and see judging.test_seconds"
            )
    check_range(weights, description["range"])


def _compares(function: Callable[..., Any]) -> bool:
    """Return whether a reward function gets the responses of a group, by verifiers' rule."""
    signature = inspect.signature(function)
    if _OF_A_GROUP & set(signature.parameters):
        return True
    returned = signature.return_annotation
    return returned is list or get_origin(returned) is list


def leaves(rubric: Any) -> list[Any]:  # noqa: ANN401 - rubrics of any kind
    """Return the rubrics that have reward functions, in or below a rubric."""
    parts = getattr(rubric, "rubrics", None)
    if parts is None:
        return [rubric]
    return [leaf for part in parts for leaf in leaves(part)]


class ClassicEnvironment:
    """An environment with a dataset and a rubric (``dcpo_environment.Environment``).

    A rubric turns an exception of a reward function into a score of 0. Here the functions that have
    a weight are wrapped, so that it is an error instead.
    """

    def __init__(
        self,
        environment: Any,  # noqa: ANN401 - verifiers has no types here
        more_than_one_turn: str,
        description: Mapping[str, Any],
    ) -> None:
        self.environment = environment
        self.more_than_one_turn = more_than_one_turn
        self.description = description
        self.errors: list[BaseException] = []
        for member in members(environment):
            for rubric in leaves(member.rubric):
                wrapped = []
                for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                    wrapped.append(_noting(function, self.errors) if weight else function)
                rubric.funcs = wrapped

    def rows(self) -> Iterator[dict[str, Any]]:
        environment = self.environment
        size = self.description["size"]
        part = self.description["part"]
        if not part:
            part = "eval" if self.description["held_out"] else "train"
        build = "build_eval_dataset" if part == "eval" else "build_dataset"
        if hasattr(environment, build):  # later releases make them on demand
            getattr(environment, build)()
        other = "train" if part == "eval" else "eval"
        found = environment.eval_dataset if part == "eval" else environment.dataset
        if found is None:
            raise Refused(
                f"it has no problems for part={part}; part={other} names those that it has"
            )
        for row in found.select(range(min(len(found), size or len(found)))):
            info = row.get("info")
            info = json.loads(info) if isinstance(info, str) and info else info
            numbers = plain_numbers(info) if isinstance(info, Mapping) else {}
            answer = row.get("answer")
            yield {
                "messages": text_messages(row["prompt"]),
                "answer": answer if isinstance(answer, str | int | float) else "",
                "input": dict(row),
                "numbers": {**numbers, **plain_numbers(row)},
            }

    def prepare(self) -> None:
        _nobody()  # a first client imports much

    async def run(
        self,
        given: Any,  # noqa: ANN401 - a row of its dataset
        base_url: str,
        api_key: str,
    ) -> tuple[float, dict[str, Any]]:
        environment = self.environment
        state = await environment.rollout(given, _client(base_url, api_key), "policy", {})
        error = state.get("error")
        if type(error).__name__ in _OF_THE_POLICY:
            # its fault, and no failure: left out, such answers would never be learned from
            return (self.description["range"] or (0.0,))[0], {"no_answer": 1.0}
        if error is not None:
            raise error
        return await self._reward(state)

    async def score(self, given: Any, text: str) -> tuple[float, dict[str, Any]]:  # noqa: ANN401
        environment = self.environment
        state = await environment.init_state(given, _nobody(), "policy", {})
        state = await environment.setup_state(state) or state
        completion = _completion(environment, given, text)
        step = {
            "prompt": state["prompt"],
            "completion": completion,
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "extras": {},
        }
        state["trajectory"] = [step]
        state["completion"] = completion
        state["is_completed"] = True
        state["stop_condition"] = "max_turns_reached"
        return await self._reward(state)

    async def _reward(self, state: Any) -> tuple[float, dict[str, Any]]:  # noqa: ANN401
        """Return what the rubric says of a rollout that has ended."""
        self.errors.clear()
        rubric = self.environment.rubric
        if "score_sem" in inspect.signature(rubric.score_rollout).parameters:
            await rubric.score_rollout(state, contextlib.AsyncExitStack())
        else:
            await rubric.score_rollout(state)
        if hasattr(rubric, "cleanup"):
            await rubric.cleanup(state)
        if self.errors:
            raise self.errors[0]
        return state["reward"], dict(state["metrics"] or {})


def _completion(environment: Any, given: Any, text: str) -> Any:  # noqa: ANN401 - no types here
    """Return the response as the environment's release has it: a text, messages, or objects."""
    if isinstance(given.get("prompt"), str) and environment.message_type != "chat":
        return text
    messages = [{"role": "assistant", "content": text}]
    try:
        from verifiers.utils.message_utils import normalize_messages
    except ImportError:  # messages are mappings in older releases
        return messages
    return normalize_messages(messages, field_name="completion")


def _client(base_url: str, api_key: str) -> Any:  # noqa: ANN401 - verifiers has no types here
    """Return the client of the policy at an address, as the environment's release has it."""
    try:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig
    except ImportError:  # releases before 0.1.10 or so take OpenAI's
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=_NO_LIMIT)
    os.environ[_KEY] = api_key
    return resolve_client(ClientConfig(api_base_url=base_url, api_key_var=_KEY, timeout=_NO_LIMIT))


def _nobody() -> Any:  # noqa: ANN401 - verifiers has no types here
    """Return the client of a policy that is never asked, which a state must have."""
    return _client("http://127.0.0.1:9/v1", "none")


def _noting(function: Callable[..., Any], errors: list[BaseException]) -> Callable[..., Any]:
    """Return a function that behaves as ``function`` and appends what it raises to ``errors``."""

    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        try:
            result = function(*args, **options)
        except Exception as error:
            errors.append(error)
            raise
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Any) -> object:  # noqa: ANN401 - an awaitable
        try:
            return await result
        except Exception as error:
            errors.append(error)
            raise

    return called
