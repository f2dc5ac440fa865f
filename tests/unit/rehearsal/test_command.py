"""What is refused of ``dcpo plan --rehearse``, and of ranks that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main as dcpo
from megatron_dcpo.rehearsal.ranks import RehearsalError, check_same_collectives, least_gpus
from tests.distributed.cases.common import parallel_config
from tests.helpers.paths import EXAMPLES, QUICKSTART


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--gpus", "7"), "7"),
        (("--gpus", "8", "--mfu", "0.3"), "--rehearse"),
    ],
    ids=["ranks that the layout does not divide", "an estimate"],
)
def test_a_rehearsal_is_refused(
    words: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = EXAMPLES / "qwen3_8b/math/dcpo.yaml"
    model = f"model.path={QUICKSTART / 'policy'}"
    assert dcpo(["plan", "--config", str(recipe), "--rehearse", *words, model]) == 2
    assert named in capsys.readouterr().err


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
