"""Every way to recompute activations gives the loss and the gradient of none."""

import pytest

from tests.helpers.launch import torchrun_all

FULL = {"recompute_granularity": "full"}
WAYS = [
    {},
    FULL | {"recompute_num_layers": 2},
    FULL | {"recompute_method": "block", "recompute_num_layers": 3},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
]


def test_losses_and_gradients_are_the_same(tiny_models, tmp_path):
    jobs = [
        ("policy", {"model": str(tiny_models("qwen3")), "steps": 2, "parallel": how})
        for how in WAYS
    ]
    (expected,), *others = torchrun_all(jobs, 1, tmp_path)
    for how, (found,) in zip(WAYS[1:], others, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6), how
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6), how
