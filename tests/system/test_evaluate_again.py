"""A second evaluation into the same directory continues the first one, or is refused and leaves it
as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import run

OPTIONS = (
    "--template",
    "raw",
    "--max-tokens",
    "32",
    "--engine",
    "transformers",
    "--resamples",
    "0",
)


def evaluate(out: Path, *options: str, model: Path = QUICKSTART / "policy"):
    source = ("--model", model, "--benchmarks", f"heldout={QUICKSTART / 'data' / 'heldout.jsonl'}")
    return run("evaluate", *source, "--out", out, "--repeats", "2", *OPTIONS, *options)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "run"
    done = evaluate(out, "--limit", "4")
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_an_interrupted_evaluation_continues(first: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(first, out)
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    done = evaluate(out, "--limit", "4")
    assert done.returncode == 0, done.stderr[-2000:]
    continued, whole = rows(out), rows(first)
    assert len(continued) == len(whole) == 8
    for row, expected in zip(continued, whole, strict=True):
        # Log-probs depend in their last digits on how many sequences run together.
        assert row == {name: rounded(value) for name, value in expected.items()}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def rounded(value: Any) -> Any:
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--limit", "1"), "holds 8 samples, 6 of which this evaluation does not ask for"),
        (
            ("--limit", "4", "--temperature", "0.3"),
            "was begun with temperature = 0.7, now it is 0.3",
        ),
    ],
)
def test_another_evaluation_is_refused(
    first: Path, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(first, out)
    refused = evaluate(out, *options)
    assert refused.returncode == 2
    assert expected in refused.stderr
    assert "--fresh" in refused.stderr
    for name in ("samples.jsonl", "evaluation.json", "settings.json"):
        assert (out / name).read_bytes() == (first / name).read_bytes()
    assert evaluate(out, *options, "--fresh").returncode == 0


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    model, out = tmp_path / "policy", tmp_path / "run"
    shutil.copytree(QUICKSTART / "policy", model)
    assert evaluate(out, "--limit", "1", model=model).returncode == 0
    os.utime(model / "model.safetensors")
    refused = evaluate(out, "--limit", "1", model=model)
    assert refused.returncode == 2
    assert "was begun with weights = " in refused.stderr


def test_another_element_type_is_refused_and_its_default_by_name_is_not(
    first: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(first, out)
    refused = evaluate(out, "--limit", "4", "--dtype", "bfloat16")
    assert refused.returncode == 2
    assert "params_dtype" in refused.stderr
    assert evaluate(out, "--limit", "4", "--dtype", "float32").returncode == 0


def test_scores_of_old_samples_do_not_replace_other_samples(first: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert evaluate(other, "--limit", "1").returncode == 0
    refused = run(
        "evaluate", "--samples", first / "samples.jsonl", "--out", other, "--resamples", "0"
    )
    assert refused.returncode == 2
    assert "holds the samples of another evaluation" in refused.stderr
