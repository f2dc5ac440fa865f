"""A checkpoint whose routers have other biases than ``model.path`` is not gone on from: engines get
those of ``model.path``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dcpo.checkpoints.state import _check_constants
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.planner import Copy
from megatron_dcpo.weights.table import ROUTER_BIAS

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("same", [True, False])
def test_biases_of_routers_are_those_of_the_model(same: bool) -> None:
    bias = torch.tensor([0.1, -0.2])
    megatron = f"decoder.layers.1.{ROUTER_BIAS}"
    copy = Copy(hf=NAME, hf_start=0, hf_stop=2, megatron=megatron, start=0, dim=0, primary=True)
    policy: Any = SimpleNamespace(
        copies=((copy,),),
        constants={NAME: bias},
        parameters=lambda chunk: {megatron: bias if same else bias + 1},
    )
    if same:
        _check_constants(policy)
        return
    with pytest.raises(UserError, match=NAME):
        _check_constants(policy)
