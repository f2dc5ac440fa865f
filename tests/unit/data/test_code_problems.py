"""Programming problems: every format of the public sets, LiveCodeBench's packed tests, what is
refused.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.data import code_problems, livecodebench
from megatron_dcpo.data.benchmarks import load_benchmark, parse_specs
from megatron_dcpo.data.code_problems import CodeProblem, pack_tests, unpack_tests
from megatron_dcpo.data.datasets import Loading, load_records, message_prompts, usable_rows
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox.program_judge import judge_programs
from megatron_dcpo.sandbox.tests import LIVECODEBENCH_COMMIT
from tests.helpers.data import real, reference_solution, write
from tests.helpers.paths import DATA


def code_problem(row: dict[str, Any]) -> CodeProblem:
    (record,) = usable_rows([(0, row)], Loading("own", "rows")).records
    assert record.tests is not None
    return CodeProblem(record.problem, unpack_tests(record.tests))


def read_tests_of(row: dict[str, Any]) -> dict[str, Any]:
    return dict(code_problem(row).tests)


STDIN = {
    "kind": "stdin",
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "0 0\n", "output": "0\n"}],
}


@pytest.mark.parametrize(
    "tests",
    [
        STDIN,
        json.dumps(STDIN),
        {"inputs": ["1 2\n", "0 0\n"], "outputs": ["3\n", "0\n"]},
        '{"inputs": ["1 2\\n", "0 0\\n"], "outputs": ["3\\n", "0\\n"]}',
        [{"input": "1 2\n", "output": "3\n"}, {"input": "0 0\n", "output": "0\n"}],
        [
            {"type": "stdin_stdout", "input": "1 2\n", "output": "3\n", "fn_name": None},
            {"input": "0 0\n", "output": "0\n"},
        ],
    ],
    ids=range(6),
)
def test_stdin_in_every_spelling(tests: object) -> None:
    assert read_tests_of({"problem": "Add.", "tests": tests}) == STDIN


def test_a_statement_is_in_the_column_that_has_one() -> None:
    found = code_problem({"problem": None, "question": "Add.", "tests": ["assert add(1, 1) == 2"]})
    assert found.statement == "Add."
    found = code_problem({"problem": "", "prompt": "Add.", "answer": "assert add(1, 1) == 2"})
    assert found.statement == "Add."


def test_stdin_statement_says_where_input_comes_from_once() -> None:
    for problem in ("Add.", "Add. Read standard input, write standard output."):
        found = code_problem({"problem": problem, "tests": STDIN})
        assert found.statement.count("standard input") == 1


def test_functions_and_python_literals() -> None:
    """As PrimeIntellect writes them."""
    cases = [
        {"type": "function_call", "fn_name": "f", "input": [[1, 2], 3], "output": [4]},
        {"type": "function_call", "fn_name": "f", "input": [[5], 6], "output": [7]},
    ]
    want = {
        "kind": "function",
        "entry_point": "f",
        "cases": [
            {"args": [[1, 2], 3], "kwargs": {}, "expected": 4},
            {"args": [[5], 6], "kwargs": {}, "expected": 7},
        ],
    }
    for written in (cases, json.dumps(cases), repr(cases)):
        found = code_problem({"prompt": "Write it.", "tests": written})
        assert found.tests == want
        assert "`f`" in found.statement, "the name that the tests call must be said"
    cases[1]["output"] = [7, 8]  # a list of two: the values of this set are lists, not wrapped
    tests = read_tests_of({"prompt": "f", "tests": cases})
    assert [case["expected"] for case in tests["cases"]] == [[4], [7, 8]]


def test_verl_rows() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Add two numbers."}]
    truth = {"inputs": ["1 2\n", "0 0\n"], "outputs": ["3\n", "0\n"]}
    for raw in (truth, json.dumps(truth)):
        row = {
            "data_source": "taco",
            "prompt": prompt,
            "ability": "code",
            "reward_model": {"ground_truth": raw},
        }
        assert read_tests_of(row) == STDIN
    for answer in ("4", "[1, 2]", "{1, 2}", "[[1, 2], [3, 4]]"):  # mathematics stays mathematics
        row = {"prompt": prompt, "reward_model": {"ground_truth": answer}}
        (record,) = usable_rows([(0, row)], Loading("own", "rows")).records
        assert record.tests is None


def test_asserts_and_functional() -> None:
    row = {
        "text": "Write f.",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "import math",
        "code": "c",
    }
    assert read_tests_of(row) == {
        "kind": "asserts",
        "asserts": ["assert f(1) == 2"],
        "setup": "import math",
    }
    functional = "def check(candidate):\n    assert candidate(a = 1) == 2\n\n\ncheck(Solution().f)"
    found = read_tests_of({"problem": "class Solution", "tests": {"functional": functional}})
    assert (found["kind"], found["entry_point"]) == ("check", "Solution().f")
    assert found["code"].strip().endswith("== 2")
    names: dict[str, Any] = {}
    exec(found["setup"], names)
    tree = names["tree_node"]([1, None, 2, 3])
    assert (tree.val, tree.left, tree.right.val, tree.right.left.val) == (1, None, 2, 3)
    assert names["is_same_tree"](tree, names["tree_node"]([1, None, 2, 3]))
    assert not names["is_same_tree"](tree, names["tree_node"]([1, 2, None, 3]))
    assert not names["is_same_list"](names["list_node"]([1, 2]), names["list_node"]([1, 2, 3]))
    assert names["tree_node"]([]) is None
    assert names["list_node"]([]) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"problem": "p", "tests": {"kind": "magic", "cases": [1]}},
            "kind of tests 'magic' is unknown",
        ),
        ({"problem": "p", "tests": {"kind": "stdin", "cases": []}}, "cases must be a list"),
        ({"problem": "p", "tests": {"kind": "check", "code": "x"}}, "entry_point is missing"),
        ({"problem": "p", "tests": "nonsense"}, "unreadable tests"),
        ({"problem": "p", "tests": [1, 2]}, "unreadable tests"),
        ({"problem": "p", "tests": {"kind": "stdin"}}, "cases must be a list"),
        ({"prompt": "p", "test_list": ["assert f()"], "test": "no loop"}, "MBPP"),
        ({"problem": "p", "tests": {"inputs": ["1"], "outputs": []}}, "unreadable tests"),
        ({"problem": "p", "tests": {"functional": "def check(c): pass"}}, "without a call"),
        ({"task_id": "Mbpp/2", "plus_input": [], "canonical_solution": ""}, "OriginFmt"),
    ],
)
def test_unreadable_tests_name_the_row(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"row 1: .*{reason}|row 1.*{reason}"):
        load_records(write(tmp_path / "bad.jsonl", [row]))


def test_packed_tests_and_their_key() -> None:
    packed = pack_tests(STDIN)
    assert unpack_tests(packed) == STDIN
    assert code_problems.tests_key(packed) == code_problems.tests_key(
        pack_tests(dict(reversed(STDIN.items())))
    ), "the order of keys is no difference"
    other = {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "4\n"}]}
    assert code_problems.tests_key(packed) != code_problems.tests_key(pack_tests(other))


def test_prompts_ask_for_a_program_and_the_marker() -> None:
    records = load_records(write_native())
    asked = message_prompts(records, "paper", marker="[SURE]")[0]
    text = asked.messages[-1]["content"]
    assert "```python" in text
    assert "[SURE] Confidence: 0.83" in text
    assert "boxed" not in text
    assert "<conf>" not in text
    assert asked.tests == records[0].tests
    assert "onfidence" not in message_prompts(records, "grpo")[0].messages[-1]["content"]


def write_native() -> Path:
    import tempfile

    return write(Path(tempfile.mkdtemp()) / "native.jsonl", [{"problem": "Add.", "tests": STDIN}])


# --------------------------------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("humaneval/HumanEval.jsonl.gz", "check"),
        ("humanevalplus/HumanEvalPlus.jsonl.gz", "check"),
        ("humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz", "check"),
        ("mbpp/mbpp.jsonl", "asserts"),
        ("mbppplus/MbppPlus-OriginFmt.jsonl.gz", "check"),
        ("code_rllm/train_leetcode.json", "check"),
        ("code_rllm/test_code_contests.json", "stdin"),
        ("code_rllm/test_codeforces.json", "stdin"),
        ("leetcodedataset/LeetCodeDataset-v0.3.1-test.jsonl.gz", "check"),
    ],
)
def test_kinds_of_real_files(file: str, kind: str) -> None:
    records = load_records(real(file))
    assert {unpack_tests(record.tests)["kind"] for record in records if record.tests} == {kind}
    assert all(
        record.tests and record.answer == code_problems.tests_key(record.tests)
        for record in records
    )


# sum() of floats rounds otherwise since Python 3.12, and this problem's test compares to the last
# digit (docs/programs.md)
FAILING_HERE = {"HumanEval/32"} if sys.version_info >= (3, 12) else set()


@pytest.mark.parametrize(
    ("file", "every"),
    [
        ("humanevalplus/HumanEvalPlus.jsonl.gz", 8),
        ("humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz", 8),
        ("mbppplus/MbppPlus-OriginFmt.jsonl.gz", 12),
        ("leetcodedataset/LeetCodeDataset-v0.2.0-train.jsonl.gz", 40),
    ],
)
def test_reference_solutions_pass_and_others_do_not(file: str, every: int) -> None:
    """A sample of each set; ``make reference-solutions`` judges all of them."""
    rows = [
        row for row in list(read_rows(real(file)))[::every] if row["task_id"] not in FAILING_HERE
    ]
    tests = [read_tests_of(dict(row)) for row in rows]
    verdicts = judge_programs(
        [(reference_solution(row), of_row) for row, of_row in zip(rows, tests, strict=True)]
    )
    assert [
        (row["task_id"], v.detail) for row, v in zip(rows, verdicts, strict=True) if v.correct != 1
    ] == []
    for row, found in zip(
        rows, tests, strict=True
    ):  # in this process: the solutions are the data set's own
        names: dict[str, Any] = {"__name__": "program"}
        exec(f"{found.get('setup', '')}\n{reference_solution(row)}\n{found['code']}", names)
        with pytest.raises(Exception):  # noqa: B017, PT011
            names["check"](lambda *args, **kwargs: object())


# ------------------------------------------------------------------------------------ LiveCodeBench


def packed_private(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def lcb_row(number: int, date: str, private: str | None = None, **other: object) -> dict[str, Any]:
    cases = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    hidden = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]
    return {
        "question_title": f"Q{number}",
        "question_content": "Add two numbers.",
        "platform": "atcoder",
        "question_id": f"abc{number}",
        "contest_date": f"{date}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases),
        "private_test_cases": packed_private(json.dumps(hidden)) if private is None else private,
        "metadata": "{}",
        **other,
    }


def test_live_code_bench_stdin_and_functional() -> None:
    tests = read_tests_of(lcb_row(1, "2025-01-02"))
    assert (tests["kind"], tests["rule"]) == ("stdin", "livecodebench")
    assert tests["cases"] == [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "5 5\n", "output": "10\n"},
    ]
    case = {"input": '[1, 2]\n"a"', "output": "[true]", "testtype": "functional"}
    row = lcb_row(
        2,
        "2025-01-02",
        private=json.dumps([case]),
        public_test_cases=json.dumps([case]),
        starter_code="class Solution:\n    def f(self, a, b):\n        ",
        metadata='{"func_name": "f"}',
    )
    found = code_problem(row)
    assert found.tests["entry_point"] == "Solution().f"
    assert found.tests["cases"] == [{"args": [[1, 2], "a"], "kwargs": {}, "expected": [True]}] * 2
    assert found.tests["rule"] == "livecodebench"
    assert "def f(self, a, b)" in found.statement


def test_stdin_tests_of_deepcoder_and_tests_without_a_name() -> None:
    case = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
    tests = read_tests_of({"problem": "Add.", "tests": [case]})
    assert (tests["kind"], tests["rule"]) == ("stdin", "livecodebench")
    unnamed = {"input": "1", "output": "3", "testtype": "functional"}
    with pytest.raises(UserError, match="func_name"):
        code_problem({"problem": "Add.", "tests": [unnamed]})


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile_pickle_ran",)


@pytest.mark.parametrize(
    "private",
    [
        packed_private(Hostile()),
        packed_private([json.dumps([])]),
        packed_private(b"[]"),
        base64.b64encode(zlib.compress(b"cbuiltins\neval\n(S'1'\ntR.")).decode(),
        base64.b64encode(b"not zlib").decode(),
        "!!!",
        packed_private("not json"),
        packed_private(json.dumps([{"input": "1"}])),
        base64.b64encode(zlib.compress(pickle.dumps("[]")[:-3])).decode(),
    ],
    ids=range(9),
)
def test_private_tests_that_are_no_text_are_refused_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"."):
        livecodebench.decode_private(private)
    with pytest.raises(UserError, match="LiveCodeBench"):
        code_problem(lcb_row(1, "2025-01-02", private=private))
    assert list(tmp_path.iterdir()) == []


def test_a_decompression_bomb_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "LARGEST", 1 << 16)
    with pytest.raises(ValueError, match="pickle"):
        livecodebench.decode_private(packed_private("x" * (1 << 20)))


def test_windows_by_contest_date_over_several_files(tmp_path: Path) -> None:
    folder = tmp_path / "livecodebench"
    folder.mkdir()
    write(folder / "test4.jsonl", [lcb_row(1, "2024-07-31"), lcb_row(2, "2024-08-01")])
    write(
        folder / "test5.jsonl",
        [lcb_row(3, "2025-01-31"), lcb_row(4, "2025-02-01"), lcb_row(2, "2024-08-01")],
    )
    write(
        folder / "test6.jsonl",
        [lcb_row(5, "2025-02-01"), lcb_row(6, "2025-04-30"), lcb_row(7, "2025-05-01")],
    )
    v5 = load_benchmark("LiveCodeBench-v5", tmp_path)
    assert len(v5.records) == 2, (
        "the first day belongs to the window, the last does not; no problem twice"
    )
    assert any("2 problems" in w and "279" in w for w in v5.warnings)
    assert any("2024-08-01" in w and "2025-02-01" in w for w in v5.warnings)
    assert any(LIVECODEBENCH_COMMIT in w for w in v5.warnings)
    assert len(load_benchmark("lcb_v6", tmp_path).records) == 2
    chosen = load_benchmark("lcbv5:2024-07-01..2024-08-01", tmp_path)
    assert len(chosen.records) == 1
    assert not any("expected" in warning for warning in chosen.warnings)
    with pytest.raises(UserError, match="no problem of 2030-01-01 to 2031-01-01"):
        load_benchmark("lcbv6:2030-01-01..2031-01-01", tmp_path)
    for bad in (
        "lcbv5:2024-13-01..2025-01-01",
        "lcbv5:x",
        "math500:2024-01-01..2025-01-01",
        "lcbv5:2025-01-01..2024-01-01",
    ):
        with pytest.raises(UserError, match="bad benchmark"):
            load_benchmark(bad, tmp_path)
    with pytest.raises(UserError, match="twice"):
        parse_specs("lcbv5,lcb-v5:2024-10-01..2025-02-01")


def test_only_the_window_is_decoded(tmp_path: Path) -> None:
    rows = [lcb_row(1, "2024-09-01"), lcb_row(2, "2023-09-01", private="broken")]
    write(tmp_path / "lcb_v5.jsonl", rows)
    assert len(load_benchmark("lcbv5", tmp_path).records) == 1


def test_code_benchmarks_of_the_data_directory() -> None:
    if not DATA.is_dir():
        pytest.skip("no data directory; set DCPO_DATA")
    for spelling, count in (("HumanEval+", 164), ("mbpp_plus", 375), ("leetcode", 228)):
        loaded = load_benchmark(spelling, DATA)
        assert len(loaded.records) == count
        known = ("problem 32", "assert nothing")
        assert [w for w in loaded.warnings if not any(name in w for name in known)] == []
        assert len({record.answer for record in loaded.records}) == count


def test_tasks_whose_tests_assert_nothing_are_left_out_by_name(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    row = {"task_id": 737, "prompt": "Write it.", "test_list": ["assert f(1)"]}
    dropped = row | {
        "test": "def assertion(out, exp, atol):\n    exact_match = out == "
        "exp\n\nassertion(f(*inp), 1, 0)"
    }
    tested = row | {
        "task_id": 3,
        "test": "def assertion(out, exp, atol):\n    assert out == exp\n\nassertion(f(*inp), 1, 0)",
    }
    path = tmp_path / "tasks.jsonl"
    write(path, [dropped, tested])
    assert len(load_records(path)) == 1
    assert "left out 1 tasks whose tests assert nothing: 737" in caplog.text
    if DATA.is_dir():
        loaded = load_benchmark("mbppplus", DATA)
        assert len(loaded.records) == 375
        assert any("737, 787, 794" in warning for warning in loaded.warnings)


def test_a_memo_of_private_tests_makes_no_room() -> None:
    """Python's unpickler in C would make room for four thousand million objects."""
    for number in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x10"):
        bomb = base64.b64encode(zlib.compress(b"\x80\x04Nr" + number + b"0.")).decode()
        with pytest.raises(ValueError, match="pickle"):
            livecodebench.decode_private(bomb)
    with pytest.raises(ValueError, match="levels deep"):
        livecodebench.decode_private(packed_private("[" * 10**5))


ASSERTS = ["assert add(1, 2) == 3"]


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("ground_truth", ASSERTS, "asserts"),
        ("ground_truth", ASSERTS[0], "asserts"),
        ("answer", json.dumps(ASSERTS * 2), "asserts"),
        ("reward_model", {"ground_truth": ASSERTS}, "asserts"),
        ("tests", ASSERTS, "asserts"),
        ("tests", json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), "stdin"),  # TACO
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_tests_under_other_names(column: str, value: object, kind: str, is_chat: bool) -> None:
    statement: Any = "Write add(a, b)."
    if is_chat:
        statement = [{"role": "user", "content": statement}]
    problem = code_problem({"prompt": statement, column: value})
    assert problem.tests["kind"] == kind
    assert problem.statement.startswith("Write add(a, b).")
