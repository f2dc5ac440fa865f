"""Faults that only a GPU shows, planted in a small job: a rehearsal stops at them, or its numbers
show them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from megatron_dcpo.rehearsal.ranks import RehearsalError, check_same_collectives
from tests.helpers.paths import REPOSITORY

pytestmark = pytest.mark.slow
FP32, BF16 = 4, 2
VOCABULARY, HIDDEN = 8000, 512
COLUMNS = 4096  # of a rank, padding included
TOKENS = 2 * 936  # of a micro-batch, scored


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("rehearsals")
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.rehearsals", str(directory)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return result


def phase(rehearsal: dict[str, Any], name: str = "update") -> dict[str, Any]:
    return next(phase for phase in rehearsal["phases"] if phase["name"] == name)


def test_the_job_without_a_fault_runs_through(found: dict[str, Any]) -> None:
    names = [phase["name"] for phase in found["none"]["phases"]]
    assert names[0] == "model"
    assert names[-1] == "export"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("tensor_left_on_the_host", "FakeTensorDeviceMismatchError"),
        ("missing_to", "FakeTensorDeviceMismatchError"),
        ("product_of_two_types", "RuntimeError"),
        ("wrong_split", "RuntimeError"),
        ("rows_of_the_whole_sequence", "IndexError"),
        ("another_shape_in_the_engine", "RuntimeError: model.norm.weight"),
    ],
)
def test_it_stops_at_the_operation(found: dict[str, Any], fault: str, error: str) -> None:
    assert found[fault].get("stopped", "").startswith(error), found[fault]


def test_logits_that_are_kept_are_in_its_peak(found: dict[str, Any]) -> None:
    more = phase(found["all_logits"])["peak"] - phase(found["none"])["peak"]
    assert more >= TOKENS * COLUMNS * FP32


def test_an_optimizer_state_made_twice_is_in_its_memory(found: dict[str, Any]) -> None:
    once = phase(found["none"], "optimizer")
    twice = phase(found["in_different_numbers"], "optimizer")
    main_parameters = once["live"] - phase(found["none"], "model")["live"]
    assert twice["live"] - once["live"] == pytest.approx(main_parameters, rel=0.01)


def test_a_collective_on_the_wrong_group_is_seen(found: dict[str, Any]) -> None:
    def reductions(rehearsal: dict[str, Any]) -> Counter[str]:
        sent = phase(rehearsal)["traffic"]
        return Counter(
            {one["group"]: one["count"] for one in sent if one["operation"] == "allreduce"}
        )

    right, wrong = reductions(found["none"]), reductions(found["in_different_numbers"])
    assert wrong["data parallel"] > right["data parallel"]
    assert wrong["tensor parallel"] < right["tensor parallel"]


def test_a_wait_in_the_loop_is_counted_with_its_micro_batches(found: dict[str, Any]) -> None:
    def waits(rehearsal: dict[str, Any]) -> int:
        return sum(phase(rehearsal)["waits"].values())

    batch = found["none"]["batch"]
    micro_batches = batch["micro_batches"] * batch["updates"]
    assert waits(found["in_different_numbers"]) - waits(found["none"]) == micro_batches


def test_a_save_that_gathers_everything_is_in_the_hosts_memory(found: dict[str, Any]) -> None:
    more = (
        phase(found["in_different_numbers"], "checkpoint")["host"]
        - phase(found["none"], "checkpoint")["host"]
    )
    assert more >= 2 * VOCABULARY * HIDDEN * BF16  # embedding and output layer alone


def test_ranks_that_reduce_different_rows_are_named(found: dict[str, Any]) -> None:
    rank, other = found["chunks_by_the_tokens_of_a_rank"], found["last tensor-parallel rank"]
    with pytest.raises(RehearsalError, match="output_layer"):
        check_same_collectives(rank, other)


@pytest.mark.parametrize(
    "layout", ["first stage", "last stage", "context parallel, padded", "full recomputation"]
)
def test_layouts_run_through(found: dict[str, Any], layout: str) -> None:
    assert "stopped" not in found[layout], found[layout]


def test_a_wider_teacher_runs_through_the_stages(found: dict[str, Any]) -> None:
    """Its pass computes more than the policy's."""
    for rank, plain in ((0, "first stage"), (2, "last stage")):
        taught = found[f"taught, rank {rank}"]
        assert "stopped" not in taught, taught
        assert phase(taught)["flops"] > 1.3 * phase(found[plain])["flops"]


def test_recomputation_holds_less(found: dict[str, Any]) -> None:
    assert phase(found["full recomputation"])["peak"] < phase(found["none"])["peak"]


def test_where_the_largest_tensors_were_made_is_named(found: dict[str, Any]) -> None:
    largest = phase(found["none"])["largest"]
    assert all(".py:" in made["line"] for made in largest)
