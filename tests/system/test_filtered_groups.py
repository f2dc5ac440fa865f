"""``rollout.filter_groups``: groups that train nothing are replaced; the prompts go on behind the last one consumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_dcpo.objectives.expected_digits import DecimalToken

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, build_objective
from megatron_dcpo.training import sampling
from megatron_dcpo.training.run import RunState
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, Judgement, Prompt
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run, train, without_clocks

FILTER = ("rollout.filter_groups=true", "rollout.oversample=1.5", "logging.samples_interval=1")


# ---------------------------------------------------------------------------------------------- which groups train


def judgements(*pairs: tuple[float, float | None]) -> list[Judgement]:
    return [Judgement("p", R, c, "missing" if c is None else "ok", boundary=3, length=5) for R, c in pairs]


@pytest.mark.parametrize(
    ("options", "group", "trains"),
    [
        ({"name": "grpo"}, [(1, 0.9), (1, 0.2)], False),
        ({"name": "grpo"}, [(1, 0.9), (0, 0.9)], True),
        ({"name": "dcpo"}, [(1, 0.9), (1, 0.2)], True),  # all right: the confidence learns
        ({"name": "dcpo"}, [(1, 0.9), (1, 0.9)], False),
        ({"name": "dcpo", "weight_confidence": 0.0}, [(1, 0.9), (1, 0.2)], False),
        ({"name": "dcpo", "weight_confidence": 0.0}, [(1, 0.9), (0, 0.9)], True),
        ({"name": "dcpo", "advantage_normalization_confidence": "batch_std"}, [(1, 0.9), (1, 0.89)], True),
        ({"name": "dcpo", "advantage_normalization_confidence": "batch_std"}, [(1, 0.9), (1, 0.9)], False),
        ({"name": "dcpo", "kl_coef": 0.1}, [(0, 0.9), (0, 0.9)], False),
    ],
)
def test_a_group_trains_when_a_block_has_an_advantage(options: Any, group: Any, trains: bool) -> None:
    assert build_objective(ObjectiveConfig(**options)).trains(judgements(*group)) is trains


def test_digits_train_where_no_advantage_does() -> None:
    objective = build_objective(ObjectiveConfig(name="dcpo", preset="dcpo_proper"))
    group, decimals = judgements((1, 0.9), (1, 0.9)), [(DecimalToken(4, 9, 1, 1),), ()]
    assert objective.trains(group, decimals)
    assert not objective.trains(group, [(), ()])


@pytest.mark.parametrize(
    ("options", "bearing"),
    [
        ({"name": "dcpo"}, ([False, False], [True, True])),  # all right: no gradient in the reasoning
        ({"name": "dcpo", "weight_confidence": 0.0}, ([False, False], [False, False])),
        ({"name": "dcpo", "kl_coef_reasoning": 0.1}, ([True, True], [True, True])),
        ({"name": "ccgspg"}, ([True, True], [True, True])),  # another loss: nothing is known of it
    ],
)
def test_which_responses_bear_a_gradient_in_a_block(options: Any, bearing: Any) -> None:
    objective = build_objective(ObjectiveConfig(**options))
    old = [np.zeros(5)] * 2 if objective.method.needs_old_logprobs else None
    scored = objective.score(judgements((1, 0.9), (1, 0.2)), old)
    weights = objective.token_weights(scored, objective.counts(scored))
    for block, expected in zip((BLOCK_REASONING, BLOCK_CONFIDENCE), bearing, strict=True):
        columns = zip(weights, scored.tokens, scored.digits, strict=True)
        assert [objective.bears_gradient(*row, block) for row in columns] == expected


def test_truncated_responses_that_are_masked_train_nothing() -> None:
    group = [Judgement("p", R, None, "truncated", boundary=5, length=5) for R in (0.0, 1.0)]
    assert build_objective(ObjectiveConfig(name="grpo", mask_truncated=False)).trains(group)
    assert not build_objective(ObjectiveConfig(name="grpo", mask_truncated=True)).trains(group)


# ---------------------------------------------------------------------------------------------- which prompts are taken


def filling(monkeypatch: pytest.MonkeyPatch, dull: set[int], *overrides: str) -> tuple[Any, list[list[int]]]:
    """A run over 40 prompts of which the groups of ``dull`` train nothing, and the rounds that are drawn."""
    rounds: list[list[int]] = []

    def sample_groups(_run: Any, groups: Any, wanted: int, step: int, timers: Any) -> list[Any]:
        rounds.append([int(group.prompt.prompt_id.split("@")[0]) for group in groups])
        judged: Any = SimpleNamespace(), SimpleNamespace(correct=1.0)
        return [group.with_responses(dict.fromkeys(range(group.size), judged)) for group in groups]

    monkeypatch.setattr(sampling, "_sample_groups", sample_groups)
    monkeypatch.setattr(sampling, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(sampling, "_trains", lambda run, group: group.position not in dull)
    settings = ["data.prompts_per_step=4", "data.shuffle=false", *overrides]
    config = load_config(QUICKSTART / "dcpo.yaml", settings)
    prompts = [Prompt(str(i), (), (1,), "1", "t") for i in range(40)]
    return SimpleNamespace(
        config=config,
        prompts=prompts,
        progress=RunState(),
        topology=SimpleNamespace(rank=0),
        engine=SimpleNamespace(slot_steps=None),
    ), rounds


def steps(run: Any, *numbers: int) -> list[list[int]]:
    """The prompts of each step's batch."""
    found = []
    for number in numbers:
        ids = [sample.prompt.prompt_id for sample in sampling.sample_step(run, number, None)]  # type: ignore[arg-type]
        found.append([int(name.split("@")[0]) for name in dict.fromkeys(ids)])
    return found


