"""``examples/say``: the whole example on a few problems."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES

QUICKSTART = EXAMPLES / "quickstart"
RUN = EXAMPLES / "say" / "run.py"


@pytest.fixture
def example() -> dict[str, Any]:
    """The functions of the example."""
    return runpy.run_path(str(RUN))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options of a call, whose files are there."""
    for name in ("fit", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"the problems of {name}\n")
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("fit", "test")}
    return {"model": str(QUICKSTART / "policy"), **files, "sampling": "", "adapter": "", "say": ""}


@pytest.mark.parametrize(
    ("changed", "result"),
    [
        ("model", "fit"),
        ("fit", "fit"),
        ("test", "before"),
        ("sampling", "fit"),
        ("adapter", "taught"),
        ("say", "said"),
    ],
)
def test_results_of_other_options_are_refused(
    example: dict[str, Any], options: dict[str, Any], tmp_path: Path, changed: str, result: str
) -> None:
    """What is not there yet may still be made of something else."""
    out = tmp_path / "out"
    keep = example["keep_inputs"]
    keep(out, {**options, changed: "nothing"})
    keep(out, options)
    for name in ("fit", "before", "taught", "said"):
        (out / name).mkdir()
    keep(out, options)
    with pytest.raises(SystemExit, match=f"{result} was made with --{changed} "):
        keep(out, {**options, changed: "something else"})


def test_a_file_with_other_problems_is_refused(
    example: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    example["keep_inputs"](tmp_path, options)
    (tmp_path / "fit").mkdir()
    Path(options["fit"]).write_text("other problems\n")
    with pytest.raises(SystemExit, match="--fit"):
        example["keep_inputs"](tmp_path, options)


def rows(numbers: range, **columns: str) -> str:
    """Problems as lines of a file."""
    found = [{"problem": f"{n}+1=", "answer": str(n + 1), **columns} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in found)


@pytest.mark.parametrize(
    ("fit", "test", "named"),
    [
        (rows(range(9), kind="sum"), rows(range(9, 12), kind="sum"), None),
        (rows(range(9), kind="sum"), rows(range(8, 12), kind="sum"), "1 problems of --test .*8.1="),
        (rows(range(9)), rows(range(9, 12), kind="sum"), "--fit .*kind"),
        (rows(range(9), kind="sum"), rows(range(9, 12)), "--test .*kind"),
        (rows(range(9), kind="sum"), None, "--test: .*no such"),
    ],
)
def test_problems_are_looked_at_before_the_first_answer(
    example: dict[str, Any], tmp_path: Path, fit: str, test: str | None, named: str | None
) -> None:
    files = [str(tmp_path / "fit.jsonl"), str(tmp_path / "test.jsonl")]
    for file, content in zip(files, (fit, test), strict=True):
        if content is not None:
            Path(file).write_text(content)
    if named is None:
        example["check_problems"](*files)
        return
    with pytest.raises(SystemExit, match=named):
        example["check_problems"](*files)


def test_answers_without_a_confidence_are_counted(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their Brier score is of the others alone."""
    said = {"auroc": None, "auroc_within": None, "n": 40, "n_parsed": 37, "brier": 0.1}
    scores = {"accuracy": 0.5, "verbal": said, "ci95": {"accuracy": [0, 1], "verbal": {}}}
    scores["ci95"]["verbal"]["brier"] = [0.0, 0.2]
    found = {"benchmarks": {"problems": scores}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    example["show"](example["Answers"](tmp_path, "verbal", "stated after"))
    assert "stated after: without 3 of 40 answers" in capsys.readouterr().out


def test_another_template_for_learning_is_refused(tmp_path: Path) -> None:
    """An option may hold a space, in quotes as in a shell."""
    command = [sys.executable, RUN, "--out", tmp_path, "--say", "data.template='a b.py:render'"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "data.template=a b.py:render is" in done.stderr


def test_a_command_that_is_interrupted_ends_by_itself(tmp_path: Path) -> None:
    """It saves what it has, which takes longer than subprocess.run would wait."""
    saves = tmp_path / "saves.py"
    saves.write_text(
        "import pathlib, signal, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "def save(*_):\n"
        "    time.sleep(1)\n"
        "    (here / 'saved').touch()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "(here / 'ready').touch()\n"
        "time.sleep(60)\n"
    )
    call = (
        f"import runpy, sys; run = runpy.run_path({str(RUN)!r})['run']; "
        f"run.__globals__['DCPO'] = (sys.executable,); run({str(saves)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", call], start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=60) == 75
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.full
def test_the_whole_example(tmp_path: Path) -> None:
    """What was done is kept: a second call prints the same table and trains nothing."""
    files = {}
    for name, count in (("train", 120), ("heldout", 40)):
        lines = (QUICKSTART / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(lines[:count]))
    out = tmp_path / "out"
    command = [
        *(sys.executable, RUN, "--out", out),
        *("--fit", files["train"], "--test", files["heldout"]),
        *("--adapter", "model.adapter.rank=4 model.params_dtype=fp32 logging.to=[]"),
    ]
    tables = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        tables.append(done.stdout[done.stdout.index("\nconfidence") :])
    assert "stated after" in tables[0]
    assert tables[0] == tables[1]
    assert (out / "said" / "policy" / "config.json").is_file()
