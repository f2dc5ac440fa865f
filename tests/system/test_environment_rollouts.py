"""A training in which environments make their own rollouts, beside problems of a file, that is
resumed; and the evaluation of what it leaves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_policy import save_policy
from tests.helpers.environments import use_stand_ins
from tests.helpers.quickstart import metrics, run, without_clocks

pytestmark = pytest.mark.full
TURNS = "verifiers:sums-env?kind=turns"
CONFIG = """
seed: 3
model: {{path: {folder}/policy, params_dtype: fp32}}
data:
  path:
    - {{path: verifiers:sums-env, name: sums, options: {{kind: turns}}}}
    - {{path: {folder}/problems.jsonl, name: products}}
  template: chat
  prompts_per_step: 4
  max_prompt_length: 120
rollout:
  agent: environment
  engine: transformers
  group_size: 4
  max_response_length: 200
  max_error_rate: 0
objective: {{name: dcpo}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.0}}
training: {{steps: 2, micro_batch_size: 5, save_interval: 1}}
logging: {{samples_interval: 1, to: []}}
"""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(tmp_path / "policy")
    rows = [{"problem": f"{n}*2=", "answer": str(2 * n)} for n in range(1, 9)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    config = folder / "run.yaml"
    done = run("train", "--config", config, f"run_dir={folder / name}", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(folder / name)


def test_a_training_is_resumed_and_its_policy_is_measured(folder: Path) -> None:
    whole = train(folder, "whole")
    for row in whole:
        assert row["engine/logprob_diff_max"] < 1e-4
        assert row["rollout/agent_error"] == 0
        assert 1 < row["rollout/agent_calls"] < 3, "three of a session, one beside"
    train(folder, "parts", "training.steps=1")
    parts = train(folder, "parts", "training.steps=2", "--resume", "auto")
    for mine, other in zip(without_clocks(parts), without_clocks(whole), strict=True):
        for name, value in other.items():
            if not name.startswith(("engine/", "rollout/utilization")):
                assert mine[name] == value, name

    done = run(
        *("evaluate", "--model", folder / "whole" / "policy", "--out", folder / "held"),
        *("--benchmarks", f"held={TURNS}", "--template", "chat", "--max-tokens", 200),
        *("--agent", "environment", "--engine", "transformers"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    samples = (folder / "held" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 4
    assert all("right" in json.loads(line)["verdict"] for line in samples)


def test_without_its_own_rollouts_an_environment_of_several_turns_is_refused(folder: Path) -> None:
    done = run(
        *("train", "--config", folder / "run.yaml", f"run_dir={folder / 'refused'}"),
        'rollout.agent=""',
        "rollout.max_error_rate=0.05",
    )
    assert done.returncode == 2
    assert "rollout.agent=environment" in done.stderr
    done = run(
        *("evaluate", "--model", folder / "policy", "--out", folder / "refused"),
        *("--benchmarks", TURNS, "--template", "chat"),
    )
    assert done.returncode == 2
    assert "--agent environment" in done.stderr
