"""The public sets of programming problems, each read as a statement and tests
(``row_presets.PRESETS``). A row of another form raises what reading it raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_dcpo.data import livecodebench
from megatron_dcpo.data.row_files import Row

_ENTRY_OF_MBPP = re.compile(r"\bassertion\((\w+)\(\*inp\)")
Values = Mapping[str, object]


def _problem(statement: str, tests: Mapping[str, Any]) -> Values:
    return {"problem": statement, "tests": tests}


def live_code_bench(row: Row, index: int) -> Values:
    tests = livecodebench.tests_of(row)
    statement = _with_starter(str(row["question_content"]).strip(), row)
    return _problem(statement, tests)


def _with_starter(statement: str, row: Row) -> str:
    """Return the statement with the row's starter code, unless it shows it already."""
    starter = str(row.get("starter_code") or "").strip()
    if not starter or starter in statement:
        return statement
    return f"{statement}\n\nComplete this:\n```python\n{starter}\n```"


def human_eval(row: Row, index: int) -> Values:
    """Return the problem of a row of HumanEval, or of HumanEval+ in its format. The code before the
    function is part of the program.

    Problem 32 of the published HumanEval+ in this format has no solution, because its test swaps
    two arguments; this is corrected.
    """
    before = _before_function(row["prompt"], row["entry_point"])
    code = row["test"].replace("_poly(*candidate(*inp), inp)", "abs(_poly(*inp, candidate(*inp)))")
    code = _alike_first(code)
    tests = {"kind": "check", "entry_point": row["entry_point"], "code": code, "setup": before}
    return _problem(_completion_statement(row["prompt"]), tests)


def evalplus(row: Row, index: int) -> Values:
    """Return the problem of a row in evalplus' format. It has inputs only; the expected values are
    what the reference solution returns.
    """
    if str(row["task_id"]).startswith("Mbpp"):
        raise ValueError(
            "MbppPlus.jsonl leaves tuples and sets as lists; use MbppPlus-OriginFmt.jsonl"
        )
    before = _before_function(row["prompt"], row["entry_point"])
    names = {
        "SOURCE": row["prompt"] + row["canonical_solution"],
        "ENTRY": row["entry_point"],
        "INPUTS": [*row["base_input"], *row["plus_input"]],
        "ATOL": float(row["atol"]),
    }
    assignments = [f"{name} = {value!r}" for name, value in names.items()]
    code = "\n".join(assignments) + _AGAINST_REFERENCE
    tests = {"kind": "check", "entry_point": row["entry_point"], "code": code, "setup": before}
    return _problem(_completion_statement(row["prompt"]), tests)


def _completion_statement(prompt: str) -> str:
    request = "Write a Python program that contains the complete function below."
    return f"{request}\n\n```python\n{prompt.strip()}\n```"


def _before_function(prompt: str, name: str) -> str:
    """Return the imports and helper functions before the function that a prompt asks for."""
    start = re.search(rf"^def {re.escape(name)}\b", prompt, re.MULTILINE)
    if start is None:
        return ""
    return prompt[: start.start()]


def mbpp_plus(row: Row, index: int) -> Values:
    """Return the problem of an MBPP+ row in MBPP's format: ``test`` runs at the top level and calls
    the function by its name.

    One input of problem 255 is left out: its result are 1.7 million combinations of 77 words,
    gigabytes to compare.
    """
    entry = _ENTRY_OF_MBPP.findall(row["test"])[-1]
    test = _alike_first(row["test"])
    if row["task_id"] == 255:
        test = test.replace(
            "\nfor i, ", "\ninputs = [inp for inp in inputs if inp[1] < 70]\nfor i, "
        )
    code = (
        f"SOURCE = {test!r}\n\n\ndef check(candidate):\n"
        "    exec(compile(SOURCE, 'tests', 'exec'), "
        f"{{'__name__': 'tests', {entry!r}: candidate}})\n"
    )
    task = str(row["prompt"]).strip()
    example = row["test_list"][0]
    statement = f"{task}\n\nYour program must satisfy this:\n```python\n{example}\n```"
    return _problem(statement, {"kind": "check", "entry_point": entry, "code": code})


def _alike_first(test: str) -> str:
    """Return the tests with a comparison of shapes and types before that of numbers.

    By broadcasting, NumPy finds an empty list close to every number, and a number close to a list
    of it: ``return []`` passes the released tests of 30 tasks.
    """
    strict = test.replace(
        "assert np.allclose(out, exp", "assert _alike(out, exp) and np.allclose(out, exp"
    )
    if strict == test:
        return test
    return _ALIKE + strict


_ALIKE = """\
def _alike(out, exp):
    if isinstance(exp, (list, tuple)):
        return isinstance(out, (list, tuple)) and len(out) == len(exp) and all(map(_alike, out, exp))
    number = (int, float, complex)
    return isinstance(out, number) and isinstance(exp, number) and isinstance(out, bool) == isinstance(exp, bool)


"""  # noqa: E501 -- the key of the tests is a hash of this text


def mbpp(row: Row, index: int) -> Values:
    """Return the problem of an MBPP row."""
    asserts = list(row["test_list"])
    tests: dict[str, Any] = {"kind": "asserts", "asserts": asserts}
    setup_lines = [*row.get("test_imports", []), row.get("test_setup_code", "") or ""]
    setup = "\n".join(setup_lines).strip()
    if setup:
        tests["setup"] = setup
    shown = "\n".join(asserts)
    task = str(row.get("text") or row["prompt"]).strip()
    request = f"Your program must satisfy these:\n```python\n{shown}\n```"
    return _problem(f"{task}\n\n{request}", tests)


def leetcode(row: Row, index: int) -> Values:
    """Return the problem of a LeetCodeDataset row: ``prompt`` holds the imports and node classes
    that solutions and tests rely on.
    """
    statement = row.get("problem_description")
    if statement and row.get("starter_code"):
        starter = row["starter_code"].rstrip()
        statement = f"{statement.strip()}\n\nComplete this:\n```python\n{starter}\n```"
    tests = {
        "kind": "check",
        "entry_point": row["entry_point"],
        "code": row["test"],
        "setup": row["prompt"],
    }
    return _problem(str(statement or row["query"]).strip(), tests)


# evalplus' rule: the values are equal, or floats (or lists of floats) within the tolerance;
# find_zero is judged by its residue.
_AGAINST_REFERENCE = """

import copy


def same(out, expected):
    if out == expected:
        return True
    floats = isinstance(expected, float) or (
        isinstance(expected, (list, tuple)) and expected and all(isinstance(v, float) for v in expected)
    )
    tolerance = ATOL or (1e-6 if floats else 0.0)
    if not tolerance:
        return False
    if isinstance(out, (list, tuple)) != isinstance(expected, (list, tuple)):
        return False
    outs, wants = (v if isinstance(v, (list, tuple)) else [v] for v in (out, expected))
    numbers = all(isinstance(v, (int, float)) for v in (*outs, *wants))
    return numbers and len(outs) == len(wants) and all(abs(a - b) <= tolerance + 1e-7 * abs(b) for a, b in zip(outs, wants))


def check(candidate):
    names = {"__name__": "reference"}
    exec(compile(SOURCE, "reference", "exec"), names)
    for args in INPUTS:
        expected = names[ENTRY](*copy.deepcopy(args))
        out = candidate(*copy.deepcopy(args))
        if ENTRY == "find_zero":
            assert abs(names["poly"](args[0], out)) <= (ATOL or 1e-6)
        else:
            assert same(out, expected), args
"""  # noqa: E501 -- the key of the tests is a hash of this text
