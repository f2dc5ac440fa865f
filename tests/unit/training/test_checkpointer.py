"""Checkpointer alone: named parts in, the same parts out; a model that is a dictionary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.checkpoints.staleness import Marks
from megatron_dcpo.config import TrainingConfig
from megatron_dcpo.errors import Stopped, UserError
from megatron_dcpo.runtime import signals
from megatron_dcpo.training import checkpointer as module
from megatron_dcpo.training.checkpointer import Checkpointer, Identity
from tests.helpers.samplers import one_rank

IDENTITY = Identity(seed=1, data={"prompts_per_step": 8, "shuffle": True}, fingerprint="abc")


class Folder:
    """A saver whose checkpoints are JSON files; it notes what it is told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkpoints"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.damaged: set[int] = set()
        self.best: dict[str, Any] | None = None
        self.calls: list[str] = []

    def begin(self, step: int, state: dict[str, Any], marks: Marks) -> None:
        (self.directory / f"{step}.json").write_text(json.dumps(state))
        self.calls.append(f"begin {step}")

    def continue_after(self, step: int, marks: Marks) -> None:
        self.calls.append(f"continue after {step}")

    def wait(self) -> None:
        self.calls.append("wait")

    def finish(self) -> None:
        self.calls.append("finish")

    def steps(self) -> list[int]:
        return sorted(int(file.stem) for file in self.directory.glob("*.json"))


class Dictionary:
    """A model without tensors."""

    def state(self, step: int, run: dict[str, Any]) -> dict[str, Any]:
        return {"iteration": step, **run}

    def marks(self) -> Marks:
        return {}

    def load(self, directory: Path, step: int) -> dict[str, Any]:
        return dict(json.loads((directory / f"{step}.json").read_text()))


class Counter:
    """A part that remembers a number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.loaded_after: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        self.number = int(saved["number"])
        self.loaded_after = step


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank; checkpoints are the files of :class:`Folder`."""

    def steps(directory: Path) -> list[int]:
        return sorted(int(file.stem) for file in directory.glob("*.json"))

    monkeypatch.setattr(module, "iterations", steps)
    monkeypatch.setattr(module, "latest_iteration", lambda path: max(steps(path), default=None))
    monkeypatch.setattr(
        module, "newest_intact", lambda path, topology: (max(steps(path), default=None), {})
    )
    monkeypatch.setattr(module, "remove_leftovers", lambda path: None)
    with one_rank():
        yield


def checkpointer(directory: Path, parts: dict[str, Any], **options: Any) -> Checkpointer:
    entered = options.pop("entered", [])

    @contextmanager
    def on_device() -> Iterator[None]:
        entered.append(True)
        yield

    saver: Any = Folder(directory)
    topology: Any = SimpleNamespace(rank=0)
    identity = options.pop("identity", IDENTITY)
    return Checkpointer(
        saver=saver,
        model=Dictionary(),
        parts=parts,
        identity=identity,
        on_device=on_device,
        topology=topology,
        training=TrainingConfig(**{"steps": 5, "save_interval": 2, **options}),
    )


def test_it_saves_on_schedule_and_after_the_last_step(tmp_path: Path) -> None:
    entered: list[bool] = []
    part = Counter()
    saves = checkpointer(tmp_path, {"a": part}, entered=entered)
    for step in range(1, 6):
        part.number = 10 * step
        saves.save(step)
        saves.announce(step)
    assert saves.saver.calls == [  # type: ignore[attr-defined]
        *("finish", "begin 2", "finish", "finish", "begin 4", "finish", "begin 5", "wait")
    ]
    assert len(entered) == 3, "the state is on the device when it is written"
    saves.save_now(5)
    assert len(entered) == 3, "the last step is saved already"


def test_parts_come_back_by_name(tmp_path: Path) -> None:
    saves = checkpointer(tmp_path, {"a": Counter(3), "b": Counter(7)})
    saves.save(2)
    a, b = Counter(), Counter()
    resumed = checkpointer(tmp_path, {"b": b, "a": a}, resume="auto")
    assert resumed.resume() == 2
    assert (a.number, b.number, a.loaded_after) == (3, 7, 2)
    assert resumed.saved_step == 2
    assert resumed.intact_steps() == [2]


