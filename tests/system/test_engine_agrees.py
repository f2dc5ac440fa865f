"""The engine and the trainer agree on a response: its log-probs at any temperature, and where it
ends.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import train

END, PADDING = 280, 281


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_log_probs_are_of_the_temperature_that_was_sampled_with(
    tmp_path: Path, temperature: float
) -> None:
    (step,) = train(
        tmp_path,
        "training.steps=1",
        f"rollout.temperature={temperature}",
        "objective.kl_coef=0.1",
    )
    assert step["engine/logprob_diff_max"] < 1e-4
    assert step["loss/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert step["loss/kl"] == pytest.approx(0.0, abs=1e-6), "to the reference, which it still is"


def test_a_second_end_token_ends_a_response_as_the_first(tmp_path: Path) -> None:
    """The policy that says the one where the other policy says the other makes the same step."""
    policy = Path(shutil.copytree(QUICKSTART / "policy", tmp_path / "policy"))
    weights = load_file(policy / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[[END, PADDING]] = embedding[[PADDING, END]]
    weights["model.embed_tokens.weight"] = embedding
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    generation = policy / "generation_config.json"
    named = {**json.loads(generation.read_text()), "eos_token_id": [END, PADDING]}
    generation.write_text(json.dumps(named))
    (step,) = train(tmp_path / "second", "training.steps=1", f"model.path={policy}")
    (usual,) = train(tmp_path / "usual", "training.steps=1")
    compared = ("format/", "length/", "reward/", "calibration/")
    for name in (name for name in usual if name.startswith(compared)):
        assert step[name] == usual[name], name
    assert step["length/truncated"] == 0
