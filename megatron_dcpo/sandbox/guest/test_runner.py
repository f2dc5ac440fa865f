"""Runs a task's tests in a separate process and calls the program through a pipe.

The expected values are here and nowhere else. The program is behind a ``ProgramClient``. Its
answers are data of builtin types, or a ``RemoteObject`` that stands for an object in the program's
process. Arguments and results travel by value, so that a program that changes its arguments in
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
from megatron_dcpo.sandbox.guest.program import LIVECODEBENCH

EVALPLUS_ATOL = 1e-6
EVALPLUS_RTOL = 1e-7
# Modules that assert lists use without importing them.
_MODULES = (
    "math cmath re sys itertools functools collections heapq bisect string random datetime copy "
    "json operator "
    "statistics fractions decimal typing numpy"
)


class Stop(BaseException):
    """The program cannot continue, with the category of its verdict. It is no ``Exception``, so
    that tests do not catch it by accident.
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
        self,
        on: dict[str, Any],
        attribute: str | None,
        args: Sequence[object],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - a value of the program, of any type
        """Return what the program returns. An exception of the program is raised here as the
        builtin exception from which it derives.
        """
        self.calls += 1
        if self._prefetched:
            if self._prefetched[0] == _call_key(on, args, kwargs):
                self._prefetched.popleft()
                return self._answer()
            for _ in range(len(self._prefetched)):  # the tests do not make the predicted call
                self._receive()
            self._prefetched.clear()
        return self._exchange({"on": on, "attribute": attribute, **self._arguments(args, kwargs)})

    def prefetch(self, on: dict[str, Any], calls: Sequence[Sequence[object]]) -> None:
        """Send calls that the tests will make in this order, which saves a change of processes for
        each call.
        """
        self._send({"calls": [{"on": on, **self._arguments(args, {})} for args in calls]})
        self._prefetched.extend(_call_key(on, args, {}) for args in calls)

    def attribute(self, on: dict[str, Any], name: str) -> object:
        return self._exchange({"on": on, "attribute": name})

    def next(self, on: dict[str, Any]) -> object:
        return self._exchange({"on": on, "next": True})

    def _exchange(self, request: dict[str, Any]) -> object:
        self._send({"calls": [request]})
        return self._answer()

    def _arguments(self, args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, Any]:
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
        # ends this process if it takes longer to compare the answer
        signal.setitimer(signal.ITIMER_PROF, self.timeout)
        return answer

    def _answer(self) -> object:
        answer = self._receive()
        if "ok" in answer:
            try:
                decoder = rpc.Decoder(answer.get("objects", []), self.classes, self._remote)
                return decoder.decode(answer["ok"])
            except rpc.BadMessage as error:
                self._stop("wrong", f"the program's answer is not a value: {error}")
        if "raised" in answer:
            exception = _exception(str(answer["raised"]), str(answer.get("text", "")))
            code = answer.get("code")
            self.raised = (exception, code if isinstance(code, int) else 1)
            raise exception
        if "long" in answer:
            self._stop("output_limit", f"a result of {answer['long']} bytes")
        self._stop("wrong", f"the result cannot be compared: {answer.get('unsendable')}")

    def _remote(self, number: int, kind: str) -> RemoteObject:
        if number not in self.remotes:
            self.remotes[number] = RemoteObject(client=self, on={"reference": number}, kind=kind)
        return self.remotes[number]

    def _stop(self, category: str, detail: str) -> NoReturn:
        self.stopped = Stop(category, detail)
        raise self.stopped


