"""Runs a task's tests in a process of its own and calls the program through a pipe.

The expected values live here and nowhere else. The program is behind a ``ProgramClient``; what
comes back is data of builtin types, or a ``RemoteObject`` that stands for an object of the
program's process. Arguments and results travel by value: a program that changes its arguments in
place does not change the tests' copy.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import json
import marshal
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NoReturn

from megatron_dcpo.sandbox.guest import rpc

EVALPLUS_ATOL = 1e-6
EVALPLUS_RTOL = 1e-7
# Modules that assert lists use without importing them.
_MODULES = (
    "math cmath re sys itertools functools collections heapq bisect string random datetime copy "
    "json operator "
    "statistics fractions decimal typing numpy"
)


class Stop(BaseException):
    """The program cannot go on: its category. No ``Exception``, so that tests do not catch it in
    passing.
    """

    def __init__(self, category: str, detail: str) -> None:
        super().__init__(category, detail)
        self.category = category
        self.detail = detail


class ProgramClient:
    """Calls to the program, each within ``timeout`` seconds and ``limit`` bytes."""

    def __init__(self, pipe: int, timeout: float, limit: int) -> None:
        self.pipe = pipe
        self.timeout = timeout
        self.reader = rpc.Reader(pipe, limit)
        self.classes: dict[str, type] = {}
        self.remotes: dict[int, RemoteObject] = {}
        self.calls = 0
        self.stopped: Stop | None = None
        self.raised: tuple[BaseException, int] | None = None
        self._prefetched: deque[bytes] = deque()
        os.set_blocking(pipe, False)

    def call(
        self, on: dict[str, Any], attribute: str | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the program returns; what it raises is raised here as the builtin exception
        that it derives from.
        """
        self.calls += 1
        if self._prefetched:
            if self._prefetched[0] == _call_key(on, args, kwargs):
                self._prefetched.popleft()
                return self._answer()
            for _ in range(len(self._prefetched)):  # the tests make another call than predicted
                self._receive()
            self._prefetched.clear()
        return self._exchange({"on": on, "attribute": attribute, **self._arguments(args, kwargs)})

    def prefetch(self, on: dict[str, Any], calls: Sequence[Sequence[Any]]) -> None:
        """Send calls that the tests will make in this order; saves a change of processes per call."""
        self._send({"calls": [{"on": on, **self._arguments(args, {})} for args in calls]})
        self._prefetched.extend(_call_key(on, args, {}) for args in calls)

    def attribute(self, on: dict[str, Any], name: str) -> Any:
        return self._exchange({"on": on, "attribute": name})

    def next(self, on: dict[str, Any]) -> Any:
        return self._exchange({"on": on, "next": True})

    def _exchange(self, request: dict[str, Any]) -> Any:
        self._send({"calls": [request]})
        return self._answer()

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        encoder = rpc.Encoder(self.classes.keys(), _number)
        return {
            "args": [encoder.encode(value) for value in args],
            "kwargs": {name: encoder.encode(value) for name, value in kwargs.items()},
            "objects": encoder.objects(),
        }

    def _send(self, message: dict[str, Any]) -> None:
        if self.stopped:
            raise self.stopped
        try:
            rpc.write_all(self.pipe, rpc.pack(message), self.timeout)
        except TimeoutError:
            self._stop("timeout", f"the program read nothing for {self.timeout:g} s")
        except rpc.Gone:
            self._stop("gone", "")

    def _receive(self) -> dict[str, Any]:
        if self.stopped:
            raise self.stopped
        try:
            answer = self.reader.read(self.timeout)
        except TimeoutError:
            self._stop("timeout", f"a call took more than {self.timeout:g} s")
        except rpc.Gone:
            self._stop("gone", "")
        except rpc.TooLong as error:
            self._stop("output_limit", str(error))
        except rpc.BadMessage as error:
            self._stop("wrong", f"the program's answer is not a value: {error}")
        if not isinstance(answer, dict):
            self._stop("wrong", "the program's answer is not a message")
        signal.setitimer(
            signal.ITIMER_PROF, self.timeout
        )  # ends this process if the answer costs more to compare
        return answer

    def _answer(self) -> Any:
        answer = self._receive()
        if "ok" in answer:
            try:
                decoder = rpc.Decoder(answer.get("objects", []), self.classes, self._remote)
                return decoder.decode(answer["ok"])
            except rpc.BadMessage as error:
                self._stop("wrong", f"the program's answer is not a value: {error}")
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                kind = kind
            else:
                kind = RuntimeError
            try:
                exception = kind(str(answer.get("text", "")))
            except TypeError:  # UnicodeDecodeError and the like want more
                exception = RuntimeError(str(answer.get("text", "")))
            code = answer.get("code")
            self.raised = exception, code if isinstance(code, int) else 1
            raise exception
        if "long" in answer:
            self._stop("output_limit", f"a result of {answer['long']} bytes")
        self._stop("wrong", f"the result cannot be compared: {answer.get('unsendable')}")

    def _remote(self, number: int, kind: str) -> RemoteObject:
        if number not in self.remotes:
            self.remotes[number] = RemoteObject(
                client=self,
                on={"reference": number},
                kind=kind,
            )
        return self.remotes[number]

    def _stop(self, category: str, detail: str) -> Any:
        self.stopped = Stop(category, detail)
        raise self.stopped


