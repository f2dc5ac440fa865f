"""A training with a confidence at every turn of its agents: the same sessions as without, in every
layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import full_only
from tests.helpers.quickstart import run
from tests.system.test_agents import folder, train, write_config

__all__ = ["folder"]

# a policy of random weights states no number: its branches have a gradient by their entropy
TURNS = ("rollout.asks_confidence=turns", "objective.entropy_coef_confidence=0.3")
LAYOUTS = {
    "dp2": (),
    "tp2": ("parallel.tensor_model_parallel_size=2",),
    "pp2_packed": (
        "parallel.pipeline_model_parallel_size=2",
        "parallel.sequence_packing=true",
    ),
    "cp2_packed": ("parallel.context_parallel_size=2", "parallel.sequence_packing=true"),
}


@pytest.fixture(scope="module")
def turns(folder: Path) -> list[dict[str, Any]]:
    return train(folder, "turns", *TURNS)


def logged(folder: Path, name: str, step: int = 1) -> list[dict[str, Any]]:
    path = folder / name / "samples" / f"step_{step:06d}.jsonl"
    rows = map(json.loads, path.read_text().splitlines())
    return sorted(rows, key=lambda row: (row["prompt_id"], row.get("sample_index", 0)))


def test_branches_are_scored_behind_their_own_context(turns: list[dict[str, Any]]) -> None:
    for row in turns:
        assert row["engine/logprob_diff_max"] < 1e-4
        assert 2 <= row["rollout/segments"] < 2.3, "branches are not counted"


def test_sessions_rewards_and_reasoning_are_those_without_the_option(
    folder: Path, turns: list[dict[str, Any]]
) -> None:
    plain = train(folder, "plain", "training.steps=1", *TURNS[1:])
    for name in ("reward/accuracy", "reward/std", "length/mean", "signal/reasoning"):
        assert turns[0][name] == plain[0][name], name
    branched = 0
    for one, other in zip(logged(folder, "turns"), logged(folder, "plain"), strict=True):
        assert one["text"] == other["text"]
        assert one["pieces"] == other["pieces"], "text, block and advantage of every token"
        ends = one.get("branch_ends", ())
        assert one["answer_from"] - max(ends, default=0) == other["answer_from"]
        assert len(one["contexts"]) - len(ends) == len(other["contexts"])
        assert len(ends) == len(one.get("turn_confidences", ()))
        branched += bool(ends)
    assert branched > 8


@pytest.mark.parametrize("layout", full_only(LAYOUTS, ["dp2", "pp2_packed", "tp2"]))
def test_layouts(folder: Path, turns: list[dict[str, Any]], layout: str) -> None:
    options = ("training.steps=1", *TURNS, *LAYOUTS[layout])
    (row,) = train(folder, layout, *options, processes=2)
    assert row["length/mean"] == turns[0]["length/mean"]
    assert row["loss/policy"] == pytest.approx(turns[0]["loss/policy"], abs=1e-5)
    assert row["grad_norm/total"] == pytest.approx(turns[0]["grad_norm/total"], rel=1e-4)
    assert row["engine/logprob_diff_max"] < 1e-4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("objective.name=grpo",), "objective.name"),
        (("objective.ratio=sequence",), "objective.ratio"),
        (("objective.tis_level=geometric",), "objective.tis_level"),
        (("rollout.asks_confidence=always",), "rollout.asks_confidence"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    folder: Path, options: tuple[str, ...], named: str
) -> None:
    done = run("train", "--config", write_config(folder, "refused"), TURNS[0], *options)
    assert done.returncode == 2
    assert named in done.stderr


def test_an_evaluation_measures_them(folder: Path, turns: list[dict[str, Any]]) -> None:
    """The policy of the run, by the same agent: ``dcpo evaluate --as-trained`` finds the option."""
    done = run(
        "evaluate",
        "--model",
        folder / "turns" / "policy",
        "--as-trained",
        folder / "turns" / "config.yaml",
        "--benchmarks",
        f"held={folder / 'problems.jsonl'}",
        "--out",
        folder / "evaluated",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scores = json.loads((folder / "evaluated" / "evaluation.json").read_text())["overall"]
    by_turn = scores["turns"]["by_turn"]
    assert {"1", "2"} >= set(by_turn)
    assert by_turn["1"]["n"] >= scores["n"] / 2
    assert scores["turns"]["stopping"]["saved"][0] == 0
