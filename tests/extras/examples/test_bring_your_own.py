"""docs/bring_your_own.md as a user follows it: the files of each section are written, its commands
run, outside the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import metrics

PAGE = (REPOSITORY / "docs" / "bring_your_own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- test: (.+?) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(QUICKSTART / "policy")
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    shown = ""
    for what, block in BLOCKS:
        if what.startswith("file "):
            (tmp_path / what.removeprefix("file ")).write_text(block)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command, *arguments = shlex.split(line, comments=True)
            assert command == "dcpo"
            done = warm.run("megatron_dcpo", arguments, [environment], timeout=600, cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
            shown += done.stdout
    runs = tmp_path / "runs"
    graded = metrics(runs / "verifier")[0]
    assert graded["reward/accuracy"] <= graded["verifier/score"]
    assert graded["verifier/distance"] >= 0
    evaluated = json.loads((runs / "evaluated" / "evaluation.json").read_text())
    assert evaluated["benchmarks"]["mine"]["n"] == 16
    assert "2 predictions, 1 correct, 0 unjudged" in shown
    weighted = metrics(runs / "weighted")[0]
    parts = ("math", "my_reward.verify", "my_style.short")
    math, own, short = (weighted[f"verifier/{part}"] for part in parts)
    score = 0.6 * math + 0.3 * own + 0.1 * short
    assert weighted["verifier/score"] == pytest.approx(score, abs=1e-9)
    assert weighted["reward/accuracy"] == math
    assert "12=3*4, 8=2*4." in shown
    mixed = metrics(runs / "mixture")[-1]
    assert {f"reward/accuracy/{name}" for name in ("sums", "numbers", "chain_sum")} <= mixed.keys()
    assert {"evaluation/sums/accuracy", "evaluation/chain_sum/accuracy"} <= mixed.keys()
    assert (
        json.loads((runs / "legs" / "evaluation.json").read_text())["benchmarks"]["leg_counting"][
            "problems"
        ]
        == 5
    )
    first = json.loads(
        (runs / "curriculum" / "samples" / "step_000001.jsonl").read_text().splitlines()[0]
    )
    assert first["problem"] in ("1+2=", "2+5=")
    logged = [
        json.loads(line) for line in (runs / "logger" / "accuracy.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["accuracy"]) for row in logged] == [
        (row["step"], row["reward/accuracy"]) for row in metrics(runs / "logger")
    ]
    assert (runs / "logger" / "accuracy.done").read_text() == "config.yaml report.html"


def test_the_page_has_the_sections_that_others_link_to() -> None:
    assert {"A verifier", "A reward server", "Data", "A model", "A logger"} <= set(
        re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    )


def test_the_examples_reward_server_trains(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "examples/reward_server/server.py", "0"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        small = (
            "training.steps=1",
            "data.prompts_per_step=4",
            "rollout.group_size=4",
            f"run_dir={tmp_path / 'run'}",
        )
        command = [
            sys.executable,
            "-m",
            "megatron_dcpo",
            "train",
            "--config",
            "examples/reward_server/dcpo.yaml",
        ]
        done = subprocess.run(
            [*command, f"judging.verifier={url}", *small],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        server.kill()
        server.wait()
    row = metrics(tmp_path / "run")[0]
    assert row["rollout/unjudged"] == 0
    assert row["verifier/score"] == row["reward/accuracy"]
