"""vLLM's sampler on a GPU (Model Runner V2): its Triton kernels, interpreted, sample what they say,
and report the log-probs that the trainer computes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.cuda_wheels.needs import in_cuda_wheels, printed_by

pytestmark = [in_cuda_wheels, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    for package in ("vllm", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed, whose kernels are interpreted here")
    return printed_by("sampler")


@pytest.mark.parametrize("temperature", ["1", "0.7", "greedy"])
def test_logprobs_are_the_trainers(found: dict[str, Any], temperature: str) -> None:
    compared = found[f"logprobs {temperature}"]
    assert compared["from ours"] < 2e-6
    assert compared["most probable"] < 2e-6
    assert compared["ranks"]
    assert compared["again"], "the same seed and position give the same token"
    assert compared["greedy"] == (temperature == "greedy")
    assert (compared["next position"] == 0) == (temperature == "greedy")


@pytest.mark.parametrize(
    ("case", "kept"),
    [("temperature 1", 24), ("temperature 0.7", 24), ("top-p", 8), ("top-k", 5), ("both", 4)],
)
def test_samples_have_their_distribution(found: dict[str, Any], case: str, kept: int) -> None:
    compared = found[case]
    assert (compared["kept"], compared["same kept"], compared["outside"]) == (kept, True, 0)
    assert abs(compared["chi2"]) < 4
    assert compared["logprob"] < 2e-6
    assert compared["above ours"] < 2e-6, "by -log of the kept mass, which is why tis is needed"


@pytest.mark.parametrize("p", ["0.5", "0.95"])
def test_top_p_of_small_batches_keeps_at_most_what_is_nearly_equal(
    found: dict[str, Any], p: str
) -> None:
    compared = found[f"small batches {p}"]
    assert compared["whole"] == 0
    assert all(-1e-3 < distance <= 0 for distance in compared["divided"])


def test_penalties_that_are_not_set_change_nothing(found: dict[str, Any]) -> None:
    compared = found["penalties"]
    assert compared["none"]
    assert compared["all"] < 1e-6
    assert compared["counts"] == [7, 40]


def test_a_step_reads_and_writes_the_tokens_of_its_requests(found: dict[str, Any]) -> None:
    assert found["input batch"] == {
        "ids": [99, 0, 1, 2, 10, 11],
        "positions": [4, 0, 1, 2, 2, 3],
        "lengths": [5, 3, 4, 0, 0],
        "logits": [0, 3, 5],
        "states": [2, 0, 1],
        "local": [0, 0, 0],
        "sampled": [1, 0, 1],
        "rejected": [0, 0, 0],
        "computed": [3, 4, 5, 0],
        "total": [6, 5, 6, 0],
        "last": [0, 53, 51, 0],
        "new": [51, 53],
    }
