"""Environments of others in whole commands: two of them mixed with a file in a training that is
resumed bit for bit, with one as validation, and an evaluation that is judged again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.environments import use_stand_ins
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, judged_twice, metrics, run, without_clocks

pytestmark = pytest.mark.full
SUMS = "verifiers:sums-env"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def test_a_training_on_environments_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    words = {
        "path": "verifiers:tasks_env",
        "options": {"range": "-1..2", "split": "test"},
        "size": 6,
    }
    values = {
        "base": str(QUICKSTART / "dcpo.yaml"),
        "data": {
            "path": [SUMS, words, str(QUICKSTART / "data" / "train.jsonl")],
            "max_prompt_length": 90,
        },
        "judging": {"threshold": 0.5},
        "evaluation": {"interval": 1, "benchmarks": f"held={SUMS}", "samples": 1},
    }
    config = tmp_path / "environments.yaml"
    config.write_text(json.dumps(values))  # JSON is YAML

    def train(name: str, *overrides: str) -> None:
        done = run(
            "train",
            "--config",
            config,
            f"run_dir={tmp_path / name}",
            *SMALL,
            "training.save_interval=1",
            *overrides,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    train("whole", "training.steps=2")
    train("parts", "training.steps=1")
    train("parts", "training.steps=2", "--resume", "auto")
    whole, parts = (metrics(tmp_path / name) for name in ("whole", "parts"))
    assert without_clocks(whole) == without_clocks(parts)
    last = whole[-1]
    assert last["format/verifier_error"] == 0
    assert {"verifier/right", "verifier/repeated", "evaluation/held/accuracy"} <= set(last)
    sources = {name for name in last if name.startswith("reward/accuracy/")}
    assert sources == {f"reward/accuracy/{n}" for n in ("sums-env", "tasks_env", "data")}


def test_an_evaluation_is_judged_again_from_its_samples(tmp_path: Path) -> None:
    benchmarks = f"held={SUMS},verifiers:tasks_env?size=2&range=-1..2"
    one, two = judged_twice(tmp_path, "--benchmarks", benchmarks)
    assert one == two
    assert len(one) == 4
    assert all("score" in json.loads(line)["logged"] for line in one)
