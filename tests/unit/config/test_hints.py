"""Names of other systems lead to ours; what users type is understood, and blamed where it
is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.cli import as_options
from megatron_dcpo.config import load_config
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.config.hints import ELSEWHERE
from megatron_dcpo.errors import UserError

BASE = "run_dir: r\nmodel: {path: m}\ndata: {path: d}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_every_hint_is_an_option(file: Path, place: str) -> None:
    """An odd value is refused for what it is, not because the name is unknown."""
    said = ""
    try:
        load_config(file, [f"{place}=[odd]"])
    except UserError as error:
        said = str(error)
    assert "unknown key" not in said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("rollout.num_generations=8", "rollout.group_size"),
        ("num_generations=8", "rollout.group_size"),
        ("objective.gamma=0.1", "valid keys"),
        ("beta=0.1", "objective.kl_coef"),
        ("data.train_batch_size=8", "data.prompts_per_step"),
        ("optimizer.weight_dekay=0", "optimizer.weight_decay"),
    ],
)
def test_names_of_other_systems(file: Path, override: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(file, [override])
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("rollout.temperature", "did you mean evaluation.temperature"),
        ("evaluation.temprature", "did you mean evaluation.temperature"),
        ("learning_rate", "valid keys"),  # dcpo evaluate has none
    ],
)
def test_an_evaluation_is_pointed_to_its_own_options(option: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_evaluation({"run_dir": "out", option: 1})
    assert expected in str(error.value)


def test_an_override_is_blamed_and_not_the_file(file: Path) -> None:
    with pytest.raises(UserError, match=r"^optimizer.lr=fast: optimizer.lr: "):
        load_config(file, ["seed=2", "optimizer.lr=fast"])
    with pytest.raises(UserError, match=r"^actor.clip=1: unknown key actor; "):
        load_config(file, ["seed=2", "actor.clip=1"])
    file.write_text(BASE + "optimizer: {lr: fast}\n")
    with pytest.raises(UserError, match=r"c.yaml: optimizer.lr: "):
        load_config(file, ["seed=2"])


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("train x.yaml", "train --config x.yaml"),
        ("train --config x.yaml y=z.yaml", "train --config x.yaml y=z.yaml"),
        ("train x.yaml --resume", "train --config x.yaml --resume auto"),
        ("train --resume --config x.yaml a.b=1", "train --resume auto --config x.yaml a.b=1"),
        ("train --resume none --config x.yaml", "train --resume none --config x.yaml"),
        (
            "train x.yaml --rollout.group_size 4 --seed",
            "train --config x.yaml rollout.group_size=4 --seed",
        ),
        ("plan x.yaml --rollout.group_size=4", "plan --config x.yaml rollout.group_size=4"),
        ("judge x.yaml --a.b 4", "judge x.yaml --a.b 4"),
        ("evaluate --as-trained x.yaml --a.b 4", "evaluate --as-trained x.yaml a.b=4"),
    ],
)
def test_what_users_type(typed: str, understood: str) -> None:
    assert as_options(typed.split()) == understood.split()
