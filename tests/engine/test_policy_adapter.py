"""The adapter that a run leaves is served by vLLM."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.launch import torchrun
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import train
from tests.helpers.vllm import needs_vllm

pytestmark = needs_vllm


def test_vllm_serves_the_adapter(tmp_path):
    options = ("model.adapter.rank=4", "optimizer.lr=0.02", "training.steps=3")
    train(tmp_path / "run", *options, "rollout.engine=transformers")
    sequences, token_ids = ([list(range(5, 5 + n)) for n in (3, 17, 40)], list(range(30, 50)))
    settings = {
        "model": str(QUICKSTART / "policy"),
        "adapter": str(tmp_path / "run" / "adapter"),
        "sequences": sequences,
        "token_ids": token_ids,
    }
    served = torchrun("vllm_adapter", 1, tmp_path / "out", settings)[0]
    expected = {}
    for name, directory in (
        ("merged", tmp_path / "run" / "policy"),
        ("base", QUICKSTART / "policy"),
    ):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            rows = [
                model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token_ids]
                for ids in sequences
            ]
        expected[name] = torch.stack(rows).numpy()
    np.testing.assert_allclose(served, expected["merged"], atol=2e-3)
    assert np.abs(np.array(served) - expected["base"]).max() > 0.02
