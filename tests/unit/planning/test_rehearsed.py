"""What a rehearsal counted takes the place of formulas in a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import Config, load_config
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import as_dict, make_plan
from megatron_dcpo.planning.plan_tables import print_plan
from megatron_dcpo.planning.rehearsed import with_rehearsal
from megatron_dcpo.rehearsal.kept import keep, kept
from tests.helpers.paths import REPOSITORY

GB = 10**9


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return load_config(str(REPOSITORY / "examples/qwen3_8b/math/dcpo.yaml"))


def rank(number: int, training: int, sent: dict[str, int]) -> dict[str, Any]:
    def phase(name: str, live: int, peak: int) -> dict[str, Any]:
        traffic = [
            {"group": group, "operation": "allreduce", "count": 1, "nbytes": nbytes}
            for group, nbytes in sent.items()
        ]
        return {"name": name, "live": live, "peak": peak, "traffic": traffic}

    return {
        "rank": number,
        "stage": 0,
        "batch": {"updates": 2, "micro_batches": 2},
        "tokens": 4096,
        "phases": [
            phase("first update", 30 * GB, 31 * GB),
            phase("update", 30 * GB, training),
            phase("checkpoint", 30 * GB, 33 * GB),
        ],
    }


def test_memory_and_traffic_are_those_of_the_fullest_rank(config: Config) -> None:
    by_formula = make_plan(config, Machine(gpus=8))
    ranks = [
        rank(0, 40 * GB, {"tensor parallel": 4 * GB, "data parallel": GB}),
        rank(1, 38 * GB, {"tensor parallel": 5 * GB, "data parallel": GB, "all ranks": 9 * GB}),
    ]
    plan = with_rehearsal(by_formula, ranks)
    # 10 GB for 4,096 tokens are 20 for the 8,192 that the options allow
    assert plan.training_bytes == 50 * GB
    assert plan.saving_bytes == 33 * GB
    tokens = by_formula.work.tokens / by_formula.data_parallel
    assert plan.traffic.tensor_parallel == int(5 * GB * tokens / (2 * 2 * 4096))
    assert plan.traffic.data_parallel == GB * config.training.updates_per_rollout // 2
    assert plan.traffic.pipeline == 0
    assert plan.seconds.tensor_parallel > 0
    assert plan.seconds.update == by_formula.seconds.update
    assert as_dict(plan)["assumptions"]["rehearsed"]
    print_plan(plan)


def test_a_rehearsal_is_kept_for_the_same_job_alone(config: Config) -> None:
    ranks = [rank(0, 40 * GB, {})]
    assert kept(config, 8) is None
    keep(config, 8, ranks)
    elsewhere = dataclasses.replace(config, run_dir="another")
    assert kept(elsewhere, 8) == ranks
    assert kept(config, 16) is None
    assert kept(dataclasses.replace(config, seed=2), 8) is None


def test_a_cache_that_cannot_be_written_stops_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep(config, 8, [])
    assert kept(config, 8) is None


@pytest.mark.parametrize("damage", [b"{}", b"[]", b"", b"\xff\xfe", b'digest\n[{"rank": 0}]'])
def test_a_damaged_file_is_none(config: Config, tmp_path: Path, damage: bytes) -> None:
    keep(config, 8, [rank(0, 40 * GB, {})])
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_bytes()
    for content in (damage, whole[:-10]):
        file.write_bytes(content)
        assert kept(config, 8) is None
    keep(config, 8, [rank(0, 40 * GB, {})])
    assert file.read_bytes() == whole


def test_a_user_without_a_home_keeps_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    keep(config, 8, [])
    assert kept(config, 8) is None
