"""Programming problems: read every public format as a statement and one of four kinds of tests.

- ``stdin``: input and expected output of a whole program (contest sets, LiveCodeBench,
  PrimeIntellect);
- ``function``: arguments and expected value of ``entry_point`` (LiveCodeBench, PrimeIntellect,
  DeepCoder);
- ``check``: code that defines ``check(candidate)`` (HumanEval(+), MBPP+, LeetCodeDataset, rllm);
- ``asserts``: a list of assertions (MBPP).

``sandbox/`` runs them. Tests are kept packed (``pack_tests``), because one set can take megabytes.
The ``ground_truth`` of a problem is the key of its tests (``tests_key``).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_dcpo.data import livecodebench
from megatron_dcpo.data.columns_of_tests import TEST_COLUMNS, OtherLanguage, Untested
from megatron_dcpo.data.leetcode import LEETCODE_SETUP
from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox.tests import checked_tests

Row = Mapping[str, Any]
Tests = Mapping[str, Any]

READS_STDIN = (
    "The program reads its input from standard input and writes its output to standard output."
)
_ENTRY_OF_CHECK = re.compile(r"^check\(\s*(.+?)\s*\)\s*$", re.MULTILINE)
_ENTRY_OF_MBPP = re.compile(r"\bassertion\((\w+)\(\*inp\)")
_ASSERTS = re.compile(r"\b(?:assert|raise)\b|\.assert[_A-Z]|\bfail\(")
_ASSERT = re.compile(r"\s*assert[\s(]")
_PYTHON = re.compile(r"(?:python ?3?|py3?)(?:\.[0-9.]+)?", re.IGNORECASE)


class CodeProblem(NamedTuple):
    """A statement as a policy reads it, without the request for a form of answer, and the tests."""

    statement: str
    tests: Tests


def pack_tests(tests: Tests) -> bytes:
    """Return the tests as compressed JSON with sorted keys, so that equal tests are equal bytes."""
    return zlib.compress(json.dumps(tests, sort_keys=True).encode(), level=3)


def unpack_tests(packed: bytes) -> Tests:
    tests: Tests = json.loads(zlib.decompress(packed))
    return tests


def tests_key(packed: bytes) -> str:
    """Return the name of a set of tests: ``tests:`` and 16 hex digits of a hash of their JSON. It
    is the same in every run.
    """
    return "tests:" + hashlib.sha256(zlib.decompress(packed)).hexdigest()[:16]


def code_problem(row: Row, where: str = "row") -> CodeProblem | None:
    """Return the problem in a row of any known format, None for a row that is not a programming
    problem.

    Raises :class:`UserError` for a row that looks like a known format and cannot be read as one,
    and :class:`Untested` for tests that any program passes.
    """
    for applies, read in _FORMATS:
        if applies(row):
            try:
                problem = read(row)
            except (
                LookupError,
                ValueError,
                TypeError,
                AttributeError,
                SyntaxError,
                RecursionError,
            ) as error:
                raise UserError(
                    f"{where}: unreadable tests ({type(error).__name__}: {str(error)[:200]})"
                ) from None
            checked_tests(problem.tests, where)
            if not _can_fail(problem.tests):
                raise Untested(str(row.get("task_id") or where))
            return problem
    return None


class PackedProblem(NamedTuple):
    """A statement, its packed tests and their key."""

    statement: str
    tests: bytes
    key: str


def packed_problem(row: Row, where: str) -> PackedProblem | None:
    """Return :func:`code_problem` of a row with its tests packed."""
    problem = code_problem(row, where)
    if problem is None:
        return None
    packed = pack_tests(problem.tests)
    return PackedProblem(problem.statement, packed, tests_key(packed))


def _can_fail(tests: Tests) -> bool:
    """Return whether the tests assert anything. Three tasks of MBPP+ compute whether the output is
    right and discard the result.
    """
    if tests["kind"] in ("stdin", "function"):
        return True
    texts = [str(tests.get("code", "")), *tests.get("asserts", ())]
    return any(_ASSERTS.search(text) for text in texts)


# --------------------------------------------------------------------------------- tests as columns


def tests_of(value: object, row: Row) -> Tests:
    """Return the tests in a ``tests`` column, as JSON text or parsed. It may have our format (with
    ``kind``), or that of rllm, DeepCoder or PRIME. The other columns of the ``row`` may name the
    function.
    """
    value = _parsed(value)
    if isinstance(value, Mapping):
        if "kind" in value:
            return value
        if "functional" in value:
            return _functional(str(value["functional"]))
        if "test_cases" in value:
            return tests_of(value["test_cases"], row)
        if "inputs" in value:
            inputs = _parsed(value["inputs"])
            outputs = _parsed(value["outputs"])
        else:
            inputs = _parsed(value["input"])
            outputs = _parsed(value["output"])
        cases = []
        for given, expected in zip(inputs, outputs, strict=True):
            cases.append({"input": given, "output": expected})
        return _cases(cases, value.get("fn_name"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        cases = [_parsed(case) for case in value]
        if all(isinstance(case, str) for case in cases):
            return {"kind": "asserts", "asserts": cases}
        if livecodebench.has_form(cases):
            return livecodebench.tests_of_cases(cases, row)
        names = [case["fn_name"] for case in cases if case.get("fn_name")]
        return _cases(cases, names[0] if names else None)
    raise ValueError(f"tests are {type(value).__name__}, expected an object or a list")


def _cases(cases: Sequence[Mapping[str, Any]], name: str | None) -> Tests:
    """Return the tests with these inputs and outputs: those of a function if it has a ``name``, or
    else those of a whole program.
    """
    tested: list[dict[str, Any]] = []
    if name is None:
        for case in cases:
            given = _lines(case["input"])
            tested.append({"input": given, "output": _lines(case["output"])})
        return {"kind": "stdin", "cases": tested}
    outputs = [_parsed(case["output"]) for case in cases]
    # APPS and its descendants wrap every value of a set in a list of one.
    if all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    for case, expected in zip(cases, outputs, strict=True):
        arguments = _parsed(case["input"])
        if isinstance(arguments, list | tuple):
            arguments = list(arguments)
        else:
            arguments = [arguments]
        tested.append({"args": arguments, "kwargs": {}, "expected": expected})
    return {"kind": "function", "entry_point": name, "cases": tested}


def _lines(value: object) -> str:
    """Return the value as text; some sets have lists of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _parsed(value: object) -> Any:  # noqa: ANN401 -- JSON that others wrote
    """Parse a text as JSON or as a Python literal (PrimeIntellect writes both); any other value is
    returned as it is.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value


def _functional(code: str) -> Tests:
    """Return rllm's tests, which define ``check`` and call it in the last line with the object to
    test.
    """
    calls = list(_ENTRY_OF_CHECK.finditer(code))
    if not calls:
        raise ValueError("functional tests without a call of check(...)")
    entry = calls[-1][1]
    return {
        "kind": "check",
        "entry_point": entry,
        "code": code[: calls[-1].start()],
        "setup": LEETCODE_SETUP,
    }


# ------------------------------------------------------------------------------------------ formats


def _native(row: Row) -> CodeProblem:
    """Return the problem of a row with a statement and tests in one of :data:`TEST_COLUMNS`."""
    column = next(name for name in TEST_COLUMNS if row.get(name))
    tests = tests_of(row[column], row)
    statement = _last_text(_statement(row))
    if tests.get("kind") == "function":
        statement = _with_starter(statement, row)
    return _stated(statement, tests)


_STATEMENTS = ("problem", "question", "prompt")


def _last_text(statement: object) -> str:
    """Return a statement that is a text, or the last of a list of messages."""
    if isinstance(statement, list | tuple) and statement:
        return str(statement[-1]["content"]).strip()
    return str(statement).strip()


def _has_tests(row: Row) -> bool:
    """Return whether a row has a statement and tests."""
    has_column = any(row.get(name) for name in TEST_COLUMNS)
    return has_column and _statement(row) is not None


def _statement(row: Row) -> object:
    """Return the statement of a row in the first column that has one; None if there is none."""
    return next((row[name] for name in _STATEMENTS if row.get(name)), None)


def _asserts_for_answer(row: Row) -> list[str] | None:
    """Return the assertions that stand where an answer would (allenai's RLVR), None if there are
    none.
    """
    reward_model = row.get("reward_model")
    values = [row.get(name) for name in ("ground_truth", "answer", "final_answer")]
    if isinstance(reward_model, Mapping):
        values.append(reward_model.get("ground_truth"))
    for value in values:
        texts: Any = value
        if isinstance(value, str) and _ASSERT.match(value):
            texts = [value]
        elif isinstance(value, str) and "assert" in value:
            texts = _parsed(value)
        is_list = isinstance(texts, list | tuple) and len(texts) > 0
        if is_list and all(isinstance(one, str) and _ASSERT.match(one) for one in texts):
            return list(texts)
    return None


def _with_asserts(row: Row) -> CodeProblem:
    tests = {"kind": "asserts", "asserts": _asserts_for_answer(row)}
    return CodeProblem(_last_text(_statement(row)), tests)


def _stated(statement: str, tests: Tests) -> CodeProblem:
    """Return a problem whose statement says how the program is called."""
    says_stdin = "standard input" in statement or "stdin" in statement
    if tests.get("kind") == "stdin" and not says_stdin:
        statement = f"{statement}\n\n{READS_STDIN}"
    if tests.get("kind") == "function":
        owner, _, name = str(tests["entry_point"]).rpartition(".")
        if name not in statement:
            owner = owner.removesuffix("()")
            what = f"class `{owner}` with a method" if owner else "function"
            statement = f"{statement}\n\nWrite a {what} `{name}`."
    return CodeProblem(statement, tests)


def _with_starter(statement: str, row: Row) -> str:
    """Return the statement with the row's starter code, unless it shows it already."""
    starter = str(row.get("starter_code") or "").strip()
    if not starter or starter in statement:
        return statement
    return f"{statement}\n\nComplete this:\n```python\n{starter}\n```"


def _verification_info(row: Row) -> CodeProblem | None:
    """Return the problem of a PrimeIntellect or open-r1 row. Tests in languages other than Python
    are not used.
    """
    info = _parsed(row["verification_info"])
    language = str(info.get("language") or "python")
    if not _PYTHON.fullmatch(language.strip()):
        raise OtherLanguage(language)
    statement = next(
        row[name]
        for name in ("prompt", "problem", "problem_statement", "question")
        if row.get(name)
    )
    return _stated(_last_text(statement), tests_of(info, row))


def _human_eval(row: Row) -> CodeProblem:
    """Return the problem of a row of HumanEval, or of HumanEval+ in its format. The code before the
    function is part of the program.

    Problem 32 of the published HumanEval+ in this format has no solution, because its test swaps
    two arguments; this is corrected.
    """
    before = _before_function(row["prompt"], row["entry_point"])
    code = row["test"].replace("_poly(*candidate(*inp), inp)", "abs(_poly(*inp, candidate(*inp)))")
    code = _alike_first(code)
    tests = {"kind": "check", "entry_point": row["entry_point"], "code": code, "setup": before}
    return CodeProblem(_completion_statement(row["prompt"]), tests)


def _evalplus(row: Row) -> CodeProblem:
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
    return CodeProblem(_completion_statement(row["prompt"]), tests)


def _completion_statement(prompt: str) -> str:
    request = "Write a Python program that contains the complete function below."
    return f"{request}\n\n```python\n{prompt.strip()}\n```"


def _before_function(prompt: str, name: str) -> str:
    """Return the imports and helper functions before the function that a prompt asks for."""
    start = re.search(rf"^def {re.escape(name)}\b", prompt, re.MULTILINE)
    if start is None:
        return ""
    return prompt[: start.start()]


def _mbpp_plus(row: Row) -> CodeProblem:
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
    return CodeProblem(statement, {"kind": "check", "entry_point": entry, "code": code})


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


def _mbpp(row: Row) -> CodeProblem:
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
    return CodeProblem(f"{task}\n\n{request}", tests)


def _leetcode(row: Row) -> CodeProblem:
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
    return CodeProblem(str(statement or row["query"]).strip(), tests)


def _live_code_bench(row: Row) -> CodeProblem:
    tests = livecodebench.tests_of(row)
    statement = str(row["question_content"]).strip()
    return _stated(_with_starter(statement, row), tests)


def _verl_ground_truth(row: Row) -> object:
    """Return the tests of a verl-style row, None if its ground truth is not a set of tests."""
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, Mapping):
        return None
    truth = reward_model.get("ground_truth")
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        truth = _parsed(truth)
    if isinstance(truth, Mapping):
        is_tests = not _TEST_FIELDS.isdisjoint(truth)
        return truth if is_tests else None
    if not isinstance(truth, list) or not truth:
        return None
    for case in truth:
        if not isinstance(case, Mapping) or "output" not in case:
            return None
    return truth


_TEST_FIELDS = frozenset({"kind", "inputs", "functional", "test_cases"})


def _verl(row: Row) -> CodeProblem:
    return _stated(_last_text(row["prompt"]), tests_of(_verl_ground_truth(row), row))


_FORMATS: tuple[tuple[Callable[[Row], bool], Callable[[Row], Any]], ...] = (
    (lambda row: "question_content" in row and "public_test_cases" in row, _live_code_bench),
    (lambda row: "plus_input" in row and "canonical_solution" in row, _evalplus),
    (lambda row: "test_list" in row and "test" in row, _mbpp_plus),
    (lambda row: "test_list" in row and ("text" in row or "prompt" in row), _mbpp),
    (lambda row: {"test", "entry_point", "canonical_solution"} <= set(row), _human_eval),
    (lambda row: {"test", "entry_point", "completion"} <= set(row), _leetcode),
    (lambda row: "verification_info" in row, _verification_info),
    (_has_tests, _native),
    (
        lambda row: _statement(row) is not None and bool(_asserts_for_answer(row)),
        _with_asserts,
    ),
    (lambda row: "prompt" in row and _verl_ground_truth(row) is not None, _verl),
)

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