class RemoteObject:
    """An object of the program's process. It equals itself only: the program's ``__eq__`` is never
    called.
    """

    def __init__(self, client: ProgramClient, on: dict[str, Any], kind: str) -> None:
        self._client = client
        self._on = on
        self._kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.call(self._on, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.attribute(self._on, name)

    def __iter__(self) -> Iterator[Any]:
        return self._client.call(self._on, "__iter__", (), {})

    def __next__(self) -> Any:
        return self._client.next(self._on)

    def __len__(self) -> int:
        try:
            return self._client.call(self._on, "__len__", (), {})
        except AttributeError as error:  # what list() expects of things without a length
            raise TypeError(str(error)) from None

    def __getitem__(self, key: Any) -> Any:
        return self._client.call(self._on, "__getitem__", (key,), {})

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"


def _number(value: Any) -> int:
    if isinstance(value, RemoteObject) and "reference" in value._on:
        return int(value._on["reference"])
    raise rpc.Unsendable(f"the tests pass a value of type {type(value).__name__}")


def _call_key(on: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Return the same for the same call: 1, 1.0 and True are different arguments."""
    try:
        return marshal.dumps(
            (on, list(args), kwargs), 2
        )  # a version without references between equal parts
    except ValueError:
        return repr((on, list(args), kwargs)).encode(errors="surrogatepass")


def run_checks(task: bytes, limits: dict[str, Any]) -> NoReturn:
    """Judge one program, which answers on descriptor 3; the verdict goes to 1, the judge:
    ``{"category", "detail"}``. Ends the process: by SIGPROF when the tests' own work between two
    calls takes more processor time than one call may.
    """
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setrecursionlimit(10_000)
    signal.setitimer(signal.ITIMER_PROF, limits["program_seconds"])
    category, detail = judge(
        json.loads(task),
        ProgramClient(
            pipe=3,
            timeout=limits["test_seconds"],
            limit=limits["output_bytes"],
        ),
    )
    os.write(verdict, json.dumps({"category": category, "detail": detail[:1000]}).encode())
    os._exit(0)


def judge(tests: dict[str, Any], client: ProgramClient) -> tuple[str, str]:
    """Return category and detail. ``gone``: the program's process ended; its exit status tells why."""
    try:
        _KINDS[tests["kind"]](tests, client)
    except BaseException as error:
        if client.stopped:
            return client.stopped.category, client.stopped.detail
        if client.raised and client.raised[0] is error:
            return rpc.CATEGORY_OF_EXIT.get(client.raised[1], "runtime_error"), _described(error)
        if isinstance(error, MemoryError):
            return "memory", "comparing the results"
        return "wrong", _described(error)
    if client.stopped:
        return client.stopped.category, client.stopped.detail
    if not client.calls:
        return "wrong", "the tests never called the program"
    return "passed", ""


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an integer with too many digits to print, for one
        return type(error).__name__


def _namespace(tests: dict[str, Any], client: ProgramClient) -> dict[str, Any]:
    """Return the names for the tests: what the task itself defines. Its classes travel by value."""
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    if tests.get("setup"):
        exec(compile(tests["setup"], "<setup>", "exec"), names)
    client.classes = {
        name: value
        for name, value in names.items()
        if isinstance(value, type) and value.__module__ == "tests"
    }
    return names


def _bind_free_names(code: Any, names: dict[str, Any], client: ProgramClient) -> bool:
    """Free names of the tests are the program's functions and classes, or well-known modules.
    Whether there were any of the first. Builtins stay what they are: a program that redefines
    ``len`` does not change the tests.
    """
    bound = False
    for name in dict.fromkeys(_globals_read(code)):
        if name in names or hasattr(builtins, name):
            continue
        if name == "np" or name in _MODULES.split():
            names[name] = importlib.import_module("numpy" if name == "np" else name)
        else:
            names[name] = RemoteObject(
                client=client,
                on={"name": name},
                kind=name,
            )
            bound = True
    return bound


def _globals_read(code: CodeType) -> Iterator[str]:
    """Return the global names that the code reads and, at its top level, does not set itself."""
    own = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_NAME", "STORE_GLOBAL")
    }
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in own:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from (name for name in _globals_read(constant) if name not in own)


def _shadowed(tree: ast.Module) -> str | None:
    """Return the builtin that an assert list is about, when it names nothing else of the program
    (MBPP 126 tests ``sum``): what is called on ``*inp``, or first in the asserts.
    """
    asserts = [node.test for node in tree.body if isinstance(node, ast.Assert)]
    calls = [
        *[
            call
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and ast.unparse(call).endswith("(*inp)")
        ],
        *[call for node in asserts for call in ast.walk(node) if isinstance(call, ast.Call)],
    ]
    names = [
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)
    ]
    return names[0] if names else None