def test_dull_groups_are_replaced_by_the_prompts_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rounds = filling(monkeypatch, {0, 2, 5, 6}, "rollout.filter_groups=true")
    assert steps(run, 1) == [[1, 3, 4, 7]]
    assert rounds == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert run.progress.rollout == {"rollout/prompts_drawn": 8, "rollout/groups_filtered": 4, "rollout/accuracy": 1.0}
    assert steps(run, 2) == [[8, 9, 10, 11]], "the next step goes on behind the last one taken"
    assert run.progress.extra_prompts == 4


def test_what_is_drawn_ahead_and_not_taken_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rounds = filling(monkeypatch, {0}, "rollout.filter_groups=true", "rollout.oversample=1.5")
    assert steps(run, 1, 2) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert rounds == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert run.progress.extra_prompts == 1


def test_there_is_an_end_when_every_group_is_dull(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    run, rounds = filling(monkeypatch, set(range(40)), "rollout.filter_groups=true", "rollout.max_refills=2")
    assert steps(run, 1) == [[0, 1, 2, 3]]
    assert len(rounds) == 3
    assert "0 of 12 groups drawn train the policy (rollout.max_refills=2); 4 others fill up" in caplog.text
    assert run.progress.extra_prompts == 8
    assert steps(run, 2) == [[12, 13, 14, 15]]


def test_without_the_filter_every_group_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rounds = filling(monkeypatch, set(range(40)))
    assert steps(run, 1, 2) == rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (run.progress.extra_prompts, run.progress.rollout) == (0, {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.oversample=2"], "rollout.oversample=2 has no effect without rollout.filter_groups"),
        (["rollout.filter_groups=true", "objective.name=ccgspg"], "does not go with objective.name=ccgspg"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(QUICKSTART / "grpo.yaml", overrides)


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("filtered") / "run"
    train(run_dir, *FILTER, "training.steps=4", method="grpo")
    return run_dir


def test_every_group_of_a_filtered_run_trains(filtered: Path) -> None:
    records = metrics(filtered)
    assert sum(record["rollout/groups_filtered"] for record in records) > 0, "nothing was filtered: choose another seed"
    for record in records:
        assert record["rollout/prompts_drawn"] - record["rollout/groups_filtered"] >= 8
        assert record["rollout/accuracy"] != record["reward/accuracy"]
        assert 0.25 <= record["reward/accuracy"] <= 0.75, "of four responses one to three are right in every group"


def test_a_filtered_run_resumes_bit_for_bit(filtered: Path, tmp_path: Path) -> None:
    """From a checkpoint behind a step that consumed more prompts than it trained on."""
    train(tmp_path / "run", *FILTER, "training.steps=2", method="grpo")
    records = train(tmp_path / "run", *FILTER, "training.steps=4", "--resume", "auto", method="grpo")
    assert without_clocks(records) == without_clocks(metrics(filtered))
    for name in ("samples/step_000004.jsonl", "policy/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (filtered / name).read_bytes(), name


def test_two_engines_decide_alike(filtered: Path, tmp_path: Path) -> None:
    for ours, single in zip(
        train(tmp_path / "run", *FILTER, "training.steps=4", method="grpo", processes=2), metrics(filtered), strict=True
    ):
        for name in ("rollout/prompts_drawn", "rollout/groups_filtered", "rollout/accuracy", "reward/accuracy"):
            assert ours[name] == single[name]
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)


def test_a_run_of_dull_groups_goes_on_with_a_line(tmp_path: Path) -> None:
    """Nearly greedy sampling: the responses of a group are all the same."""
    arguments = ["train", "--config", QUICKSTART / "grpo.yaml", f"run_dir={tmp_path / 'run'}", *FILTER]
    arguments += ["rollout.temperature=0.001", "rollout.max_refills=1", "training.steps=1", "logging.tensorboard=false"]
    done = run(*arguments, "data.prompts_per_step=4", "rollout.group_size=2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("train the policy (rollout.max_refills=1)") == 1
    (record,) = metrics(tmp_path / "run")
    assert record["grad_norm/total"] == 0