def _exception(name: str, text: str) -> Exception:
    """Return the builtin exception of that name, RuntimeError if there is none."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        kind = RuntimeError
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and the like need more arguments
        return RuntimeError(text)


class RemoteObject:
    """An object in the program's process. It equals only itself: the program's ``__eq__`` is never
    called.
    """

    def __init__(self, client: ProgramClient, on: dict[str, Any], kind: str) -> None:
        self._client = client
        self._on = on
        self._kind = kind

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._client.call(self._on, None, args, kwargs)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.attribute(self._on, name)

    def __iter__(self) -> Iterator[Any]:
        return self._client.call(self._on, "__iter__", (), {})

    def __next__(self) -> object:
        return self._client.next(self._on)

    def __len__(self) -> int:
        try:
            return self._client.call(self._on, "__len__", (), {})
        except AttributeError as error:  # list() expects this of things without a length
            raise TypeError(str(error)) from None

    def __getitem__(self, key: object) -> object:
        return self._client.call(self._on, "__getitem__", (key,), {})

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"


def _number(value: object) -> int:
    if isinstance(value, RemoteObject) and "reference" in value._on:
        return int(value._on["reference"])
    raise rpc.Unsendable(f"the tests pass a value of type {type(value).__name__}")


def _call_key(on: dict[str, Any], args: Sequence[object], kwargs: dict[str, Any]) -> bytes:
    """Return equal bytes for equal calls: 1, 1.0 and True are different arguments."""
    call = (on, list(args), kwargs)
    try:
        return marshal.dumps(call, 2)  # a version without references between equal parts
    except ValueError:
        return repr(call).encode(errors="surrogatepass")


def run_checks(task: bytes, limits: dict[str, Any]) -> NoReturn:
    """Judge one program, which answers on descriptor 3, and end the process. The verdict
    ``{"category", "detail"}`` goes to descriptor 1, the judge. SIGPROF ends the process earlier if
    the tests' own work between two calls takes more processor time than one call may.
    """
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setrecursionlimit(10_000)
    signal.setitimer(signal.ITIMER_PROF, limits["program_seconds"])
    client = ProgramClient(pipe=3, timeout=limits["test_seconds"], limit=limits["output_bytes"])
    category, detail = judge(json.loads(task), client)
    os.write(verdict, json.dumps({"category": category, "detail": detail[:1000]}).encode())
    os._exit(0)


def judge(tests: dict[str, Any], client: ProgramClient) -> tuple[str, str]:
    """Return category and detail. The category ``gone`` means that the program's process ended; its
    exit status tells why.
    """
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


def _bind_free_names(code: CodeType, names: dict[str, Any], client: ProgramClient) -> bool:
    """Bind the free names of the tests to the program's functions and classes, or to well-known
    modules; return whether there were any of the program's. Builtins stay what they are, so that a
    program that redefines ``len`` does not change the tests.
    """
    bound = False
    for name in dict.fromkeys(_globals_read(code)):
        if name in names or hasattr(builtins, name):
            continue
        if name == "np":
            names[name] = importlib.import_module("numpy")
        elif name in _MODULES.split():
            names[name] = importlib.import_module(name)
        else:
            names[name] = RemoteObject(client=client, on={"name": name}, kind=name)
            bound = True
    return bound


def _globals_read(code: CodeType) -> Iterator[str]:
    """Yield the global names that the code reads and does not set itself at its top level."""
    stored = set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stored.add(step.argval)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in stored:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name in _globals_read(constant):
                if name not in stored:
                    yield name


def _shadowed(tree: ast.Module) -> str | None:
    """Return the builtin that an assert list tests, if it names nothing else of the program (MBPP
    126 tests ``sum``): the one that is called on ``*inp``, or the first in the asserts.
    """
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node).endswith("(*inp)"):
            calls.append(node)
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            calls += [node for node in ast.walk(statement.test) if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id):
            return call.func.id
    return None


def _execute(
    source: str, names: dict[str, Any], client: ProgramClient, target: str | None, entry: str
) -> None:
    tree = ast.parse(source)
    predicted = None
    if target and "inputs" in source:
        predicted = _predicted_calls(tree, target, names)
    code = compile(tree, "<tests>", "exec")
    bound = _bind_free_names(code, names, client)
    if not target and not bound:
        shadowed = _shadowed(tree)
        if shadowed:
            names[shadowed] = RemoteObject(client=client, on={"name": shadowed}, kind="function")
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
    names["check"](RemoteObject(client=client, on={"name": tests["entry_point"]}, kind="function"))


def _asserts(tests: dict[str, Any], client: ProgramClient) -> None:
    names = _namespace(tests, client)
    entry = tests.get("entry_point")
    if entry and entry.isidentifier():
        names[entry] = RemoteObject(client=client, on={"name": entry}, kind="function")
    _execute(source=tests["code"], names=names, client=client, target=entry, entry=entry or "")


def _function(tests: dict[str, Any], client: ProgramClient) -> None:
    _namespace(tests, client)
    decoder = rpc.Decoder(tests.get("objects", []), client.classes, client._remote)
    on = {"function": tests["entry_point"]}
    atol = float(tests.get("atol") or 0.0)
    cases = []
    for case in tests["cases"]:
        cases.append({name: decoder.decode(value) for name, value in case.items()})
    if not any(case["kwargs"] for case in cases):
        client.prefetch(on, [case["args"] for case in cases])
    function = RemoteObject(client=client, on=on, kind="function")
    for number, case in enumerate(cases, start=1):
        result = function(*case["args"], **case["kwargs"])
        if tests.get("rule") == LIVECODEBENCH:
            right = same_by_livecodebench(result, case["expected"])
        else:
            right = same(result, case["expected"], atol)
        assert right, f"case {number}"


def same_by_livecodebench(result: object, expected: object) -> bool:
    """Return whether the values are equal by LiveCodeBench's rule: exactly, but a tuple equals the
    list of its items. Tuples within it are not lists.
    """
    if isinstance(result, tuple):
        result = list(result)
    return bool(result == expected)


def same(result: object, expected: object, atol: float) -> bool:
    """Return whether the values are equal by evalplus's rule: exactly, or floats within ``atol``
    (1e-6 if the expected value is a float or a sequence of floats) and 1e-7 relative. Tuples equal
    lists, because expected values come from JSON.
    """
    result = _lists(result)
    expected = _lists(expected)
    if result == expected:
        return True
    if atol == 0 and not _floats(expected):
        return False
    return _close(result, expected, atol or EVALPLUS_ATOL)


def _close(result: object, expected: object, atol: float) -> bool:
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


def _floats(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _lists(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value


def _predicted_calls(
    tree: ast.Module, target: str, names: dict[str, Any]
) -> list[list[Any]] | None:
    """Return the arguments of the coming calls if the tests have evalplus's form: ``inputs =
    [...]`` and one loop over them with one call ``target(*inp)``. None if they have another form,
    or if the arguments cannot be told.
    """
    bodies = [tree.body]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            bodies.append(node.body)
    for body in bodies:
        literals = []
        loops = []
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "inputs":
                literals.append(node.value)
            elif isinstance(node, ast.For):
                loops.append(node)
        if len(literals) != 1 or len(loops) != 1 or not _calls_once(loops[0], target):
            continue
        try:
            code = compile(ast.Expression(literals[0]), "<inputs>", "eval")
            inputs = eval(code, {**names, "inf": float("inf"), "nan": float("nan")})
        except Exception:
            return None
        if isinstance(inputs, list) and all(isinstance(item, list | tuple) for item in inputs):
            return [list(item) for item in inputs]
    return None


def _calls_once(loop: ast.For, target: str) -> bool:
    """Return whether the loop is over ``inputs`` and has a single call of ``target``, on
    ``*inp``.
    """
    calls = []
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == target:
            calls.append(ast.unparse(node))
    if len(calls) != 1 or not calls[0].endswith("(*inp)"):
        return False
    return "inputs" in ast.unparse(loop.iter)


_KINDS: dict[str, Callable[[dict[str, Any], ProgramClient], None]] = {
    "check": _check,
    "asserts": _asserts,
    "function": _function,
}