def _execute(
    source: str, names: dict[str, Any], client: ProgramClient, target: str | None, entry: str
) -> None:
    tree = ast.parse(source)
    if target and "inputs" in source:
        predicted = _predicted_calls(tree, target, names)
    else:
        predicted = None
    code = compile(tree, "<tests>", "exec")
    bound = _bind_free_names(code, names, client)
    if not target and not bound and (shadowed := _shadowed(tree)):
        names[shadowed] = RemoteObject(
            client=client,
            on={"name": shadowed},
            kind="function",
        )
    if predicted:
        client.prefetch({"name": entry}, predicted)
    exec(code, names)


def _check(tests: dict[str, Any], client: ProgramClient) -> None:
    names = _namespace(tests, client)
    _execute(
        source=tests["code"],
        names=names,
        client=client,
        target="candidate",
        entry=tests["entry_point"],
    )
    if isinstance(names.get("check"), RemoteObject) or not callable(names.get("check")):
        raise NameError("the tests define no check(candidate)")
    names["check"](
        RemoteObject(
            client=client,
            on={"name": tests["entry_point"]},
            kind="function",
        )
    )


def _asserts(tests: dict[str, Any], client: ProgramClient) -> None:
    names = _namespace(tests, client)
    entry = tests.get("entry_point")
    if entry and entry.isidentifier():
        names[entry] = RemoteObject(
            client=client,
            on={"name": entry},
            kind="function",
        )
    _execute(
        source=tests["code"],
        names=names,
        client=client,
        target=entry,
        entry=entry or "",
    )


def _function(tests: dict[str, Any], client: ProgramClient) -> None:
    _namespace(tests, client)
    decoder = rpc.Decoder(tests.get("objects", []), client.classes, client._remote)
    on = {"name": tests["entry_point"]}
    cases = [
        {name: decoder.decode(value) for name, value in case.items()} for case in tests["cases"]
    ]
    if not any(case["kwargs"] for case in cases):
        client.prefetch(on, [case["args"] for case in cases])
    function = RemoteObject(
        client=client,
        on=on,
        kind="function",
    )
    for place, case in enumerate(cases, start=1):
        result = function(*case["args"], **case["kwargs"])
        assert same(result, case["expected"], float(tests.get("atol") or 0.0)), f"case {place}"


def same(result: Any, expected: Any, atol: float) -> bool:
    """Return whether they are equal as evalplus has it: exact, or floats within ``atol`` (1e-6
    where the expected value is one or a sequence of them) and 1e-7 relative. Tuples equal lists:
    expected values come from JSON.
    """
    result = _lists(result)
    expected = _lists(expected)
    if result == expected:
        return True
    if atol == 0 and not _floats(expected):
        return False
    return _close(result, expected, atol or EVALPLUS_ATOL)


def _close(result: Any, expected: Any, atol: float) -> bool:
    """Compare as ``numpy.allclose`` does, but a list of one number is not a number."""
    if isinstance(expected, list):
        if not isinstance(result, list) or len(result) != len(expected):
            return False
        return all(_close(part, goal, atol) for part, goal in zip(result, expected, strict=True))
    if result == expected:
        return True
    if not isinstance(result, int | float) or not isinstance(expected, int | float):
        return False
    try:
        return abs(result - expected) <= atol + EVALPLUS_RTOL * abs(expected) < float("inf")
    except OverflowError:
        return False


def _floats(value: Any) -> bool:
    return isinstance(value, float) or (
        isinstance(value, list) and all(isinstance(item, float) for item in value)
    )


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value


def _predicted_calls(
    tree: ast.Module, target: str, names: dict[str, Any]
) -> list[list[Any]] | None:
    """Return the arguments of the calls to come where the tests have the form of evalplus: ``inputs
    = [...]`` and one loop over them with one call ``target(*inp)``. None where they have not, or
    where it cannot be told.
    """
    bodies = [
        tree.body,
        *[
            node.body
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "check"
        ],
    ]
    for body in bodies:
        literals = [
            node
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "inputs"
        ]
        loops = [node for node in body if isinstance(node, ast.For)]
        if len(literals) == 1 and len(loops) == 1 and _calls_once(loops[0], target):
            try:
                inputs = eval(
                    compile(ast.Expression(literals[0].value), "<inputs>", "eval"),
                    dict(names, inf=float("inf"), nan=float("nan")),
                )
            except Exception:
                return None
            if isinstance(inputs, list) and all(isinstance(item, list | tuple) for item in inputs):
                return [list(item) for item in inputs]
    return None


def _calls_once(loop: ast.For, target: str) -> bool:
    calls = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == target
    ]
    return (
        len(calls) == 1
        and ast.unparse(calls[0]).endswith("(*inp)")
        and "inputs" in ast.unparse(loop.iter)
    )


_KINDS: dict[str, Callable[[dict[str, Any], ProgramClient], None]] = {
    "check": _check,
    "asserts": _asserts,
    "function": _function,
}
