"""Saver alone: what the directory holds after a save that is whole, failed or given up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcpo.checkpoints import saver as module
from megatron_dcpo.checkpoints.manifest import damage, iteration_dir, iterations, latest_iteration
from megatron_dcpo.checkpoints.manifest import listed_files as files_of
from megatron_dcpo.checkpoints.saver import Saver, last_complete, read_best, remove_leftovers
from megatron_dcpo.errors import UserError
from tests.helpers.samplers import one_rank

from megatron.core.dist_checkpointing import ShardedTensor, load_plain_tensors  # isort: skip


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


def state_of(tensor: torch.Tensor, iteration: int = 0) -> dict[str, Any]:
    """A state of one tensor, and one value that every rank has alike."""
    sharded = ShardedTensor.from_rank_offsets("weight", tensor, replica_id=0)
    return {"model": {"weight": sharded}, "run": {"iteration": iteration}}


def saver_in(directory: Path, background: bool = False, keep: int = 2) -> Saver:
    return Saver(directory=directory, rank=0, keep=keep, background=background)


def saved_weight(directory: Path, iteration: int) -> torch.Tensor:
    """Return the tensor of a checkpoint as Megatron reads it."""
    weight: torch.Tensor = load_plain_tensors(str(iteration_dir(directory, iteration)))["weight"]
    return weight


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_announced_when_it_is_whole(tmp_path: Path, background: bool) -> None:
    saver = saver_in(tmp_path, background)
    weight = torch.arange(6.0).view(2, 3)
    saver.begin(3, state_of(weight))
    saver.wait()
    assert latest_iteration(tmp_path) == 3
    torch.testing.assert_close(saved_weight(tmp_path, 3), torch.arange(6.0).view(2, 3))
    path = iteration_dir(tmp_path, 3)
    assert damage(path, list(files_of(path, 3).items())) is None
    assert not list(tmp_path.glob("*.tmp"))


def test_two_ranks_that_write_one_file_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared disk the later one would overwrite the other's part."""
    monkeypatch.setattr(module, "all_gather_objects", lambda part: [part, part])
    saver = saver_in(tmp_path)
    saver.begin(1, state_of(torch.ones(4)))
    with pytest.raises(UserError, match=r"common\.pt|__0_0\.distcp"):
        saver.wait()
    assert iterations(tmp_path) == []


def test_what_changes_after_begin_is_not_saved(tmp_path: Path) -> None:
    """The state is copied before :meth:`Saver.begin` returns, in the first save and in those that
    reuse its plan.
    """
    saver = saver_in(tmp_path, background=True)
    weight = torch.zeros(2, 3)
    for iteration in (1, 2, 3):
        weight.fill_(iteration)
        saver.begin(iteration, state_of(weight, iteration))
        weight.fill_(-1.0)
        saver.wait()
        torch.testing.assert_close(
            saved_weight(tmp_path, iteration), torch.full((2, 3), float(iteration))
        )


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    for iteration in range(1, 6):
        if iteration == 2:
            saver.best = {"iteration": 2, "metric": "accuracy", "value": 0.5}
        saver.begin(iteration, state_of(torch.ones(1), iteration))
        saver.wait()
    assert iterations(tmp_path) == [2, 4, 5]
    best = read_best(tmp_path)
    assert best is not None
    assert best["iteration"] == 2
    assert json.loads((tmp_path / module.BEST).read_text())["value"] == 0.5


def test_damaged_checkpoints_do_not_count_among_those_to_keep(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    for iteration in (1, 2):
        saver.begin(iteration, state_of(torch.ones(1)))
        saver.wait()
    saver.damaged.add(2)
    saver.begin(3, state_of(torch.ones(1)))
    saver.wait()
    assert 1 in iterations(tmp_path), "the intact one before the damaged one"


def test_a_step_that_is_repeated_replaces_its_checkpoint(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    for value in (1.0, 2.0):
        saver.begin(7, state_of(torch.full((3,), value)))
        saver.wait()
    torch.testing.assert_close(saved_weight(tmp_path, 7), torch.full((3,), 2.0))
    assert iterations(tmp_path) == [7]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_cannot_be_written_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    saver = saver_in(tmp_path, background)
    saver.begin(1, state_of(torch.ones(4)))
    saver.wait()

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_manifest", full)
    saver.begin(2, state_of(torch.ones(4)))
    with pytest.raises(UserError, match="run_dir"):
        saver.wait()
    assert latest_iteration(tmp_path) == 1
    assert iterations(tmp_path) == [1]
    monkeypatch.undo()
    saver.begin(2, state_of(torch.ones(4)))
    saver.wait()
    assert latest_iteration(tmp_path) == 2


def test_a_checkpoint_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """Unless it belongs to an earlier step, which is completed."""
    saver = saver_in(tmp_path, background=True)
    saver.begin(1, state_of(torch.ones(4)))
    saver.give_up(2)
    assert latest_iteration(tmp_path) == 1
    saver.begin(2, state_of(torch.ones(4)))
    saver.give_up(2)
    assert latest_iteration(tmp_path) == 1
    assert iterations(tmp_path) == [1]
    assert not list(tmp_path.glob("*.tmp"))


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    saver.begin(1, state_of(torch.ones(1)))
    saver.wait()
    torn = iteration_dir(tmp_path, 2)
    torn = torn.with_name(torn.name + ".tmp")
    torn.mkdir()
    (torn / "half").write_bytes(b"x")
    remove_leftovers(tmp_path)
    assert not torn.exists()
    assert iterations(tmp_path) == [1]
    assert "1" in last_complete(tmp_path)
