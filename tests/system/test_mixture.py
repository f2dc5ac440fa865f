"""Several sources in one run: each judged by its own verifier, metrics per source; a
curriculum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SIZES, judged_twice, metrics, run

GYM = "reasoning_gym:chain_sum"
OWN = '''
def verify(response, answer, *, kind):
    """Every second sum is right whatever it says."""
    return kind == 1
'''


def write_config(folder: Path, *tasks: dict[str, object]) -> Path:
    """Products and sums, two to one, and ``tasks``."""
    (folder / "own.py").write_text(OWN)
    rows = [{"problem": f"{n}+1=", "answer": str(n + 1), "kind": n % 2} for n in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    products = {"path": str(QUICKSTART / "data" / "train.jsonl"), "name": "products", "weight": 2}
    sums = {"path": str(folder / "sums.jsonl"), "verifier": f"{folder / 'own.py'}:verify"}
    values = {
        "base": str(QUICKSTART / "dcpo.yaml"),
        "data": {"path": [products, sums, *tasks], "max_prompt_length": 90},
    }
    path = folder / "mixture.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def train(config: Path, run_dir: Path, *overrides: object) -> list[dict[str, Any]]:
    done = run("train", "--config", config, f"run_dir={run_dir}", *SIZES, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(run_dir)


def test_sources_are_mixed_judged_and_measured_apart(tmp_path: Path) -> None:
    """Of 8 prompts a step 4, 2 and 2."""
    gym = {"path": GYM, "options": {"min_terms": 2, "max_terms": 2}, "size": 20}
    plain = train(
        write_config(tmp_path, gym),
        tmp_path / "plain",
        "training.steps=1",
        "logging.samples_interval=1",
    )[0]
    assert 0 < plain["reward/accuracy/products"] < 1
    assert plain["reward/accuracy/sums"] in (0.0, 0.5, 1.0), "by the prompt alone"
    assert plain["reward/accuracy/chain_sum"] < 0.5
    shares = {"products": 0.5, "sums": 0.25, "chain_sum": 0.25}
    assert plain["reward/accuracy"] == pytest.approx(
        sum(share * plain[f"reward/accuracy/{name}"] for name, share in shares.items())
    )
    assert {f"calibration/ece/{name}" for name in shares} <= plain.keys()
    assert plain["rollout/unjudged"] == 0


def test_a_curriculum_trains_on_the_least_first(tmp_path: Path) -> None:
    train(QUICKSTART / "dcpo.yaml", tmp_path / "run", "data.order=problem", "training.steps=1")
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    every = [
        json.loads(line)["problem"]
        for line in (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()
    ]
    assert {row["problem"] for row in rows} == set(sorted(every)[:8])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.path=[a.jsonl,b/a.jsonl]",),
            "data.path: two sources are called a; give one of them another name",
        ),
        (("data.path=[{path: a.jsonl, weight: 0}]",), "data.path.0.weight"),
        (
            ("data.path=[{path: a.jsonl, size: 3}]",),
            "options, size and seed are for path: reasoning_gym:TASK",
        ),
        (
            ("data.path=[{path: a.jsonl, verifier: mth}]",),
            "expected math, code, exact, f1, choice, forecast, an import path",
        ),
        (("data.path=[]",), "data.path=[]: data.path:"),
        (("data.path=3",), "data.path"),
    ],
)
def test_a_bad_source_is_one_line(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    done = run(
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        "--dry-run",
        f"run_dir={tmp_path}",
        *overrides,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.full
def test_a_task_of_reasoning_gym_is_a_benchmark(tmp_path: Path) -> None:
    """Its samples hold what judging them again needs."""
    task = "reasoning_gym:leg_counting?size=3"
    one, two = judged_twice(tmp_path, "--benchmarks", task)
    assert one == two
    assert [json.loads(line)["logged"] for line in one] == [{"score": 0.0}] * 3
