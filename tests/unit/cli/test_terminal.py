"""Nothing that a model, a data set or a program writes steers the terminal: no escape code, no
reordering mark.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox import program_judge as sandbox
from megatron_dcpo.sandbox.tests import CodeVerdict
from tests.helpers.evaluated import evaluated, trained
from tests.helpers.paths import REPOSITORY

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f"


def assert_safe(said: str) -> None:
    assert said
    for line in said.splitlines():
        assert all(c.isprintable() or c == "\t" for c in line), ascii(line)


def test_judged_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prediction": "1" + HOSTILE, "reference": "2" + HOSTILE}) + "\n")
    assert main(["judge", "--pairs", str(path)]) == 0
    assert_safe(capsys.readouterr().out)


def test_judged_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        level = "none"

        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, *_: Any) -> Future[CodeVerdict]:
            future: Future[CodeVerdict] = Future()
            future.set_result(CodeVerdict(0, "runtime_error", HOSTILE))
            return future

    monkeypatch.setattr(sandbox, "CodePool", Pool)
    path = tmp_path / "programs.jsonl"
    path.write_text(json.dumps({"response": "```\nx\n```", "tests": {}}) + "\n")
    monkeypatch.setattr("megatron_dcpo.sandbox.tests.checked_tests", lambda tests, where: tests)
    monkeypatch.setattr("megatron_dcpo.sandbox.tests.check_syntax", lambda tests, where: None)
    assert main(["judge", "--programs", str(path)]) == 0
    said = capsys.readouterr().out
    assert_safe(said)
    assert r"runtime_error: \x1b]0;title\x07" in said


@pytest.mark.parametrize("name", ["a" + HOSTILE, "b\ndcpo judge: all is well"])
def test_errors_that_quote(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["judge", "--pairs", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert_safe(said)
    assert said.count("\n") == 1


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of runs are neither escape codes nor rich's markup."""
    for name in ("[red]a" + HOSTILE, "[/bold]b"):
        evaluated(tmp_path / name)
        trained(tmp_path / name)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert_safe(said)
    assert r"[red]a\x1b]0;title" in said
    assert "[/bold]b" in said


def test_logs_and_tracebacks_and_text_that_no_encoding_has() -> None:
    """In a process of its own, whose terminal knows ASCII only."""
    code = (
        "import logging; from megatron_dcpo import cli; cli._write_safely(False);"
        "logging.getLogger('x').warning('%s', '\\x1b[2Ja\\nb\\ud800é'); print('\\ud800é', "
        "flush=True);"
        "raise KeyError('\\x1b[2J\\x9b')"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False
    )
    said = (done.stderr + done.stdout).decode("ascii")
    assert_safe(said)
    assert r"\x1b[2Ja" in said
    assert "KeyError" in said
    assert done.returncode == 1


def test_tracebacks_of_bad_input_with_debug(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        main(["judge", "--debug", "--pairs", str(tmp_path / "none")])
    logging.getLogger().setLevel(logging.WARNING)
