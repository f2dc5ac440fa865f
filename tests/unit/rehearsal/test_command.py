"""``dcpo plan --rehearse`` and ``dcpo train --dry-run --rehearse``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.rehearsal.ranks import RehearsalError, check_same_collectives, least_gpus
from tests.distributed.cases.common import parallel_config
from tests.helpers.paths import REPOSITORY
from tests.helpers.rehearsals import SHAPE

RECIPE = REPOSITORY / "examples/qwen3_8b/math/dcpo.yaml"


def plan(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "config.json").write_text(json.dumps(SHAPE))
    command = [sys.executable, "-m", "megatron_dcpo", "plan", "--config", str(RECIPE)]
    small = [
        f"model.path={directory}",
        "data.prompts_per_step=32",
        "data.max_prompt_length=32",
        "rollout.max_response_length=96",
        "training.max_tokens_per_micro_batch=256",
        "parallel.tensor_model_parallel_size=2",
    ]
    return subprocess.run(
        [*command, "--rehearse", *arguments, *small],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_recipe_is_rehearsed_with_the_layers_of_a_gpu(tmp_path: Path) -> None:
    done = plan(tmp_path, "--gpus", "8", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    update = next(phase for phase in ranks[0]["phases"] if phase["name"] == "update")
    assert update["peak"] > update["live"] > 0
    assert update["flops"] > 0
    groups = {sent["group"] for sent in update["traffic"]}
    assert {"tensor parallel", "data parallel"} <= groups
    waits = " ".join(update["waits"])
    assert "policy/schedule.py" in waits
    assert "policy/layers.py" not in waits  # which are not the local ones


@pytest.mark.slow
def test_a_job_that_does_not_fit_together_ends_with_the_reason(tmp_path: Path) -> None:
    done = plan(tmp_path, "--gpus", "7")
    assert done.returncode == 2
    assert "7" in done.stderr


def test_an_estimate_and_a_rehearsal_do_not_go_together(tmp_path: Path) -> None:
    done = plan(tmp_path, "--gpus", "8", "--mfu", "0.3")
    assert done.returncode == 2
    assert "--rehearse" in done.stderr


def test_the_smallest_job_of_a_layout() -> None:
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    assert least_gpus(parallel_config(sizes)) == 8
    experts = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}
    assert least_gpus(parallel_config({**experts, "expert_tensor_parallel_size": 1})) == 8


def test_ranks_that_call_different_collectives_are_named() -> None:
    def rank(number: int, *calls: str) -> dict[str, Any]:
        phase = {"name": "update", "calls": {"tensor parallel": list(calls)}}
        return {"rank": number, "phases": [phase]}

    check_same_collectives(rank(0, "a", "b"), rank(3, "a", "b"))
    for other in (("a", "c"), ("a",), ("a", "b", "b")):
        with pytest.raises(RehearsalError, match="0 and 3"):
            check_same_collectives(rank(0, "a", "b"), rank(3, *other))
