"""An evaluation that is continued takes the samples that fit, judges again what another key or
verifier judged, samples anew what was asked otherwise, and loses nothing.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import evaluation_run as evaluation_run
from megatron_dcpo.evaluation.samples import Sample, read_samples
from megatron_dcpo.judging.verifiers import digest_of
from tests.helpers.fake_server import FakeServer, Reply
from tests.helpers.paths import QUICKSTART

A = {"problem": "6*7?", "answer": "42"}
B = {"problem": "5*5?", "answer": "25"}
C = {"problem": "2+2?", "answer": "4"}
ANSWERS = {"6*7?": "42", "5*5?": "26", "2+2?": "4"}

Evaluate = Callable[..., int]


def answering(body: dict[str, Any]) -> Reply:
    asked = str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])
    answer = next((text for key, text in ANSWERS.items() if key in asked), "none")
    text = f"\\boxed{{{answer}}}\n<conf> Confidence: 0.9"
    choice = {"message": {"content": text}, "text": text, "finish_reason": "stop"}
    return 200, {"choices": [choice]}, {}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer(reply=answering).start()
    yield fake
    fake.stop()


@pytest.fixture
def evaluate(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Evaluate the rows of ``x.jsonl`` into ``out``; the status."""
    monkeypatch.chdir(tmp_path)

    def run(*rows: dict[str, Any], options: tuple[str, ...] = ()) -> int:
        _forget_modules()  # as a new process would
        if rows:
            Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main(
            [
                "evaluate",
                "--endpoint",
                server.url,
                "--repeats",
                "2",
                "--resamples",
                "0",
                "--benchmarks",
                "x=x.jsonl",
                "--out",
                "out",
                *options,
            ]
        )

    return run


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("megatron_dcpo_user_")]:
        del sys.modules[name]


def saved() -> list[Sample]:
    return read_samples("out/samples.jsonl")


def correct_of() -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for sample in saved():
        assert sample.judgement.prompt_id == sample.prompt.prompt_id
        found.setdefault(sample.prompt.problem, []).append(sample.correct)
    return found


