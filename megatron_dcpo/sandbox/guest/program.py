"""Inside the program's own process: run it on its stdin, or define its functions and answer calls.

Nothing here is secret: the process knows its source, its inputs and, for calls, the arguments of
each.
"""

from __future__ import annotations

import _sitebuiltins
import ast
import builtins
import itertools
import os
import re
import sys
import time
import traceback
import types
from typing import Any

from megatron_dcpo.sandbox.guest import rpc, standard_files

# EPERM, EACCES, EROFS, ENETUNREACH; EFBIG; ENOMEM
_EXIT_OF_ERRNO: dict[int | None, int] = {
    **dict.fromkeys((1, 13, 30, 101), rpc.EXIT_FORBIDDEN),
    27: rpc.EXIT_OUTPUT,
    12: rpc.EXIT_MEMORY,
}
_STREAMS = (
    ("stdin", 0, "r", "surrogateescape"),
    ("stdout", 1, "w", "surrogateescape"),
    ("stderr", 2, "w", "backslashreplace"),
)
FLUSH_BYTES, FLUSH_SECONDS = (1 << 16, 0.01)  # answers to prefetched calls are gathered this much
LIVECODEBENCH = "livecodebench"  # the rule of tests (``sandbox/tests.py``)
_IS_MAIN = "__name__ == '__main__'"
_METHOD = re.compile(r"^(\w+)(?:\(\))?\.(\w+)$")


def run_program(job: dict[str, Any], calls: int | None, message_bytes: int) -> None:
    """Run a program and end the process. ``job`` has ``program``, ``imports``, ``setup`` and
    ``rule`` (``sandbox/tests.py``); ``calls`` is the pipe of the tests, None for stdin tests.
    """
    code = 1
    by_livecodebench = job.get("rule") == LIVECODEBENCH
    try:
        _fresh_streams()
        standard_files.provide()
        if calls is not None:
            name = "solution"
        elif by_livecodebench:
            name = "tmp_sol"  # as there
            job = {**job, "program": called_once(job["program"])}
        else:
            name = "__main__"
        module, shared = define(job, name)
        if calls is not None:
            Answers(module=module, shared=shared, pipe=calls, message_bytes=message_bytes).serve()
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
        if by_livecodebench and calls is None:
            code = 0  # there the output alone decides
    except BaseException as error:
        code = category_code(error)
        _complain()
    finally:
        _end(code)


def called_once(program: str) -> ast.Module:
    """Return a program that reads standard input as LiveCodeBench runs it: its imports first, and
    everything else as the body of a function that is called once, so that its variables are local
    there. A last block under ``if __name__ == "__main__"`` counts as written without the condition;
    any other one does not run. Raises SyntaxError for a program that only imports, too.
    """
    statements = ast.parse(program, "<program>").body
    last = statements[-1] if statements else None
    if isinstance(last, ast.If) and ast.unparse(last.test) == _IS_MAIN:
        statements = [*statements[:-1], *last.body]
    imports: list[ast.stmt] = []
    body: list[ast.stmt] = []
    for statement in statements:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        (imports if is_import else body).append(statement)
    if not body:
        raise SyntaxError("the program only imports")
    frame = ast.parse("def wrapped_function():\n    pass\nwrapped_function()")
    function = frame.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    frame.body = [*imports, *frame.body]
    return frame


