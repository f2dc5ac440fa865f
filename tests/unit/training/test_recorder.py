"""Recorder alone: rows, samples, a full disk; it needs no Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import write_samples
from megatron_dcpo.training.recorder import Recorder, Texts
from megatron_dcpo.training.trainer import UpdateStatistics
from megatron_dcpo.types import Judgement, TrainingSample
from tests.helpers.objective_cases import objective, samples_of
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import one_rank, unwatched


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


def recorder(directory: Path, rank: int = 0, **options: Any) -> Recorder:
    overrides = {"training.steps": 4, "logging.to": "[]", "logging.samples_interval": 2, **options}
    settings = [f"{name}={value}" for name, value in overrides.items()]
    config = load_config(QUICKSTART / "dcpo.yaml", [*settings, f"run_dir={directory}"])
    policy: Any = SimpleNamespace(arch=SimpleNamespace(num_experts=0))
    topology: Any = SimpleNamespace(rank=rank, world_size=1)
    saver: Any = SimpleNamespace(give_up=lambda step: None, directory=directory / "checkpoints")
    return Recorder(
        directory=directory,
        config=config,
        policy=policy,
        texts=Texts(lambda ids: " ".join(map(str, ids)), eos_ids=(2,)),
        topology=topology,
        timers=unwatched(),
        saver=saver,
    )


def scored() -> list[TrainingSample]:
    judgements = [Judgement("p", R, c, "ok", boundary=3, length=5) for R, c in ((1, 0.9), (0, 0.4))]
    return objective().score(samples_of(judgements))


def rows(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def record(target: Recorder, *steps: int, **measured: float) -> None:
    samples = scored()
    for step in steps:
        target.timers.add("train", 2.0)
        statistics = UpdateStatistics(losses=[0.25], grad_norms=[1.5], trained=samples)
        target.log(step, samples, statistics, measured)


def test_a_step_is_a_row(tmp_path: Path) -> None:
    target = recorder(tmp_path / "run")
    with target.from_step(1):
        record(target, 1, 2, **{"rollout/utilization": 0.5})
    first, second = rows(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert first["reward/accuracy"] == 0.5
    assert first["loss/policy"] == 0.25
    assert first["rollout/utilization"] == 0.5
    assert first["time/step"] == second["time/step"] == 2.0, "timers are cleared"
    assert [row["step"] for row in rows(tmp_path / "run", "mismatch.jsonl")] == [1, 2]


def test_samples_are_written_at_the_ends_and_in_between(tmp_path: Path) -> None:
    target = recorder(tmp_path / "run", **{"training.steps": 5})
    with target.from_step(1):
        record(target, 1, 2, 3, 4, 5)
    files = sorted((tmp_path / "run" / "samples").iterdir())
    assert [file.name for file in files] == [f"step_{step:06d}.jsonl" for step in (1, 2, 4, 5)]
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [line["correct"] for line in lines] == [1.0, 0.0]


def test_steps_that_are_done_again_are_forgotten(tmp_path: Path) -> None:
    target = recorder(tmp_path / "run")
    with target.from_step(1):
        record(target, 1, 2, 3)
    again = recorder(tmp_path / "run")
    with again.from_step(3):
        assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
        record(again, 3)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_validations_are_read_back(tmp_path: Path) -> None:
    target = recorder(tmp_path / "run")
    name, ece = "evaluation/heldout/accuracy", "evaluation/heldout/ece"
    with target.from_step(1):
        target.log_evaluation(0, {name: 0.25, ece: 0.5})
        record(target, 1, **{name: 0.5, ece: 0.5})
        record(target, 2)
        target.log_evaluation(2, {name: float("nan"), ece: 0.5})
    found = target.logged_validations(done=2)
    assert found[0] == {name: 0.25, ece: 0.5}
    assert found[1] == {name: 0.5, ece: 0.5}
    assert found[2].keys() == {name, ece}
    assert found[2][name] != found[2][name], "null is NaN again"
    assert target.logged_validations(done=1).keys() == {0, 1}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    target = recorder(tmp_path / "run", rank=1)
    with target.from_step(1):
        record(target, 1)
        target.write_validation(1, partial(write_samples, []))
    assert not (tmp_path / "run").exists()


def test_damaged_rows_are_named_and_cost_only_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = recorder(tmp_path / "run")
    with target.from_step(1):
        measured = {"evaluation/held/accuracy": 0.5, "evaluation/held/ece": 0.1}
        record(target, 1, 2, 3, 4, **measured)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"step"', b'"stfp"')
    lines[2] = lines[2].replace(b"length", b"\xfflngth", 1)
    path.write_bytes(b"".join(lines) + b'{"step": 5, "cut')
    again = recorder(tmp_path / "run")
    assert again.logged_validations(done=4).keys() == {1, 4}
    with again.from_step(5):
        record(again, 5)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 4, 5]
    warnings = [text for text in caplog.messages if str(path) in text]
    assert len(warnings) == 1
    assert "line 2, 3;" in warnings[0]


def test_a_full_disk_ends_the_run_and_gives_up_the_checkpoint_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = []
    target = recorder(tmp_path / "run")
    target.saver.give_up = given_up.append  # type: ignore[method-assign, assignment]

    def full(path: Path, row: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with target.from_step(1):
        monkeypatch.setattr(Recorder, "append", staticmethod(full))
        with pytest.raises(UserError, match="No space left"):
            record(target, 1)
    assert given_up == [1]
