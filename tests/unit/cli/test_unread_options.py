"""An option that would be ignored is refused by name, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.samples import write_samples
from tests.unit.evaluation.test_posthoc import SAMPLES

PLAN = ["plan", "--config", "gone.yaml"]
PAIRS = ["judge", "--pairs", "gone.jsonl"]
PROGRAMS = ["judge", "--programs", "gone.jsonl"]
REPORT = ["report", "gone"]
CALIBRATE = ["calibrate", "--samples", "gone.jsonl", "--out", "o"]
APPLY = [*CALIBRATE, "--apply", "gone"]
ADAPTER = [*CALIBRATE, "--kind", "adapter", "--model", "gone"]
DESCRIPTION = {
    "model": "gone",
    "template": "paper",
    "thinking": "off",
    "marker": "<conf>",
    "decimals": 2,
    "answers": 100,
}
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
    (CALIBRATE, ["--teacher", "task"]),
    (APPLY, ["--held-out", "0"]),
    (APPLY, ["--seed", "0"]),
    (APPLY, ["--epochs", "3"]),
    (APPLY, ["--kind", "isotonic"]),
    (ADAPTER, ["--epochs", "3"]),
    (ADAPTER, ["--read", "mean"]),
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


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (ADAPTER, "run_dir=o"),
        (ADAPTER, "data.path=gone.jsonl"),
        (ADAPTER, "data.limit=10"),
        (ADAPTER, "data.columns.prompt=question"),
        (ADAPTER, "objective.name=cross_entropy"),
        (APPLY, "optimizer.lr=1e-3"),
        (APPLY, "training.epochs=2"),
        (APPLY, "data.limit=10"),
    ],
)
def test_an_option_of_sft_that_is_not_read_is_refused(
    command: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(SAMPLES, Path("gone.jsonl"))
    Path("gone/adapter").mkdir(parents=True)
    Path("gone/confidence.json").write_text(json.dumps(DESCRIPTION))
    assert main([*command, option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err


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
        [*APPLY, "--read", "greedy"],
        [*ADAPTER, "--held-out", "0", "--teacher", "task"],
    ],
    ids=" ".join,
)
def test_an_option_that_is_read_is_not(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert "gone" in capsys.readouterr().err
