"""An option that would be ignored is refused by name, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.cli import main

PLAN = ["plan", "--config", "gone.yaml"]
PAIRS = ["judge", "--pairs", "gone.jsonl"]
PROGRAMS = ["judge", "--programs", "gone.jsonl"]
REPORT = ["report", "gone"]
CALIBRATE = ["calibrate", "--samples", "gone.jsonl", "--out", "o"]
UNREAD = [
    (PLAN, ["--gpu-memory-gb", "40"]),
    (PLAN, ["--gpus-per-node", "4"]),
    (PLAN, ["--engine-gpus", "4"]),
    ([*PLAN, "--gpus", "8", "--reshard"], ["--peak-tflops", "500"]),
    ([*PLAN, "--gpus", "8", "--reshard"], ["--response-tokens", "500"]),
    (PAIRS, ["--workers", "2"]),
    (PAIRS, ["--threshold", "0.5"]),
    (PAIRS, ["--sandbox", "unsafe"]),
    ([*PAIRS, "--verifier", "exact"], ["--show", "3"]),
    (PROGRAMS, ["--verifier", "exact"]),
    (PROGRAMS, ["--show", "0"]),
    (REPORT, ["--port", "0"]),
    ([*REPORT, "--serve"], ["--out", "r.html"]),
    ([*REPORT, "--serve"], ["--kinds", "level"]),
    ([*REPORT, "--serve"], ["--json"]),
    (CALIBRATE, ["--epochs", "200"]),
    (["train", "--config", "gone.yaml"], ["--allow-missing"]),
    (["config", "rollout"], ["--example", "dcpo"]),
    (["launch", "1"], ["--nproc-per-node", "2", "--", "train", "--config", "gone.yaml"]),
    (["launch", "1"], ["--engine-command", "x", "--", "train", "--config", "gone.yaml"]),
]


@pytest.mark.parametrize(
    ("command", "words"), UNREAD, ids=[" ".join([one[0], *words]) for one, words in UNREAD]
)
def test_an_option_that_is_not_read_is_refused(
    command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    said = capsys.readouterr().err
    assert words[0] in said
    assert "gone" not in said


def test_what_is_said_twice_about_resuming_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run_dir: r\nmodel: {path: m}\ndata: {path: d}\n")
    command = ["train", "--config", str(config), "--dry-run", "--allow-missing"]
    assert main([*command, "--resume", "auto", "training.resume=none"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_plan_shows_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--gpus", "8", "--fastest", "--reshard"])
    assert "--fastest" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        [*PLAN, "--response-tokens", "500"],
        [*PLAN, "--gpus", "8", "--mfu", "0.3"],
        [*PLAN, "--gpus", "8", "--reshard"],
        [*PAIRS, "--show", "3"],
        [*PAIRS, "--verifier", "f1", "--threshold", "0.5"],
        [*PROGRAMS, "--workers", "2", "--test-seconds", "3"],
        [*REPORT, "--kinds", "level", "--json"],
        [*CALIBRATE, "--kind", "confclass", "--epochs", "3", "--held-out", "0", "--seed", "1"],
    ],
    ids=" ".join,
)
def test_an_option_that_is_read_is_not(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert "gone" in capsys.readouterr().err