def define(job: dict[str, Any], name: str) -> tuple[types.ModuleType, set[str]]:
    """Run the task's setup and the program as the module ``name``; the names of the classes that
    the setup made.
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    for word in ("exit", "quit"):  # an interpreter started without its site module has none
        setattr(builtins, word, _sitebuiltins.Quitter(word, ""))
    if job.get("imports"):
        _add_builtins(job["imports"])
    if job.get("setup"):
        exec(compile(job["setup"], "<setup>", "exec"), module.__dict__)
    shared = {
        word
        for word, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == name
    }
    exec(compile(job["program"], "<program>", "exec"), module.__dict__)
    return module, shared


def _add_builtins(imports: str) -> None:
    """Make the names that ``imports`` brings builtin, so that the program finds them and a function
    that the tests ask for must still be its own.
    """
    names: dict[str, Any] = {}
    exec(compile(imports, "<imports>", "exec"), names)
    for name, value in names.items():
        if not name.startswith("__") and not hasattr(builtins, name):
            setattr(builtins, name, value)


def category_code(error: BaseException) -> int:
    """Return the exit status that tells the judge what kind of failure an exception was."""
    if isinstance(error, MemoryError):
        return rpc.EXIT_MEMORY
    if isinstance(error, OSError):
        return _EXIT_OF_ERRNO.get(error.errno, 1)
    return 1


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code & 255
    return 0 if end.code is None else 1


def _fresh_streams() -> None:
    """Make new objects on 0, 1, 2: those of the server were made for other files."""
    for name, number, mode, errors in _STREAMS:
        stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _complain() -> None:
    try:
        text = traceback.format_exc(limit=8)
        os.write(2, text[-4000:].encode(errors="backslashreplace"))
    except BaseException:
        pass


def _end(code: int) -> None:
    """Join threads, run exit handlers and flush as an interpreter does at its end; then leave
    without tearing down.
    """
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        code = code or category_code(error)
    for stream in {
        id(stream): stream for stream in (sys.stdout, sys.__stdout__, sys.stderr)
    }.values():
        try:
            if stream is not None:
                stream.flush()
        except BaseException as error:
            code = code or category_code(error)
    os._exit(code)


class Answers:
    """The program's functions, called by the tests through a pipe."""

    def __init__(
        self, module: types.ModuleType, shared: set[str], pipe: int, message_bytes: int
    ) -> None:
        self.module = module
        self.shared = shared
        self.pipe = pipe
        self.message_bytes = message_bytes
        self.reader = rpc.Reader(pipe, 1 << 30)
        self.references: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.count = itertools.count(1)

    def serve(self) -> None:
        """Answer until the tests are done."""
        while True:
            try:
                message = self.reader.read()
            except rpc.Gone:
                return
            answers = []
            size = 0
            since = time.monotonic()
            for call in message["calls"]:
                answers.append(self.answer(call))
                size += len(answers[-1])
                if size > FLUSH_BYTES or time.monotonic() - since > FLUSH_SECONDS:
                    rpc.write_all(self.pipe, b"".join(answers))
                    answers = []
                    size = 0
                    since = time.monotonic()
            rpc.write_all(self.pipe, b"".join(answers))

    def answer(self, call: dict[str, Any]) -> bytes:
        """Return the packed answer to one call, whatever the program does short of ending the
        process.
        """
        try:
            result = self.perform(call)
            encoder = rpc.Encoder(self.shared, self.keep)
            packed = rpc.pack({"ok": encoder.encode(result), "objects": encoder.objects()})
            if len(packed) <= self.message_bytes:
                return packed
            return rpc.pack({"long": len(packed)})
        except rpc.Unsendable as error:
            return rpc.pack({"unsendable": str(error)})
        except BaseException as error:
            return rpc.pack(
                {"raised": _builtin_name(error), "text": _text(error), "code": category_code(error)}
            )

    def perform(self, call: dict[str, Any]) -> object:
        decoder = rpc.Decoder(
            call.get("objects", []), self.by_value(), lambda number, _: self.references[number]
        )
        target = self.target(call["on"])
        if "next" in call:
            return next(target)
        if call.get("attribute"):
            target = getattr(target, call["attribute"])
        if "args" not in call:
            return target
        args = [decoder.decode(value) for value in call["args"]]
        kwargs = {}
        for name, value in call.get("kwargs", {}).items():
            kwargs[name] = decoder.decode(value)
        return target(*args, **kwargs)

    def target(self, on: dict[str, Any]) -> Any:  # noqa: ANN401 - an object of the program
        """Return the object that a call is about: a name of the program, a reference given out
        before, or an entry point as the data sets write it.
        """
        if "reference" in on:
            return self.references[on["reference"]]
        if "function" in on:
            return self.function(on["function"])
        names = vars(self.module)
        if on["name"] in names:
            return names[on["name"]]
        method = _METHOD.match(on["name"])
        if method is None:
            raise NameError(f"name {on['name']!r} is not defined")
        owner = names.get(method[1])
        if owner is None:
            raise NameError(f"name {method[1]!r} is not defined")
        if isinstance(owner, type):
            owner = owner()
        bound = getattr(owner, method[2])
        names[on["name"]] = bound  # one instance for all tests, as in the data sets
        return bound

    def function(self, entry: str) -> Any:  # noqa: ANN401 - of the program
        """Return what the tests of a function call, ``total`` or ``Solution().total``: the method
        of the program's class Solution if it has one, or else its function, as verl and
        LiveCodeBench do.
        """
        names = vars(self.module)
        method = _METHOD.match(entry)
        owner, name = (method[1], method[2]) if method else ("Solution", entry)
        owns = isinstance(names.get(owner), type) and hasattr(names[owner], name)
        if owns:
            return self.target({"name": f"{owner}().{name}"})
        if method is not None and name in names:
            return names[name]
        return self.target({"name": entry})

    def by_value(self) -> dict[str, type]:
        classes = {}
        for name in self.shared:
            value = vars(self.module).get(name)
            if isinstance(value, type):
                classes[name] = value
        return classes

    def keep(self, value: object) -> int:
        number = self.numbers.get(id(value))
        if number is None:
            number = next(self.count)
            self.numbers[id(value)] = number
            self.references[number] = value
        return number


def _builtin_name(error: BaseException) -> str:
    for kind in type(error).__mro__:
        is_builtin = getattr(builtins, kind.__name__, None) is kind
        # the names of imports are there too
        if is_builtin and kind.__module__ == "builtins":
            return kind.__name__
    return "Exception"


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""
