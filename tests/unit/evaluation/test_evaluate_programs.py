"""``dcpo evaluate`` on programs: prompts, judging, confidence, agreement, a marker of one's own,
judging again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.data.code_problems import pack_tests
from megatron_dcpo.data.code_problems import tests_key as key_of
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.program_tests import read_tests, write_tests
from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.judging.answers import FENCED
from megatron_dcpo.judging.programs import ProgramVerifier
from megatron_dcpo.types import Prompt, Response
from tests.helpers.fake_server import FakeServer
from tests.helpers.judging import judge_many

ADD = {
    "kind": "stdin",
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "-4 4\n", "output": "0\n"}],
}
DOUBLE = {
    "kind": "check",
    "entry_point": "double",
    "code": "def check(candidate):\n    assert candidate(4) == 8\n",
}
PROBLEMS = [
    {"problem": "PROBLEM-ADD: print the sum of two numbers.", "tests": ADD},
    {"problem": "PROBLEM-DOUBLE: write double(x).", "tests": DOUBLE},
]
PROGRAMS = {
    "ADD": [
        "a, b = map(int, input().split())\nprint(a + b)",
        "x, y = map(int, input().split())  # the same\nprint(x + y)",
        "print(3)",
        "print(1 / 0)",
    ],
    "DOUBLE": [
        "def double(x):\n    return 2 * x",
        "def double(x):\n    '''Twice.'''\n    return 2 * x",
        "def double(x):\n    return x * x",
        "def double(y):\n    return y + y",
    ],
}


def reply(marker: str = "<conf>") -> Any:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        question = body["messages"][-1]["content"]
        assert f"{marker} Confidence: 0.83" in question
        assert "```python" in question
        name = "ADD" if "PROBLEM-ADD" in question else "DOUBLE"
        program = PROGRAMS[name][body["seed"] % 4]
        text = f"I think.\n```python\n{program}\n```\n{marker} Confidence: 0.{body['seed'] % 4 + 5}"
        rows = [{"token": "t", "logprob": -0.5, "top_logprobs": []}]
        choice = {
            "message": {"content": text},
            "logprobs": {"content": rows},
            "finish_reason": "stop",
        }
        return 200, {"choices": [choice]}, {}

    return answer


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "toy.jsonl"
    path.write_text("\n".join(map(json.dumps, PROBLEMS)))
    return path


def evaluate(out: Path, problems: Path, *options: str, marker: str = "<conf>") -> dict[str, Any]:
    server = FakeServer(reply=reply(marker)).start()
    try:
        url = f"http://127.0.0.1:{server.port}/v1"
        source = [
            "--endpoint",
            url,
            "--benchmarks",
            f"toy={problems}",
            "--repeats",
            "6",
            "--resamples",
            "0",
        ]
        source += ["--attempts", "1"]
        assert main(["evaluate", *source, "--out", str(out), *options]) == 0
    finally:
        server.stop()
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def test_programs_are_judged_and_agree_by_their_text(tmp_path: Path, problems: Path) -> None:
    evaluation = evaluate(tmp_path / "run", problems)
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 12
    for sample in samples:
        name = "ADD" if "PROBLEM-ADD" in sample.prompt.problem else "DOUBLE"
        kind = PROGRAMS[name].index((sample.judgement.answer or "").strip())
        right = {"ADD": [True, True, False, False], "DOUBLE": [True, True, False, True]}[name][kind]
        assert sample.correct is right
        assert sample.judgement.category == (
            "passed" if right else "runtime_error" if "1 / 0" in PROGRAMS[name][kind] else "wrong"
        )
        assert sample.judgement.confidence == pytest.approx(0.5 + kind / 10)
        assert sample.prompt.ground_truth == key_of(pack_tests(ADD if name == "ADD" else DOUBLE))
        # The first two of each list are one program; agreement knows nothing of right and wrong.
        group = [s for s in samples if s.prompt.prompt_id == sample.prompt.prompt_id]
        kinds = [PROGRAMS[name].index((s.judgement.answer or "").strip()) for s in group]
        same = [k for k in kinds if k == kind or {k, kind} == {0, 1}]
        assert sample.measures.consistency_confidence == pytest.approx(len(same) / 6)
    toy = evaluation["benchmarks"]["toy"]
    assert sum(toy["categories"].values()) == pytest.approx(1)
    assert toy["categories"]["passed"] == pytest.approx(toy["accuracy"])
    assert {"verbal", "token", "consistency"} <= set(toy)


def test_the_result_depends_on_no_concurrency(tmp_path: Path, problems: Path) -> None:
    texts = set()
    for concurrency in ("1", "7"):
        out = tmp_path / concurrency
        evaluate(out, problems, "--concurrency", concurrency)
        texts.add((out / "evaluation.json").read_text())
    assert len(texts) == 1


@pytest.mark.slow
def test_old_samples_are_scored_and_judged_again_without_model_and_benchmark(
    tmp_path: Path, problems: Path
) -> None:
    evaluation = evaluate(tmp_path / "run", problems)
    problems.unlink()
    samples = tmp_path / "run" / "samples.jsonl"
    # A response of mathematics among them: each kind by its own judge.
    row = json.loads(samples.read_text().splitlines()[0]) | {
        "task": "sums",
        "text": "\\boxed{1/2}\n<conf> 0.5",
        "ground_truth": "0.5",
        "correct": 0.0,
    }
    for extra in ([], ["--rejudge"]):
        out = tmp_path / f"again{len(extra)}"
        assert (
            main(
                [
                    "evaluate",
                    "--samples",
                    str(samples),
                    "--out",
                    str(out),
                    "--resamples",
                    "0",
                    *extra,
                ]
            )
            == 0
        )
        assert json.loads((out / "evaluation.json").read_text()) == evaluation
    samples.write_text(samples.read_text() + json.dumps(row) + "\n")
    out = tmp_path / "mixed"
    assert (
        main(
            [
                "evaluate",
                "--samples",
                str(samples),
                "--out",
                str(out),
                "--resamples",
                "0",
                "--rejudge",
            ]
        )
        == 0
    )
    mixed = json.loads((out / "evaluation.json").read_text())
    assert mixed["benchmarks"]["toy"] == evaluation["benchmarks"]["toy"]
    assert mixed["benchmarks"]["sums"]["accuracy"] == 1
    assert (
        main(
            [
                "evaluate",
                "--samples",
                str(out / "samples.jsonl"),
                "--out",
                str(tmp_path / "third"),
                "--rejudge",
            ]
        )
        == 0
    )


def test_judging_again_without_the_tests_is_an_error(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(tmp_path / "run", problems)
    (tmp_path / "run" / "tests.jsonl.gz").unlink()
    arguments = [
        "evaluate",
        "--samples",
        str(tmp_path / "run" / "samples.jsonl"),
        "--out",
        str(tmp_path / "again"),
    ]
    assert main([*arguments, "--resamples", "0"]) == 0, "scoring needs no tests"
    assert main([*arguments, "--rejudge"]) == 2
    assert "tests.jsonl.gz: no tests for 2 problems" in capsys.readouterr().err


def test_a_marker_of_ones_own(tmp_path: Path, problems: Path) -> None:
    out = tmp_path / "run"
    evaluation = evaluate(out, problems, "--marker", "[SURE]", marker="[SURE]")
    assert evaluation["marker"] == "[SURE]"
    assert evaluation["benchmarks"]["toy"]["parse_rate"] == 1
    assert 'title="confidence">[SURE] Confidence' in (out / "report.html").read_text()
    again = tmp_path / "again"
    source = [
        "evaluate",
        "--samples",
        str(out / "samples.jsonl"),
        "--rejudge",
        "--resamples",
        "0",
        "--out",
        str(again),
    ]
    assert main(source) == 0
    assert json.loads((again / "evaluation.json").read_text()) == evaluation, (
        "the marker is known from before"
    )
    assert main([*source, "--marker", "<conf>"]) == 0
    assert (
        json.loads((again / "evaluation.json").read_text())["benchmarks"]["toy"]["parse_rate"] == 0
    )


def test_samples_of_another_marker_are_not_mixed(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(tmp_path / "run", problems)
    with pytest.raises(AssertionError):
        evaluate(tmp_path / "run", problems, "--marker", "[SURE]", marker="[SURE]")
    assert "marker =" in capsys.readouterr().err


def test_tests_on_disk(tmp_path: Path) -> None:
    packed = {key_of(pack_tests(tests)): pack_tests(tests) for tests in (ADD, DOUBLE)}
    path = tmp_path / "tests.jsonl.gz"
    write_tests(packed, path)
    before = path.read_bytes()
    write_tests(packed, path)
    assert path.read_bytes() == before
    assert read_tests(path, packed) == packed
    with pytest.raises(UserError, match=r"tests\.jsonl\.gz: .*\b1 problems"):
        read_tests(path, ["tests:0000000000000000"])
    forged = tmp_path / "forged.jsonl"
    forged.write_text(
        json.dumps({"key": next(iter(packed)), "tests": {"kind": "asserts", "asserts": ["True"]}})
        + "\n"
    )
    with pytest.raises(UserError, match=r"forged\.jsonl:1: .*tests:"):
        read_tests(forged, packed)


def test_nothing_behind_the_confidence_line_is_run() -> None:
    packed = pack_tests(ADD)
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    key = key_of(packed)
    texts = [
        (f"{right}\n<conf> 0.9", "stop"),
        (f"<conf> 0.9\n{right}", "stop"),
        (f"```python\nprint(3)\n```\n<conf> 0.9\n{right}", "stop"),
        ("no program\n<conf> 0.1", "stop"),
        (f"{right}", "length"),
    ]
    none = np.empty(0)
    responses = [
        Response("p", i, none, none, reason, 0, text=text) for i, (text, reason) in enumerate(texts)
    ]  # type: ignore[arg-type]
    prompts = {"p": Prompt("p", (), (), key, "toy", packed)}
    verdicts = judge_many(
        responses, prompts, verifier=ProgramVerifier({key: packed}, workers=1), form=FENCED
    )
    assert [v.correct for v in verdicts] == [1, 0, 0, 0, 1]
    assert [v.status for v in verdicts] == ["ok", "before_box", "before_box", "ok", "truncated"]
    assert [v.answer is None for v in verdicts] == [False, True, False, True, False]
