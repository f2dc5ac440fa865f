"""A training whose responses are sessions of agents: two conversations each, a tool, a confidence
that is asked for, and now and then one that fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_policy import save_policy
from tests.helpers.quickstart import metrics, run

AGENT = """
async def run(problem, client):
    if problem["id"].endswith("1") and problem["index"] == 2:
        raise RuntimeError("the tool is gone")
    question = {"role": "user", "content": problem["problem"]}
    plan = [{"role": "system", "content": "Plan."}, question]
    planned = await client.chat.completions.create(model="x", messages=plan, max_tokens=9)
    work = [question]
    for _ in range(2):
        answer = await client.chat.completions.create(model="x", messages=work, max_tokens=11)
        work += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    text = planned.choices[0].message.content + work[1]["content"]
    return {"score": len(text.encode()) % 2, "characters": len(text)}
"""

CONFIG = """
run_dir: {run_dir}
seed: 3
model: {{path: {policy}, params_dtype: fp32}}
data:
  path: problems.jsonl
  template: chat
  prompts_per_step: 4
  max_prompt_length: 64
rollout:
  agent: my_agent.py:run
  engine: transformers
  group_size: 4
  max_response_length: 160
judging: {{max_error_rate: 0.3}}
objective: {{name: dcpo}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.0}}
training: {{steps: 3, micro_batch_size: 5, save_interval: 1}}
logging: {{samples_interval: 1, to: []}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agents")
    write_files(made)
    return made


def write_files(folder: Path) -> None:
    """A policy, an agent and its problems."""
    save_policy(folder / "policy")
    (folder / "my_agent.py").write_text(AGENT)
    rows = [{"problem": f"{n}*2=", "answer": str(2 * n)} for n in range(1, 9)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, name: str = "run") -> Path:
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(run_dir=folder / name, policy=folder / "policy"))
    return config


def train(folder: Path, name: str, *overrides: str, processes: int = 1) -> list[dict[str, Any]]:
    config = write_config(folder, name)
    done = run("train", "--config", config, *overrides, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(folder / name)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[dict[str, Any]]:
    return train(folder, "whole")


def test_the_trainer_scores_what_the_engine_has_sampled(whole: list[dict[str, Any]]) -> None:
    """Every segment behind its own context: else the log-probs would not agree."""
    assert len(whole) == 3
    for row in whole:
        assert row["engine/logprob_diff_max"] < 1e-4
        # a policy of random weights may begin to think, which the template then leaves out
        assert 2 <= row["rollout/segments"] < 2.3
        assert row["rollout/agent_calls"] == 3
        assert row["verifier/characters"] > 0
        assert 0 < row["reward/accuracy"] < 1
        assert row["grad_norm/total"] > 0


def test_a_session_that_fails_is_left_out_of_its_group(
    folder: Path, whole: list[dict[str, Any]]
) -> None:
    errors = [row["rollout/unjudged"] for row in whole]
    assert max(errors) > 0
    for step, row in enumerate(whole, start=1):
        lines = (folder / "whole" / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert len(lines) == 16 - round(16 * row["rollout/unjudged"])
        for line in map(json.loads, lines):
            assert "failure" not in line
            assert line["verdict"]["score"] == line["correct"]
            assert len(line["contexts"]) >= 2
        asked = ["<conf> Confidence:" in json.loads(line)["text"] for line in lines]
        assert sum(asked) > len(asked) / 2, "but who has said nothing is not asked how sure it is"


def test_two_ranks_have_two_doors(folder: Path, whole: list[dict[str, Any]]) -> None:
    rows = train(folder, "ranks", "training.steps=1", processes=2)
    assert rows[0]["length/mean"] == whole[0]["length/mean"]
    assert rows[0]["loss/policy"] == pytest.approx(whole[0]["loss/policy"], abs=1e-5)


def test_too_many_failures_end_the_run(folder: Path) -> None:
    done = run("train", "--config", write_config(folder, "failing"), "judging.max_error_rate=0")
    assert done.returncode == 2
    assert "judging.max_error_rate" in done.stderr
    assert done.stderr.count("the tool is gone") == 1


def test_every_reason_for_which_sessions_fail_is_said_once(folder: Path) -> None:
    agent = AGENT.replace("the tool is gone", "the tool is {problem['index'] % 2}")
    agent = agent.replace('RuntimeError("', 'RuntimeError(f"')
    agent = agent.replace(' and problem["index"] == 2', "")
    (folder / "two_reasons.py").write_text(agent.replace('problem["id"].endswith("1")', "True"))
    config = write_config(folder, "two_reasons")
    done = run("train", "--config", config, f"rollout.agent={folder}/two_reasons.py:run")
    assert done.returncode == 2
    assert [done.stderr.count(f"the tool is {n}") for n in (0, 1)] == [1, 1], done.stderr


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("rollout.command=true",), "rollout.command"),
        (
            ("rollout.max_staleness=1", "rollout.oversample=1.5", "objective.tis_level=token"),
            "rollout.max_staleness",
        ),
        (('rollout.agent=""', "rollout.agent_calls=3"), "rollout.agent_calls"),
        (("rollout.agent=my_agent.py:nothing",), "rollout.agent"),
    ],
)
def test_what_does_not_go_with_agents_is_refused(
    folder: Path, overrides: tuple[str, ...], named: str
) -> None:
    done = run("train", "--config", write_config(folder, "refused"), *overrides)
    assert done.returncode == 2
    assert named in done.stderr
