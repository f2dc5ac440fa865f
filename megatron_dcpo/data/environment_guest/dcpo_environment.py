"""The problems of an environment, its own rollouts, and the scores of responses of one turn, in the
Python in which the environment is installed. ``data/environments.py`` starts it for the problems,
``rollout/agents.py`` for the rollouts, and ``judging/environments.py`` for the scores.

A description is a JSON object: ``kind`` and ``name`` of the environment, its ``options``, the
``part`` of its problems that is asked for (train, eval or ""), whether they are ``held_out`` for an
evaluation, their largest number ``size`` or null, the ``range`` of the reward or null, ``judge``
(true, an address, or false), and ``data``, a file or "".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Protocol

_ROUNDING = 1e-9
# what the sources of an environment are in, and what it is configured by
_SOURCES = (".py", ".yaml", ".yml", ".toml", ".txt")


class Refused(Exception):
    """This environment cannot be used: one line that names it and says what to do instead."""


class Environment(Protocol):
    """An environment.

    ``more_than_one_turn`` says why the text of one answer is not all that its reward depends on, ""
    if it is. ``rows()`` yields the problems that its description asks for: ``messages``, a list of
    role and content or one text; ``answer``, a text to show; ``input``, all that a rollout or a
    score needs, as plain values; ``numbers`` by name; and ``more_than_one_turn`` if that is not the
    same for all. ``prepare()`` comes once, before sessions; it raises :class:`Refused` if the
    environment cannot make rollouts. ``run(given, base_url, api_key)`` makes the
    environment's own rollout on the problem with the input ``given``, by the policy at
    ``base_url``; ``score(given, text)`` takes ``text`` as the one answer. Both return the reward,
    and values to log.
    """

    more_than_one_turn: str

    def rows(self) -> Iterator[dict[str, Any]]: ...

    def prepare(self) -> None: ...

    async def run(
        self,
        given: Any,  # noqa: ANN401 - any JSON value
        base_url: str,
        api_key: str,
    ) -> tuple[float, dict[str, Any]]: ...

    async def score(
        self,
        given: Any,  # noqa: ANN401 - any JSON value
        text: str,
    ) -> tuple[float, dict[str, Any]]: ...


def open_environment(description: Mapping[str, Any]) -> Environment:
    """Return the environment that is described. Raises :class:`Refused`."""
    name = description["name"]
    if description["kind"] == "nemo_gym":
        from dcpo_nemo_gym import open_server

        return open_server(name, description)
    if importlib.util.find_spec("verifiers") is None:
        raise Refused(
            f"the package verifiers is not installed for {sys.executable}; install it there, or "
            "name the Python of an environment that has it (python=.../bin/python)"
        )
    module = import_environment(module_name(name))
    if hasattr(module, "load_environment"):
        from dcpo_verifiers_classic import open_classic

        return open_classic(module, description)
    from dcpo_verifiers_tasks import open_taskset

    return open_taskset(module_name(name), description)


def module_name(name: str) -> str:
    """Return the module of an environment of verifiers: ``owner/my-env@1.0`` -> my_env."""
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_")


def import_environment(module: str) -> Any:  # noqa: ANN401 - a module
    """Return the module of an environment. Raises :class:`Refused` if there is none, or if
    importing it fails.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise Refused(
                f"no module {module} for {sys.executable}; install the environment there, or "
                "correct its name"
            ) from None
        raise Refused(
            f"importing {module} needs {error.name}, which is not installed for {sys.executable}"
        ) from None
    except Exception as error:
        raise Refused(f"importing {module} failed with {described(error)}") from None


def described(error: BaseException) -> str:
    """Return an exception on one line, with the last line of a file that it came through."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith(here)]
    for frame in outside[-1:]:
        text += f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return text


def check_range(weights: Mapping[str, float], declared: list[float] | None) -> None:
    """Raise :class:`Refused` if a weighted sum of scores in [0, 1] can leave [0, 1] and no range is
    declared.
    """
    if not any(weights.values()):
        raise Refused("it has no reward function with a weight, so its reward says nothing")
    low = sum(weight for weight in weights.values() if weight < 0)
    high = sum(weight for weight in weights.values() if weight > 0)
    if declared is None and (low < -_ROUNDING or high > 1 + _ROUNDING):
        named = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise Refused(
            f"the weights of its reward functions ({named}) allow a reward of {low:g} to {high:g}; "
            f"say so with range={low:g}..{high:g}, which is then mapped to 0 to 1"
        )


def scaled(
    reward: float, logged: Mapping[str, Any], declared: list[float] | None
) -> dict[str, Any]:
    """Return the result for a reward: its ``score`` in [0, 1] with the values to log, or an
    ``error``.
    """
    low, high = declared or (0.0, 1.0)
    if not low - _ROUNDING <= reward <= high + _ROUNDING:  # not so for NaN
        return {
            "error": f"the reward {reward:g} is outside of {low:g} to {high:g}; say what it can be "
            "with range=LOW..HIGH"
        }
    result: dict[str, Any] = {"score": min(max((reward - low) / (high - low), 0.0), 1.0)}
    if declared is not None:
        result["reward"] = reward
    for name, value in logged.items():
        taken = name in ("score", "error", "reward")
        result[f"{name}_" if taken else name] = value
    return result


def load(text: str) -> Callable[[str], dict[str, Any]]:
    """Return what a worker (``judging/worker.py``) calls for each response: a function of the JSON
    text of ``[response, input]`` that returns a result. Raises :class:`Refused`.
    """
    description = json.loads(text)
    _seed()
    environment = open_environment(description)
    if environment.more_than_one_turn:
        raise Refused(environment.more_than_one_turn)
    # a classic environment has taken them, and a worker leaves them to its parent
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    loop = asyncio.new_event_loop()

    def judge(asked: str) -> dict[str, Any]:
        nonlocal loop
        response, given = json.loads(asked)
        _seed()  # of reward functions that draw
        try:
            scoring = environment.score(given, response)
            reward, logged = loop.run_until_complete(scoring)
        except (Exception, SystemExit) as error:
            return {"error": described(error)}
        except BaseException:  # out of time, in the middle of a task of this loop
            loop = asyncio.new_event_loop()
            raise
        return scaled(float(reward), logged, description["range"])

    return judge


class SessionFailed(Exception):
    """A rollout gave no reward, and the words say why."""


def load_session(text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what a session (``rollout/agent_host.py``) runs: a function of its order that returns
    the result of the environment's own rollout. Raises :class:`Refused`.
    """
    description = json.loads(text)
    _seed()
    environment = open_environment(description)
    environment.prepare()

    def run(order: dict[str, Any]) -> dict[str, Any]:
        problem = order["problem"]
        _seed(problem["seed"])
        given = problem["row"]["environment"]["input"]
        rollout = environment.run(given, order["base_url"], order["api_key"])
        reward, logged = asyncio.run(rollout)
        result = scaled(float(reward), logged, description["range"])
        if "error" in result:
            raise SessionFailed(result["error"])
        return result

    return run


