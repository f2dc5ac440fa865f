"""A report and the live page of runs whose files hold any number, any depth, any damage: a page, or
one line.
"""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.live import live_server
from tests.helpers.evaluated import evaluated, trained

HUGE = 10**400
ROWS: list[Any] = [
    {"step": 12, "reward/accuracy": HUGE},
    {"step": HUGE, "reward/accuracy": 0.5},
    {"step": -HUGE, "calibration/ece": -HUGE, "time/step": HUGE},
    {"step": "12", "reward/accuracy": 0.5},
    {"step": None, "reward/accuracy": "high"},
    {"step": [12], "reward/accuracy": [0.5]},
    {"step": 12, "reward/accuracy": {"a": {"b": 1}}},
    {"step": 12, "evaluation/x/ece": HUGE, "tokens/s/step": HUGE},
    {"step": 1e308, "reward/accuracy": 1e308},
    {"reward/accuracy": True},
    {},
]
SAMPLES: list[Any] = [
    {"version": 2, "text": 3, "confidence": HUGE, "problem": HUGE, "prompt_id": []},
    {"version": 2, "pieces": [1, 2]},
    {"version": 2, "pieces": "ab", "confidence": "high"},
    {"version": 2, "text": None, "correct": [], "category": {"a": 1}},
]
DEEP = "a: " + "{b: " * 1000 + "1" + "}" * 1000
CONFIGS = [
    DEEP,
    f"training: {{steps: {HUGE}}}\n",
    f"seed: {HUGE}\n",
    f"seed: {'9' * 5000}\n",
    "a: &a [*a]\n",
    "[",
    "\x00",
    "3",
]


def report(directory: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The status; no traceback, and at most one line of errors."""
    capsys.readouterr()
    status = main(["report", str(directory)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert status in (0, 2)
    if status == 2:
        assert len(said.err.strip().splitlines()) == 1
    return status


def live(directory: Path) -> tuple[int, str]:
    with live_server(directory, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request("GET", "/")
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            server.shutdown()
            thread.join()


def check_live(directory: Path) -> None:
    status, text = live(directory)
    assert status in (200, 503)
    if status == 200:
        assert "</html>" in text
    else:
        assert "\n" not in text


@pytest.mark.parametrize("row", ROWS)
def test_any_row_of_the_metrics(
    row: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    report(tmp_path / "run", capsys)
    check_live(tmp_path / "run")


def test_numbers_that_no_float_holds_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, "reward/accuracy": HUGE}) + "\n")
    assert report(tmp_path / "run", capsys) == 0
    status, text = live(tmp_path / "run")
    assert status == 200
    assert "step 12" in text


@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration_is_read_or_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(config)
    report(tmp_path / "run", capsys)
    check_live(tmp_path / "run")


@pytest.mark.parametrize("sample", SAMPLES)
def test_any_sample_is_read_or_refused(
    sample: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / "step_000001.jsonl").write_text(json.dumps(sample) + "\n")
    report(tmp_path / "run", capsys)
    check_live(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"\xff\xfe{}\n"),
        ("run.json", b"[" * 100_000),
        ("run.json", b'{"launches": [{"time": 3, "commit": [], "device": {}}]}'),
        ("warnings.jsonl", b"\xff\n"),
        ("warnings.jsonl", b"[1]\n{}\n"),
    ],
)
def test_any_bytes_are_read_or_refused(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    with (tmp_path / "run" / name).open("ab") as file:
        file.write(content)
    report(tmp_path / "run", capsys)
    check_live(tmp_path / "run")


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1e308, "high", [], {}, None, True])
def test_any_value_in_an_evaluation(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(tmp_path / "run")
    path = tmp_path / "run" / "evaluation.json"
    for place in (("accuracy",), ("verbal",), ("verbal", "ece"), ("ci95",), ("n",)):
        content = json.loads(path.read_text())
        holder = content["overall"]
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value
        damaged = tmp_path / "damaged"
        damaged.mkdir(exist_ok=True)
        (damaged / "evaluation.json").write_text(json.dumps(content))
        report(damaged, capsys)
