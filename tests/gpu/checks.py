"""What the results of ``tests/distributed/cases/device.py`` must be, on a GPU and on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# Families of which packed sequences are compared with padded ones and with transformers, and
# whether embeddings are tied: the most common ones; those with two rotations and windows, with
# pairs of neighbors, with experts.
FAMILIES = {
    "common": (("qwen3", True), ("llama", False), ("qwen2", True)),
    "others": (("gemma3", True), ("olmo3", False), ("glm4", False), ("qwen3_moe", False)),
}


def save_and_resume(result: dict[str, Any]) -> None:
    """Weights, main parameters, moments and the count of steps, bit for bit; the next update within
    rounding, since kernels of a GPU add in any order.
    """
    assert result["resumed"] == result["saved"]
    assert result["fresh"] != result["saved"] != result["trained on"], "which would be seen"
    before, after = result["steps"]
    assert before == after
    assert after[-1] == 2, "steps of the schedule"
    assert result["norms"][1] == pytest.approx(result["norms"][0], rel=1e-3)


def offload(result: dict[str, Any], rounding: int) -> None:
    """What leaves is gone from the device, to ``rounding`` bytes, and comes back as it was."""
    before, without_reference, away, back = result["held"]
    assert before - without_reference == pytest.approx(result["reference"], abs=rounding)
    assert without_reference - away == pytest.approx(result["optimizer"], abs=rounding)
    assert back == pytest.approx(before, abs=rounding)
    assert result["after"] == result["before"]
    assert 0 < result["norm"] < float("inf")


def logprobs(result: dict[str, Any], dtype: str) -> None:
    """fp32: 1e-3 at most anywhere. bf16: not further from transformers in fp32 than transformers in
    bf16 is, by half.
    """
    floor_mean, floor_most = (1e-4, 1e-3) if dtype == "fp32" else result["floor"]
    for pair in ("packed, padded", "padded, transformers", "packed, transformers"):
        mean, most = result[pair]
        assert mean <= 1.5 * floor_mean, (pair, result)
        assert most <= 2 * floor_most, (pair, result)


def restart(result: dict[str, Any]) -> None:
    """A closed engine leaves 0.5 GB at most (kernels that were loaded, libraries' work spaces); the
    next one takes as much as the first, and with the same weights says the same.
    """
    before, started, closed, again = result["device_gb"]
    assert closed - before <= 0.5, result["device_gb"]
    assert again == pytest.approx(started, abs=0.5)
    first, second = result["tokens"]
    assert first == second
    assert any(first)
    assert result["version"] == 1


def sampler_options(model: str, dtype: str) -> dict[str, Any]:
    """What the job ``engine_sampler`` is asked, whose result :func:`sampler` checks."""
    prompt = list(range(5, 25))
    return {"model": model, "dtype": dtype, "prompt": prompt, "draws": 4096, "leave_at_once": True}


def sampler(result: dict[str, Any]) -> None:
    """Tokens come as often as the probabilities that are reported of them say. Their log-probs are
    those of transformers in fp32, to 1e-3, or to three times what transformers in the same type
    differs by: it is one place.
    """
    assert result["largest"] <= max(1e-3, 3 * result["floor"])
    expected = np.array(result["expected"])
    drawn = np.array(result["drawn"])
    draws = drawn.sum()
    often = expected * draws >= 5
    assert often.sum() >= 3
    assert drawn[expected * draws < 1e-3].sum() <= 1
    surplus = (drawn[often] - draws * expected[often]) ** 2 / (draws * expected[often])
    degrees = often.sum()
    assert surplus.sum() <= degrees + 5 * np.sqrt(2 * degrees), "chi-square"
