"""The shipped recipes of 8B to 70B models, rehearsed with a few of their layers on twice as many
GPUs as their layout needs. All in the full suite, one in every one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main as dcpo
from megatron_dcpo.config import load_config
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import directory_of, make_plan
from megatron_dcpo.planning.rehearsed import with_rehearsal
from megatron_dcpo.rehearsal.ranks import least_gpus
from tests.helpers.paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
IN_EVERY_SUITE = ("qwen3_8b/math/dcpo.yaml",)
RECIPES = sorted(
    str(file.relative_to(EXAMPLES))
    for model in (
        "qwen3_8b",
        "qwen3_14b",
        "qwen3_32b",
        "qwen3_30b_a3b",
        "llama3.1_8b",
        "llama3.1_70b",
    )
    for file in (EXAMPLES / model).glob("*/*.yaml")
    if file.parent.name in ("math", "code")
)


def shallow(recipe: str, directory: Path) -> Path:
    """Write the configuration of the recipe's model with as few layers as show every stage."""
    config = load_config(str(EXAMPLES / recipe))
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    model: dict[str, Any] = json.loads(
        (directory_of(config.model.path) / "config.json").read_text()
    )
    layers = max(2, stages)
    (directory / "config.json").write_text(
        json.dumps({**model, "num_hidden_layers": layers, "max_window_layers": layers})
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[] if recipe in IN_EVERY_SUITE else [pytest.mark.full])
        for recipe in RECIPES
    ],
)
def test_a_recipe_runs_through(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    overrides = [f"model.path={shallow(recipe, tmp_path)}"]
    config = load_config(str(EXAMPLES / recipe), overrides)
    gpus = 2 * least_gpus(config.parallel)
    words = [
        "plan",
        "--config",
        str(EXAMPLES / recipe),
        "--rehearse",
        "--gpus",
        str(gpus),
        "--json",
    ]
    assert dcpo([*words, *overrides]) == 0
    ranks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    stages = {rank["stage"] for rank in ranks}
    assert stages == set(range(config.parallel.pipeline_model_parallel_size))
    for rank in ranks:
        assert rank["phases"][-1]["name"] == "export"
    update = next(phase for phase in ranks[-1]["phases"] if phase["name"] == "update")
    assert update["peak"] > update["live"] > 0
    assert update["flops"] > 0
    groups = {sent["group"] for sent in update["traffic"]}
    assert "data parallel" in groups
    assert ("tensor parallel" in groups) == (config.parallel.tensor_model_parallel_size > 1)
    waits = " ".join(update["waits"])
    assert "policy/schedule.py" in waits
    assert "policy/layers.py" not in waits  # which are not the local ones
    by_formula = make_plan(config, Machine(gpus=gpus))
    counted = with_rehearsal(by_formula, ranks)
    # of few layers: the formulas have embedding and output layer in the stage with most to do
    assert_close(counted.training_bytes, by_formula.training_bytes)
    for name, nbytes in dataclasses.asdict(counted.traffic).items():
        expected = getattr(by_formula.traffic, name)
        if name == "data_parallel" and by_formula.arch.num_experts:
            expected = expected * 4 // 3  # with two buffers Megatron gathers the parameters twice
        assert_close(nbytes, expected)


def assert_close(counted: int, by_formula: int) -> None:
    assert 0.8 * by_formula <= counted <= 1.05 * by_formula


def test_what_every_suite_rehearses_is_shipped() -> None:
    assert set(IN_EVERY_SUITE) <= set(RECIPES)
