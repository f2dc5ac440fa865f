"""The fastest layouts that fit: in order, and what their options make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import Config, load_config
from megatron_dcpo.planning.fastest import fastest, layouts
from megatron_dcpo.planning.machine import Machine, Rates
from megatron_dcpo.planning.plan import make_plan
from tests.helpers.paths import EXAMPLES, QUICKSTART

CONFIG = EXAMPLES / "qwen3_8b" / "math" / "dcpo.yaml"
MODEL = "model.path=Qwen/Qwen3-8B"


def config(*options: str) -> Config:
    return load_config(CONFIG, [MODEL, *options])


def test_they_fit_are_in_order_and_no_slower_than_what_is_configured() -> None:
    machine = Machine(gpus=8)
    found = fastest(config(), machine, Rates())
    steps = [one.plan.step for one in found]
    assert all(one.plan.fits for one in found)
    assert steps == sorted(steps)
    assert steps[0] <= make_plan(config(), machine, Rates()).step + 0.01


def test_their_options_make_them() -> None:
    """From a slow start, so that several options change."""
    slow = ("parallel.tensor_model_parallel_size=8", "parallel.recompute_granularity=full")
    machine = Machine(gpus=8)
    found = fastest(config(*slow), machine, Rates(), most=3)
    for one in found:
        assert one.options
        again = make_plan(config(*slow, *one.options), machine, Rates())
        assert again.step == pytest.approx(one.plan.step)
        assert again.peak == one.plan.peak


def test_uneven_stages_are_given_up_with_their_number() -> None:
    uneven = config(
        "parallel.pipeline_model_parallel_size=2",
        "parallel.megatron.num_layers_in_first_pipeline_stage=17",
    )
    for other in layouts(uneven):
        kept = "num_layers_in_first_pipeline_stage" in other.parallel.megatron
        assert kept == (other.parallel.pipeline_model_parallel_size == 2)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(CONFIG), MODEL, "--gpus", "8", "--fastest"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["fits"] for one in facts] == [True] * 5
    assert facts[0]["step_seconds"]["total"] <= facts[4]["step_seconds"]["total"]


def test_nothing_that_fits_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--config", str(CONFIG), MODEL, "--gpus", "8", "--gpu-memory-gb", "20"]
    assert main([*words, "--fastest"]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_an_embedded_engine_has_one_size() -> None:
    small = load_config(QUICKSTART / "dcpo.yaml", ["rollout.engine=transformers"])
    found = fastest(small, Machine(gpus=1), Rates())
    assert {one.plan.engine.tensor_model_parallel_size for one in found} == {1}
