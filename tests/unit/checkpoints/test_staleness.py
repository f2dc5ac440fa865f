"""A save that would write an earlier checkpoint under a new name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcpo.checkpoints import saver as module
from megatron_dcpo.checkpoints.manifest import (
    MANIFEST,
    checksums_in,
    iteration_dir,
    iterations,
    latest_iteration,
)
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.checkpoints.staleness import (
    changed,
    changed_throughout,
    checksum,
    group_of,
    marks,
)
from megatron_dcpo.errors import UserError
from tests.helpers.samplers import one_rank
from tests.helpers.saving import unrefreshed
from tests.unit.checkpoints.test_saver import saver_in

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip

MOMENT = "optimizer.state.exp_avg.weight"


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


class Training:
    """A weight and its moment, which a step changes, and a weight that is frozen."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3, 5)
        self.moment = torch.zeros(3, 5)
        self.frozen = torch.ones(7)

    def step(self) -> None:
        self.weight += 1.0
        self.moment += 0.5

    def marks(self) -> dict[str, tuple[int, ...]]:
        return dict(marks({"weights": [self.weight], "exp_avg": [self.moment]}))

    def state(self, iteration: int, **instead: torch.Tensor) -> dict[str, Any]:
        tensors = {
            "weight": self.weight,
            "frozen": self.frozen,
            MOMENT: self.moment,
            **instead,
        }
        sharded = {
            name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=0)
            for name, tensor in tensors.items()
        }
        return {"model": sharded, "run": {"iteration": iteration}}

    def save(self, saver: Saver, iteration: int, **instead: torch.Tensor) -> None:
        saver.begin(iteration, self.state(iteration, **instead), self.marks())
        saver.wait()


@pytest.mark.parametrize("background", [False, True])
def test_the_manifest_has_a_checksum_of_each_group(tmp_path: Path, background: bool) -> None:
    training, saver = Training(), saver_in(tmp_path, background)
    for iteration in (1, 2):
        training.step()
        training.save(saver, iteration)
    before, now = (checksums_in(iteration_dir(tmp_path, number)) for number in (1, 2))
    assert set(now) >= {"weights", "exp_avg", "run"}
    assert all(before[group] != now[group] for group in ("weights", "exp_avg", "run"))
    assert now["exp_avg"] == checksum(training.moment)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("name", "group"), [("weight", "weights"), (MOMENT, "exp_avg")])
def test_a_state_that_is_an_earlier_one_is_an_error(
    tmp_path: Path, background: bool, name: str, group: str
) -> None:
    training, saver = Training(), saver_in(tmp_path, background)
    training.step()
    kept = (training.weight if group == "weights" else training.moment).clone()
    training.save(saver, 3)
    training.step()
    with pytest.raises(UserError) as caught:
        training.save(saver, 8, **{name: kept})
    assert group in str(caught.value)
    assert "4 to 8" in str(caught.value)
    assert ("weights" in str(caught.value)) == (group == "weights")
    assert latest_iteration(tmp_path) == 3
    assert iterations(tmp_path) == [3]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_writer_that_keeps_its_first_copies_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies on the host are kept for the next save, which has to refresh them."""
    monkeypatch.setattr(module, "_refreshed", unrefreshed)
    training, saver = Training(), saver_in(tmp_path, background=True)
    training.step()
    training.save(saver, 1)
    training.step()
    with pytest.raises(UserError, match="exp_avg"):
        training.save(saver, 2)
    assert iterations(tmp_path) == [1]


def test_it_is_seen_after_a_resumption_too(tmp_path: Path) -> None:
    training = Training()
    training.step()
    training.save(saver_in(tmp_path), 1)
    kept = training.weight.clone()
    saver = saver_in(tmp_path)
    saver.continue_after(1, training.marks())
    training.step()
    with pytest.raises(UserError, match="weights"):
        training.save(saver, 2, weight=kept)


def test_steps_that_change_nothing_are_no_error(tmp_path: Path) -> None:
    """All gradients were zero, or not finite."""
    training, saver = Training(), saver_in(tmp_path)
    for iteration in (1, 2):
        training.save(saver, iteration)
    assert iterations(tmp_path) == [1, 2]


def test_a_checkpoint_from_before_there_were_checksums_is_continued(tmp_path: Path) -> None:
    training = Training()
    training.save(saver_in(tmp_path), 1)
    path = iteration_dir(tmp_path, 1) / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["groups"]
    path.write_text(json.dumps(manifest))
    saver = saver_in(tmp_path)
    saver.continue_after(1, training.marks())
    training.step()
    training.save(saver, 2)
    assert iterations(tmp_path) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_checksum_is_that_of_the_values(dtype: torch.dtype, start: int) -> None:
    storage = torch.arange(64).to(dtype)
    part = storage[start : start + 21]
    assert checksum(part) == checksum(part.clone())
    for index in range(21):
        other = part.clone()
        other[index] += 1
        assert checksum(other) != checksum(part)


def test_groups_are_named_as_the_optimizers_name_them() -> None:
    assert group_of("decoder.layers.0.weight") == "weights"
    assert group_of("optimizer.state.exp_avg_sq.decoder.weight") == "exp_avg_sq"
    assert group_of("adapter.exp_avg.layers.0.A") == "adapter.exp_avg"


def test_a_group_has_changed_when_one_of_its_tensors_has() -> None:
    tensors = [torch.zeros(3), torch.ones(2000)]
    before = marks({"exp_avg": tensors})
    assert changed(before, before) == set()
    tensors[0][2] = 1.0
    now = marks({"exp_avg": tensors})
    assert changed(before, now) == {"exp_avg"}
    assert changed_throughout(before, now) == set()
    tensors[1][5] = 0.0
    assert changed_throughout(before, marks({"exp_avg": tensors})) == {"exp_avg"}