def test_another_problem_of_the_same_name_is_sampled(
    evaluate: Evaluate, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate(A) == 0
    before = Path("out/samples.jsonl").read_text()
    assert evaluate(B) == 0
    assert len(server.asked) == 4
    assert correct_of() == {"5*5?": [False, False]}
    assert Path("out/samples.replaced.jsonl").read_text() != ""
    replaced = read_samples("out/samples.replaced.jsonl")
    assert [sample.prompt.problem for sample in replaced] == ["6*7?"] * 2
    assert "x/0" in caplog.text
    # and back again: nothing of what was replaced is lost
    assert evaluate(A) == 0
    assert Path("out/samples.jsonl").read_text() == before
    assert len(read_samples("out/samples.replaced.jsonl")) == 4


def test_a_row_put_in_front_is_the_only_one_that_is_sampled(
    evaluate: Evaluate, server: FakeServer
) -> None:
    assert evaluate(A, B) == 0
    assert evaluate(C, A, B) == 0
    assert len(server.asked) == 4 + 2
    assert correct_of() == {"2+2?": [True] * 2, "6*7?": [True] * 2, "5*5?": [False] * 2}
    assert not Path("out/samples.replaced.jsonl").exists()
    assert evaluate(B, A, C) == 0
    assert len(server.asked) == 6
    assert [sample.prompt.prompt_id for sample in saved()[::2]] == ["x/0", "x/1", "x/2"]
    assert list(correct_of()) == ["5*5?", "6*7?", "2+2?"]


def test_equal_problems_keep_their_own_samples(evaluate: Evaluate, server: FakeServer) -> None:
    assert evaluate(A, A) == 0
    assert evaluate(B, A, A) == 0
    assert len(server.asked) == 4 + 2
    assert len(saved()) == 6


def test_a_corrected_key_is_judged_without_sampling(
    evaluate: Evaluate, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate(A, B) == 0
    assert evaluate(A, {**B, "answer": "26"}) == 0
    assert len(server.asked) == 4
    assert correct_of() == {"6*7?": [True, True], "5*5?": [True, True]}
    assert {s.prompt.ground_truth for s in saved()} == {"42", "26"}
    assert "judging 2 saved samples again" in caplog.text
    assert json.loads(Path("out/evaluation.json").read_text())["overall"]["accuracy"] == 1


def test_an_edited_template_is_asked_again(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path
) -> None:
    options = ("--template", "my_prompt.py:render")
    file = tmp_path / "my_prompt.py"
    file.write_text("def render(problem, marker):\n    return problem + marker\n")
    assert evaluate(A, options=options) == 0
    assert evaluate(options=options) == 0
    assert len(server.asked) == 2
    file.write_text("def render(problem, marker):\n    return 'Say: ' + problem\n")
    assert evaluate(options=options) == 0
    assert len(server.asked) == 4
    assert server.asked[-1]["messages"][-1]["content"] == "Say: 6*7?"


def test_an_edited_verifier_judges_again(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path
) -> None:
    """Also one that imports another file next to it, which is edited."""
    options = ("--verifier", "my_reward.py:verify")
    file = tmp_path / "my_reward.py"
    file.write_text("def verify(response, answer):\n    return True\n")
    assert evaluate(B, options=options) == 0
    assert correct_of() == {"5*5?": [True, True]}
    file.write_text("def verify(response, answer):\n    return False\n")
    assert evaluate(options=options) == 0
    assert correct_of() == {"5*5?": [False, False]}
    assert len(server.asked) == 2


def test_an_edited_member_of_several_verifiers_judges_again(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path
) -> None:
    """And a changed weight is another evaluation, which ``--rejudge`` makes of the samples."""

    def options(weight: float) -> tuple[str, ...]:
        verifier = f"{{math: {weight}, 'my_reward.py:verify': 1}}"
        return ("--verifier", verifier, "--threshold", "0.5")

    file = tmp_path / "my_reward.py"
    file.write_text("def verify(response, answer):\n    return True\n")
    assert evaluate(B, options=options(1)) == 0
    assert correct_of() == {"5*5?": [True, True]}
    file.write_text("def verify(response, answer):\n    return False\n")
    assert evaluate(options=options(1)) == 0
    assert correct_of() == {"5*5?": [False, False]}
    file.write_text("def verify(response, answer):\n    return True\n")
    assert evaluate(options=options(2)) == 2
    again = ["evaluate", "--samples", "out/samples.jsonl", "--rejudge", "--out", "out"]
    _forget_modules()
    assert main([*again, "--resamples", "0", *options(2)]) == 0
    assert correct_of() == {"5*5?": [False, False]}, "1/3 is less than 0.5"
    _forget_modules()
    assert main([*again, "--resamples", "0", *options(0.5)]) == 0
    assert correct_of() == {"5*5?": [True, True]}, "2/3 is not"
    assert len(server.asked) == 2


def test_what_cannot_be_judged_is_counted_and_loses_no_response(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path
) -> None:
    """``--rejudge`` replaces a file by one with as many responses, or leaves it."""
    fails = (
        "def verify(response, answer):\n    if answer == '25': raise OSError('down')\n    return 1"
    )
    works = "def verify(response, answer):\n    return 1"
    judged = ("--verifier", "my_reward.py:verify", "judging.max_error_rate=0.5")

    def again(*options: str) -> int:
        _forget_modules()
        where = ("--samples", "out/samples.jsonl", "--resamples", "0")
        return main(["evaluate", *where, *judged, *options])

    file = tmp_path / "my_reward.py"
    file.write_text(fails)
    assert evaluate(A, B, options=judged[:2]) != 0, "more than judging.max_error_rate"
    assert evaluate(options=judged) == 0
    found = json.loads(Path("out/evaluation.json").read_text())
    assert found["unjudged"] == 2
    assert correct_of() == {"6*7?": [True, True]}
    file.write_text(works)
    assert evaluate(options=judged) == 0
    assert "unjudged" not in json.loads(Path("out/evaluation.json").read_text())
    assert correct_of() == {"6*7?": [True, True], "5*5?": [True, True]}
    before = Path("out/samples.jsonl").read_bytes()
    file.write_text(fails)
    assert again("--rejudge", "--out", "out") != 0
    assert Path("out/samples.jsonl").read_bytes() == before
    assert again("--rejudge", "--out", "other") == 0
    assert json.loads(Path("other/evaluation.json").read_text())["unjudged"] == 2
    assert Path("out/samples.jsonl").read_bytes() == before


def test_a_verifier_that_is_edited_while_it_judges_is_noticed(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path
) -> None:
    options = ("--verifier", "my_reward.py:verify")
    file = tmp_path / "my_reward.py"
    file.write_text("def verify(response, answer):\n    return True\n")

    def reply(body: dict[str, Any]) -> Reply:
        file.write_text("def verify(response, answer):\n    return False\n")
        return answering(body)

    server.reply = reply
    assert evaluate(B, options=options) == 2
    assert not Path("out/evaluation.json").exists()
    assert evaluate(options=options) == 0
    assert correct_of() == {"5*5?": [False, False]}
    assert len(server.asked) == 2


def test_the_digest_of_a_verifier_holds_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside_it", raising=False)
    (tmp_path / "beside_it.py").write_text("RIGHT = True\n")
    file = tmp_path / "importing_reward.py"
    file.write_text(
        "import json, math\nimport numpy as np\nfrom beside_it import RIGHT\n"
        "import beside_it\ndef verify(response, answer):\n    return RIGHT\n"
    )
    name, options = f"{file}:verify", JudgingConfig()
    before = digest_of(name, options)
    assert digest_of(name, options) == before
    (tmp_path / "unrelated.py").write_text("")
    assert digest_of(name, options) == before
    (tmp_path / "beside_it.py").write_text("RIGHT = False\n")
    edited = digest_of(name, options)
    assert edited != before
    assert digest_of(name, JudgingConfig(threshold=0.5)) != edited
    assert digest_of("math", options) == digest_of("math", options)
    assert digest_of("math", options) != digest_of("exact", options)


def test_a_date_is_that_of_the_first_command(
    evaluate: Evaluate, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(QUICKSTART / "policy", tokenizer)
    for file in tokenizer.glob("chat_template*"):
        file.unlink()
    template = tokenizer / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}")
    options = ("--tokenizer", str(tokenizer), "--template", "chat")
    first = datetime.date(2026, 2, 28)
    monkeypatch.setattr(evaluation_run, "today", lambda: first)
    assert evaluate({"problem": "1+2=", "answer": "3"}, options=options) == 0
    asked = server.asked[0]["prompt"]
    monkeypatch.setattr(evaluation_run, "today", lambda: first + datetime.timedelta(days=1))
    assert evaluate(options=options) == 0
    assert len(server.asked) == 2
    assert json.loads(Path("out/settings.json").read_text())["date"] == "2026-02-28"
    assert evaluate(options=(*options, "--fresh")) == 0
    assert len(server.asked) == 4
    assert server.asked[-1]["prompt"] != asked
    # a chat template that is replaced asks again, too
    template.write_text("{{ messages[-1].content }}")
    assert evaluate(options=options) == 0
    assert len(server.asked) == 6


def test_settings_that_cannot_be_written_leave_the_old_ones(
    evaluate: Evaluate,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(A) == 0
    before = Path("out/settings.json").read_text()
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "settings.json" in path.name:
            write(path, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    with monkeypatch.context() as faulty:
        faulty.setattr(Path, "write_bytes", full)
        capsys.readouterr()
        assert evaluate() == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "out/settings.json" in said
    assert ".tmp" not in said
    assert Path("out/settings.json").read_text() == before
    assert not list(Path("out").glob("*.tmp"))
    assert evaluate() == 0
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("refused", "problems", "status"),
    [(1, 2, 0), (1, 1, 2), (2, 12, 2), (1, 12, 0), (2, 20, 0), (3, 20, 2)],
)
def test_refused_prompts_count_as_wrong_up_to_a_share(
    evaluate: Evaluate,
    server: FakeServer,
    refused: int,
    problems: int,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tenth, or one problem; and they are asked again."""
    rows = [
        {"problem": f"{'LONG ' * (n < refused)}{n}: 6*7?", "answer": "42"} for n in range(problems)
    ]

    def reply(body: dict[str, Any]) -> Reply:
        if "LONG" in body["messages"][-1]["content"]:
            return 400, {"error": {"code": "context_length_exceeded"}}, {}
        return answering(body)

    server.reply = reply
    assert evaluate(*rows) == status
    if status:
        assert "context_length_exceeded" in capsys.readouterr().err
        assert not Path("out/evaluation.json").exists()
    else:
        scores = json.loads(Path("out/evaluation.json").read_text())["overall"]
        assert scores["accuracy"] == pytest.approx(1 - refused / problems)
        assert scores["refused_rate"] == pytest.approx(refused / problems)
    before = len(server.asked)
    server.reply = answering
    assert evaluate() == 0
    assert len(server.asked) >= before + 2 * refused
    scores = json.loads(Path("out/evaluation.json").read_text())["overall"]
    assert (scores["accuracy"], scores["n"]) == (1, 2 * problems)
    assert "refused_rate" not in scores


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(A) + "\n")
    rows = read_rows(file)
    assert next(rows) == A
    file.write_text(json.dumps(B) + "\n" + json.dumps(C) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl was changed"):
        list(rows)
