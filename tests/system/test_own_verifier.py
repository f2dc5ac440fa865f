"""A user's verifier in a run: it decides R, its errors are counted, too many end the run with
everything saved.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics, run, without_clocks

VERIFIER = '''
import pathlib

from megatron_dcpo.judging.answers import extract_boxed


def verify(response, answer, *, type):
    """Equal as text; the column ``type`` is the row's."""
    assert type.count("x") == 1
    return {"score": extract_boxed(response) == answer, "length": len(response)}


def fails(response, answer):
    """Raise for every response of the steps after the second one is saved."""
    if pathlib.Path("run/checkpoints/iter_0000002").exists() and not pathlib.Path("mended").exists():
        raise RuntimeError("no more")
    return extract_boxed(response) == answer
'''


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_reward.py").write_text(VERIFIER)
    return tmp_path


def dcpo(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run(*arguments, cwd=directory, PYTHONPATH=str(REPOSITORY))


def train(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    policy = f"model.path={QUICKSTART / 'policy'}"
    return dcpo(
        directory, "train", "--config", QUICKSTART / "dcpo.yaml", policy, *SMALL, *overrides
    )


def test_it_trains_as_the_built_in_one_where_both_agree(directory: Path) -> None:
    """On whole numbers equality of texts is what math decides; the function's numbers are
    logged.
    """
    runs = {"math": (), "own": ("judging.verifier=my_reward.py:verify",)}
    for name, overrides in runs.items():
        done = train(directory, "training.steps=2", f"run_dir={name}", *overrides)
        assert done.returncode == 0, done.stderr[-2000:]
    math, own = (without_clocks(metrics(directory / name)) for name in runs)
    more = {"rollout/unjudged", "format/no_answer", "verifier/score", "verifier/length"}
    assert [{k: v for k, v in row.items() if k not in more} for row in own] == [
        {k: v for k, v in row.items() if k not in more} for row in math
    ]
    assert [row["verifier/score"] for row in own] == [row["reward/accuracy"] for row in math]
    assert [row["rollout/unjudged"] for row in own] == [0.0, 0.0]
    first = json.loads(
        (directory / "own" / "samples" / "step_000001.jsonl").read_text().splitlines()[0]
    )
    assert first["logged"].keys() == {"score", "length"}


def test_too_many_errors_end_the_run_and_it_goes_on_when_mended(directory: Path) -> None:
    """The step that was not judged is not trained: what is resumed is what an undisturbed run is,
    bit for bit.
    """
    own = ("judging.verifier=my_reward.py:fails", "training.steps=4", "training.save_interval=2")
    done = train(directory, "run_dir=run", *own)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "32 of 32 responses (step 3) have no judgement, more than "
        "judging.max_error_rate=0.05" in last
    )
    assert last.endswith("saved after step 2; --resume auto continues run")
    assert done.stderr.count("RuntimeError: no more (") == 1
    assert "Traceback" not in done.stderr
    assert len(metrics(directory / "run")) == 2
    (directory / "mended").touch()
    for arguments in (("run_dir=run", "--resume", "auto"), ("run_dir=whole",)):
        done = train(directory, *arguments, *own)
        assert done.returncode == 0, done.stderr[-2000:]
    resumed, whole = (without_clocks(metrics(directory / name)) for name in ("run", "whole"))
    assert resumed == whole


def test_evaluation_keeps_what_judging_again_needs(directory: Path) -> None:
    """``--samples --rejudge`` gives the same verdicts from the columns beside the samples."""
    own = ("--verifier", "my_reward.py:verify", "--resamples", 0)
    held_out = f"mine={QUICKSTART / 'data' / 'heldout.jsonl'}"
    sampled = (
        "--model",
        QUICKSTART / "policy",
        "--benchmarks",
        held_out,
        "--limit",
        20,
        "--repeats",
        1,
    )
    shown: list[dict[str, Any]] = []
    for source in (
        (*sampled, "--template", "raw", "--max-tokens", 32),
        ("--samples", "one/samples.jsonl", "--rejudge"),
    ):
        done = dcpo(
            directory, "evaluate", *source, *own, "--out", "two" if shown else "one", "--json"
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(json.loads(done.stdout)["benchmarks"])
    assert shown[0] == shown[1]
    assert 0 < shown[0]["mine"]["accuracy"] < 1
    row = json.loads((directory / "one" / "samples.jsonl").read_text().splitlines()[0])
    assert row["row"]["type"]
    assert row["logged"].keys() == {"score", "length"}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("judging.verifier=my_reward.py:verfy",), ["'verfy'", "'verify'"]),
        (("judging.verifier=mth",), ["judging.verifier=mth", "'math'"]),
        (
            ("judging.verifier=my_reward.py:extract_boxed",),
            ["my_reward.py:extract_boxed", "verify(response, answer"],
        ),
        (("judging.verifier={math: 1, 'my_reward.py:verfy': 1}",), ["'verfy'", "'verify'"]),
        (("judging.graded=true",), ["judging.graded", "judging.threshold", "f1"]),
    ],
)
def test_a_bad_option_is_one_line(
    directory: Path, overrides: tuple[str, ...], named: list[str]
) -> None:
    done = train(directory, "--dry-run", "run_dir=run", *overrides)
    assert done.returncode == 2
    assert [name for name in named if name not in done.stderr] == []
    assert len(done.stderr.strip().splitlines()) == 1