def explained(error: BaseException) -> str:
    """Return why a session has failed, or why an environment cannot be used."""
    return str(error) if isinstance(error, Refused | SessionFailed) else described(error)


def print_rows() -> None:
    """Print the problems of the environment that the first argument describes, one JSON object a
    line; end with status 1 and one line if there are none to print.
    """
    out = _output()
    description = json.loads(sys.argv[1])
    _seed()
    try:
        environment = open_environment(description)
        for row in environment.rows():
            row.setdefault("more_than_one_turn", environment.more_than_one_turn)
            out.write(json.dumps(row, default=_as_json) + "\n")
        out.flush()
    except Refused as refused:
        _end(str(refused))
    except (Exception, SystemExit) as error:
        _end(described(error))
    os._exit(0)  # without waiting for what an environment has started


def _output() -> IO[str]:
    """Return the process's output, which what an environment prints is kept out of. From now on the
    process ends with its parent.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _end_with(parent: int) -> None:
    """End this process, and those that it has started, once ``parent`` has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _seed(seed: int = 0) -> None:
    """Seed what environments draw from without a seed of their own: ``random`` and NumPy."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % 2**32)


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def _as_json(value: object) -> object:
    """Return a value that JSON has for one that it has not, if they mean the same."""
    if hasattr(value, "tolist"):  # an array or a scalar of NumPy
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise Refused(
        f"a problem holds a {type(value).__name__}, which cannot be kept with its samples"
    )


def print_digest() -> None:
    """Print a digest of what the score depends on besides response, problem and options: the
    sources of the environment with its configuration, these modules, the releases of the libraries.
    """
    out = _output()
    description = json.loads(sys.argv[1])
    digest = hashlib.sha256()
    name = module_name(description["name"])
    library = "verifiers"
    if description["kind"] == "nemo_gym":
        library, name = "nemo-gym", f"resources_servers.{description['name']}"
    folders = [Path(__file__).parent]
    spec = importlib.util.find_spec(name)
    if spec is not None:
        locations = spec.submodule_search_locations
        folders += map(Path, locations or [spec.origin or ""])
    for folder in folders:
        files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        for file in filter(_is_source, files):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    for package in (library, "math-verify", "sympy"):
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            continue
    print(digest.hexdigest()[:16], file=out, flush=True)


def _is_source(file: Path) -> bool:
    return file.suffix in _SOURCES and file.is_file()


def plain_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers, for the columns of a row."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            numbers[str(name)] = value
    return numbers


def text_messages(messages: Any) -> Any:  # noqa: ANN401 - as an environment has them
    """Return the messages of a prompt as role and content alone, or a prompt that is one text.

    Contents of text parts become one text. Raises :class:`Refused` for any other part, for tools,
    and for roles that a chat template need not know.
    """
    if isinstance(messages, str):
        return messages
    plain = []
    for message in messages:
        values = message if isinstance(message, Mapping) else message.model_dump()
        # among the messages of the Responses API are calls of functions, which have no role
        role = values.get("role", values.get("type"))
        role = "system" if role == "developer" else role
        if values.get("tool_calls") or role not in ("system", "user", "assistant"):
            what = "calls of tools" if values.get("tool_calls") else f"a {role} message"
            raise Refused(
                f"its prompts hold {what}; only text of the system, the user and the assistant is "
                "supported there"
            )
        plain.append({"role": role, "content": _text(values["content"])})
    return plain


def _text(content: Any) -> str:  # noqa: ANN401 - as an environment has it
    if isinstance(content, str):
        return content
    texts = []
    for part in content or []:
        values = part if isinstance(part, Mapping) else part.model_dump()
        if values.get("type") not in ("text", "input_text"):
            raise Refused(
                f"its prompts hold parts of type {values.get('type')}; the policy reads text only"
            )
        texts.append(values["text"])
    return "\n".join(texts)
