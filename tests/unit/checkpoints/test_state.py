"""Which checkpoint a run resumes from, and the random generators that it restores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dcpo.checkpoints.manifest import LATEST, iteration_dir
from megatron_dcpo.checkpoints.state import _restore_rng_states, gather_rng_states, newest_intact
from megatron_dcpo.errors import UserError
from tests.helpers.samplers import one_rank
from tests.unit.checkpoints.test_saver import saver_in, state_of

TOPOLOGY: Any = SimpleNamespace(rank=0, world_size=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with intact checkpoints after the steps 1, 2 and 3."""
    saver = saver_in(tmp_path, keep=3)
    for iteration in (1, 2, 3):
        saver.begin(iteration, state_of(torch.full((4,), float(iteration))))
        saver.wait()
    return tmp_path


def damage_one_file(directory: Path, iteration: int) -> str:
    """Change a byte of a checkpoint's data, as a bad disk does; return the file's name."""
    path = min(iteration_dir(directory, iteration).glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path.name


def test_the_announced_checkpoint_is_taken(saved: Path) -> None:
    assert newest_intact(saved, TOPOLOGY) == (3, {})


def test_nothing_announced_is_nothing_to_resume(tmp_path: Path) -> None:
    assert newest_intact(tmp_path, TOPOLOGY) == (None, {})


def test_a_damaged_checkpoint_is_passed_over_and_named(saved: Path) -> None:
    name = damage_one_file(saved, 3)
    iteration, problems = newest_intact(saved, TOPOLOGY)
    assert iteration == 2
    assert list(problems) == [3]
    assert name in problems[3]


def test_what_is_newer_than_the_announced_one_is_not_taken(saved: Path) -> None:
    """It was renamed, and the run was killed before it said so."""
    (saved / LATEST).write_text("2")
    assert newest_intact(saved, TOPOLOGY) == (2, {})


def test_an_announced_checkpoint_that_is_gone_is_said(saved: Path) -> None:
    (saved / LATEST).write_text("9")
    iteration, problems = newest_intact(saved, TOPOLOGY)
    assert iteration == 3
    assert list(problems) == [9]


def test_no_intact_checkpoint_is_an_error_and_no_new_beginning(saved: Path) -> None:
    names = [damage_one_file(saved, iteration) for iteration in (1, 2, 3)]
    with pytest.raises(UserError) as caught:
        newest_intact(saved, TOPOLOGY)
    assert all(name in str(caught.value) for name in names)


def test_generators_go_on_where_they_were_saved() -> None:
    """Python's, NumPy's and torch's: the next numbers are the same after the restoration."""

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = gather_rng_states(TOPOLOGY)
    expected = draw()
    draw()
    _restore_rng_states(TOPOLOGY, states)
    assert draw() == expected


def test_generators_of_another_layout_are_left_alone() -> None:
    states = gather_rng_states(TOPOLOGY)
    other = SimpleNamespace(**{**vars(TOPOLOGY), "tp_size": 2})
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    _restore_rng_states(other, states)
    assert torch.equal(torch.get_rng_state(), expected)
