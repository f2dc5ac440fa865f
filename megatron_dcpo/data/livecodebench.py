"""LiveCodeBench's official rows: public and private tests, standard input or a method of
``Solution``.

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
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.text import parse_json

LARGEST = 1 << 30  # bytes of one problem's decoded tests


class _TextOnly(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Reads pickles of built-in values. A pickle that names a global (a class, a function) is
    refused.

    Python's own unpickler: the one in C makes room for whatever number a pickle gives to an object.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(
            f"a pickle that asks for {module}.{name}; official tests hold text only"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError(
            "a pickle with persistent references; official tests hold text only"
        )


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
        raise ValueError(
            f"private tests unpickle to {type(text).__name__}, expected str"
        )
    return _case_list(parse_json(text))


def tests_of(row: Mapping[str, Any], setup: str) -> Mapping[str, Any]:
    """Return the public and private tests of a row, in this order. ``setup``: what method solutions
    may rely on.
    """
    public = row["public_test_cases"]
    cases = _case_list(parse_json(public) if isinstance(public, str) else public)
    private = row.get("private_test_cases")
    if private:
        cases = [
            *cases,
            *(
                decode_private(private)
                if isinstance(private, str)
                else _case_list(private)
            ),
        ]
    kinds = {str(case.get("testtype", "stdin")) for case in cases}
    if kinds == {"stdin"}:
        return {
            "kind": "stdin",
            "cases": [{"input": c["input"], "output": c["output"]} for c in cases],
        }
    if kinds != {"functional"}:
        raise ValueError(f"test types {sorted(kinds)}; expected stdin or functional")
    metadata = row.get("metadata") or "{}"
    name = (parse_json(metadata) if isinstance(metadata, str) else metadata)[
        "func_name"
    ]
    in_class = "class Solution" in str(row.get("starter_code") or "class Solution")
    return {
        "kind": "function",
        "entry_point": f"Solution().{name}" if in_class else name,
        "cases": [
            {
                "args": [
                    parse_json(line)
                    for line in str(case["input"]).split("\n")
                    if line.strip()
                ],
                "kwargs": {},
                "expected": parse_json(case["output"]),
            }
            for case in cases
        ],
        "setup": setup,
    }


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
