"""The lab end to end, three steps of it: a cell, cached, published; and its probe on one and
on two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.testgrid import Lab, cells
from tests.helpers.paths import REPOSITORY

RECIPE = [
    "--config",
    "examples/lab/recipe.yaml",
    "model.path=examples/lab/qwen3/policy",
    "data.path=examples/lab/data/train.jsonl",
    "data.prompts_per_step=8",
]


def run(*arguments: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=500
    )


@pytest.mark.full  # tests/extras/lab has its parts
def test_a_cell_is_trained_once_and_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    small = ("data.prompts_per_step=8", "training.micro_batch_size=64")
    grid = Lab(tmp_path / "grid", jobs=1, steps=3, problems=16, overrides=small)
    for missing in (1, 0):
        grid.run(cells(["qwen3"], ["grpo"], [1]))
        assert caplog.messages.count(f"{missing} of 1 cells to run") == 1
    shown = run(
        "lab", "test-tables", "--grid", str(tmp_path / "grid"), "--out", str(tmp_path / "docs")
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads((tmp_path / "docs" / "test.json").read_text())["policies"]["qwen3_2"]
    assert len(found["grpo"]["ece"]) == len(found["logistic"]["ece"]) == 1


@pytest.mark.full
def test_probe_leaves_numbers_that_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Cosines, norms and variances of every part: one process against TP=2, 1e-5."""
    one = run("lab", "probe", *RECIPE, "--batches", "2", "--out", str(tmp_path / "one"))
    assert one.returncode == 0, one.stderr
    assert "coupled" in one.stdout
    assert (tmp_path / "one" / "probe.png").stat().st_size > 1000
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    two = run(
        "lab",
        "probe",
        *RECIPE,
        "parallel.tensor_model_parallel_size=2",
        "--batches",
        "2",
        "--out",
        str(tmp_path / "two"),
        launcher=torchrun,
    )
    assert two.returncode == 0, two.stderr
    found, expected = (
        json.loads((tmp_path / name / "probe.json").read_text()) for name in ("two", "one")
    )
    assert found["policy"] == expected["policy"], "the same responses"
    same(found, expected)
    conflict, gradients = expected["conflict"], expected["gradients"]
    assert abs(conflict["dcpo"]["plain"]["all"]["cosine"]) < abs(
        conflict["coupled"]["plain"]["all"]["cosine"]
    )
    assert gradients["counterfactual"]["variance"] < gradients["group_baseline"]["variance"]


def same(found: object, expected: object, where: str = "") -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--batches", "0"), "--batches must be at least 1"), (("objective.lam=2",), "objective.lam")],
)
def test_probe_refuses_bad_input_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = run("lab", "probe", *RECIPE, *arguments, "--out", str(tmp_path))
    assert refused.returncode == 2
    assert message in refused.stderr.strip().splitlines()[-1]