def test_a_fresh_run_has_done_nothing(tmp_path: Path) -> None:
    assert checkpointer(tmp_path, {}, resume="auto").resume() == 0


def test_a_run_that_has_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    checkpointer(tmp_path, {}).save(2)
    with pytest.raises(UserError, match="--resume"):
        checkpointer(tmp_path, {}).resume()


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"seed": 2}, "seed"),
        ({"data": {"prompts_per_step": 4, "shuffle": True}}, "data.prompts_per_step"),
        ({"data": {"prompts_per_step": 8, "shuffle": False}}, "data.shuffle"),
        ({"fingerprint": "other"}, "data.path"),
    ],
)
def test_another_run_is_refused_by_the_option(
    tmp_path: Path, changed: dict[str, Any], option: str
) -> None:
    checkpointer(tmp_path, {"a": Counter()}).save(2)
    identity = dataclasses.replace(IDENTITY, **changed)
    other = checkpointer(tmp_path, {"a": Counter()}, resume="auto", identity=identity)
    with pytest.raises(UserError, match=option):
        other.resume()


def test_odd_values_name_the_checkpoint(tmp_path: Path) -> None:
    saves = checkpointer(tmp_path, {"a": Counter()})
    saves.save(2)
    file = saves.saver.directory / "2.json"
    state = json.loads(file.read_text())
    state["parts"]["a"]["number"] = "many"
    file.write_text(json.dumps(state))
    with pytest.raises(UserError, match="checkpoints"):
        checkpointer(tmp_path, {"a": Counter()}, resume="auto").resume()


def test_a_signal_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpointer(tmp_path, {"a": Counter()})
    saves.stop_if_asked(done=1)  # nobody has asked
    monkeypatch.setattr(signals, "stop_requested", lambda: 10)
    monkeypatch.setattr(signals, "ignore_signals", lambda: None)
    with pytest.raises(Stopped):
        saves.stop_if_asked(done=3)
    assert saves.saver.calls == ["begin 3", "wait"]  # type: ignore[attr-defined]
    saves.stop_if_asked(done=5)  # all steps are done: the run goes on to its end


def test_a_failure_completes_the_checkpoint_on_its_way(tmp_path: Path) -> None:
    saves = checkpointer(tmp_path, {})
    with pytest.raises(UserError), saves.completing():
        raise UserError("no finite loss")
    assert saves.saver.calls == ["wait"]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="--resume auto"):
        saves.save_and_end(UserError("a verifier failed"), done=3)
    assert saves.saver.steps() == [3]  # type: ignore[attr-defined]


def test_an_older_checkpoint_is_taken_with_the_number_of_steps_that_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saves = checkpointer(tmp_path, {})
    for step in (2, 4):
        saves.save(step)
    damaged = {4: "__0_0.distcp has changed"}
    monkeypatch.setattr(module, "newest_intact", lambda path, topology: (2, damaged))
    resumed = checkpointer(tmp_path, {}, resume="auto")
    assert resumed.resume() == 2
    assert resumed.intact_steps() == [2]
    assert any("2 step(s) after step 2" in record.message for record in caplog.records)
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path, {}, resume="strict").resume()
    assert "__0_0.distcp" in str(caught.value)
    assert "2 step(s) after step 2" in str(caught.value)


def test_strict_continues_after_the_newest_and_begins_a_fresh_run(tmp_path: Path) -> None:
    assert checkpointer(tmp_path, {}, resume="strict").resume() == 0
    checkpointer(tmp_path, {}).save(2)
    assert checkpointer(tmp_path, {}, resume="strict").resume() == 2


def test_an_error_of_the_save_does_not_hide_that_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = checkpointer(tmp_path, {})

    def full() -> None:
        raise UserError("cannot write checkpoint 2")

    saves.saver.wait = full  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no finite loss"), saves.completing():
        raise UserError("no finite loss")
    assert any("checkpoint 2" in record.message for record in caplog.records)
    with pytest.raises(UserError, match="a verifier failed") as caught:
        saves.save_and_end(UserError("a verifier failed"), done=3)
    assert "checkpoint 2" in str(caught.value)
