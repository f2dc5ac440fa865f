"""The replicas of a policy divide the files of its export: each is written once, a failure is one
of all ranks, and nothing is left of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import load_model
from tests.helpers.launch import torchrun_all

BYTES = {"max_bytes": 60_000}
LAYOUTS: dict[str, dict[str, int]] = {
    "replicas": {},
    "context": {"context_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2},
}
FAILURES = {"disk": {"fails_on": 1}, "in the way": {}}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def ranks(tiny_models: Any, exports: Path) -> dict[str, list[Any]]:
    """Results of both ranks by case, all from one launch."""
    (exports / "in the way.tmp").mkdir()
    jobs = {}
    for name in (*LAYOUTS, *FAILURES):
        jobs[name] = {
            "model": str(tiny_models("qwen3")),
            "parallel": LAYOUTS.get(name, {}),
            "export": str(exports / name),
            **BYTES,
            **FAILURES.get(name, {}),
        }
    out = exports / "results"
    out.mkdir()
    results = torchrun_all([("divided_export", options) for options in jobs.values()], 2, out)
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_is_written_once_and_the_model_is_whole(
    ranks: dict[str, list[Any]], exports: Path, tiny_models: Any, layout: str
) -> None:
    first, second = (rank["written"] for rank in ranks[layout])
    files = sorted(path.name for path in (exports / layout).glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(first + second) == files
    if layout == "tensor":
        assert second == []
    else:
        assert abs(len(first) - len(second)) <= 1
    exported = load_model(exports / layout)
    stored = load_model(Path(tiny_models("qwen3")))
    assert exported.keys() == stored.keys()
    assert all(exported[name].equal(tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_one_of_all_ranks_and_nothing_is_left(
    ranks: dict[str, list[Any]], exports: Path, failure: str
) -> None:
    first, second = (rank["error"] for rank in ranks[failure])
    assert first == second
    assert str(exports / failure) in first
    assert not (exports / failure).exists()
    assert (exports / f"{failure}.tmp").exists() == (failure == "in the way")
