"""LiveCodeBench's tests, public and private: standard input or a method of ``Solution``, in its own
rows or in those of DeepCoder. All of them are run and compared by LiveCodeBench's rule
(``sandbox.tests.RULES``).

The private tests of the official files are base64 of zlib of a pickle of a JSON text. A pickle may
run any code on loading; the one here holds a single ``str``, so the unpickler below accepts neither
classes nor functions.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.sandbox.guest.program import LIVECODEBENCH

LARGEST = 1 << 30  # bytes of one problem's decoded tests


class _TextOnly(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Reads pickles of built-in values. A pickle that names a global (a class, a function) is
    refused.

    Python's own unpickler: the one in C makes room for whatever number a pickle gives to an object.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"a pickle that asks for {module}.{name}; official tests hold text only")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError("a pickle with persistent references; official tests hold text only")


def decode_private(encoded: str) -> list[Mapping[str, Any]]:
    """Return the private tests: JSON as in the public column, or the packed form. Raises ValueError
    for anything else.
    """
    try:
        return _case_list(parse_json(encoded))
    except json.JSONDecodeError:
        pass
    try:
        packed = base64.b64decode(encoded.encode(), validate=True)
        unpacked = zlib.decompressobj().decompress(packed, LARGEST)
        text = _TextOnly(io.BytesIO(unpacked)).load()
    except Exception as error:  # a pickle can make its reader raise anything
        raise ValueError(
            f"private tests are not base64 of zlib of a pickle ({one_line(error, 200)})"
        ) from None
    if not isinstance(text, str):
        raise ValueError(f"private tests unpickle to {type(text).__name__}, expected str")
    return _case_list(parse_json(text))


def tests_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the public and private tests of an official row, in this order."""
    public = row["public_test_cases"]
    cases = _case_list(parse_json(public) if isinstance(public, str) else public)
    private = row.get("private_test_cases")
    if private:
        cases = [
            *cases,
            *(decode_private(private) if isinstance(private, str) else _case_list(private)),
        ]
    return tests_of_cases(cases, row)


def has_form(cases: Sequence[object]) -> bool:
    """Return whether these are cases as LiveCodeBench and DeepCoder write them: each says its
    ``testtype``.
    """
    return bool(cases) and all(isinstance(case, Mapping) and "testtype" in case for case in cases)


def tests_of_cases(cases: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tests with these cases. The name of the function is in the ``metadata`` of the
    row, or of a case; ``starter_code`` of the row says whether it is a method.
    """
    kinds = {str(case.get("testtype") or "stdin") for case in cases}
    if kinds == {"stdin"}:
        return {
            "kind": "stdin",
            "rule": LIVECODEBENCH,
            "cases": [{"input": c["input"], "output": c["output"]} for c in cases],
        }
    if kinds != {"functional"}:
        raise ValueError(f"test types {sorted(kinds)}; expected stdin or functional")
    name = _function_name([row, *cases])
    in_class = "class Solution" in str(row.get("starter_code") or "class Solution")
    tested = []
    for case in cases:
        lines = [line for line in str(case["input"]).split("\n") if line.strip()]
        arguments = [parse_json(line) for line in lines]
        expected = parse_json(case["output"])
        tested.append({"args": arguments, "kwargs": {}, "expected": expected})
    return {
        "kind": "function",
        "rule": LIVECODEBENCH,
        "entry_point": f"Solution().{name}" if in_class else name,
        "cases": tested,
    }


def _function_name(places: Sequence[Mapping[str, Any]]) -> str:
    """Return the first ``func_name`` in the ``metadata`` of these objects."""
    for place in places:
        metadata = place.get("metadata")
        if isinstance(metadata, str) and metadata.strip():
            metadata = parse_json(metadata)
        if isinstance(metadata, Mapping) and metadata.get("func_name"):
            return str(metadata["func_name"])
    raise ValueError("functional tests without metadata.func_name")


def contest_date(row: Mapping[str, Any]) -> str:
    """Return ``2024-08-03``; the empty string for a row without one. The hub gives a datetime, the
    files ISO text.
    """
    value = row.get("contest_date")
    return "" if value is None else str(value)[:10]


def _case_list(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(
        isinstance(c, Mapping) and {"input", "output"} <= set(c) for c in value
    ):
        raise ValueError("tests are no list of objects with input and output")
    return value
