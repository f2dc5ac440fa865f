"""Routing replay: an engine's own choice of experts reaches the routers of the policy, in every
layout and recomputed.
"""

import numpy as np
import pytest

from megatron_dcpo.training.mismatch import ROUTING_MISMATCH_THRESHOLD
from tests.helpers.cases import full_only
from tests.helpers.chat_policy import save_policy
from tests.helpers.launch import Run, runs_by_name

PACKED = {"sequence_packing": True}
FULL = {"recompute_granularity": "full"}
ONE_PROCESS = {
    "padded": {},
    "packed": PACKED,
    "recomputed": PACKED | FULL,
    "a_layer_recomputed": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "use_distributed_optimizer": True,
}
TWO_PROCESSES = {
    "dp2": {},
    "tp2_ep2": TP2 | EP2,
    "tp2_packed_recomputed": TP2 | PACKED | FULL,
    "pp2_recomputed": {"pipeline_model_parallel_size": 2} | FULL,
    "vpp2_recomputed": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    | FULL,
    "cp2_packed": {"context_parallel_size": 2} | PACKED,
    "cp2_recomputed": {"context_parallel_size": 2} | FULL,
}
# of a model with a sigmoid router, a correction bias and a first layer without experts
SIGMOID = {
    "sigmoid_padded": {},
    "sigmoid_pp2_recomputed": {"pipeline_model_parallel_size": 2} | FULL,
}
# rollouts whose responses are made of parts
OF_PARTS = {"in parts": {}, "in sessions": PACKED}
# with `make test-full`: what the others try, in another layout
FULL_SUITE = (
    "packed",
    "recomputed",
    "a_layer_recomputed",
    "dp2",
    "tp2_packed_recomputed",
    "pp2_recomputed",
    "cp2_packed",
    "cp2_recomputed",
)
LAYOUTS = full_only([*ONE_PROCESS, *TWO_PROCESSES, *SIGMOID], FULL_SUITE)
EDGE = ROUTING_MISMATCH_THRESHOLD["fp32"]


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    wanted = {}
    for name, parallel in (ONE_PROCESS | TWO_PROCESSES | SIGMOID).items():
        family = ("dots1", False) if name in SIGMOID else ("qwen3_moe", True)
        processes = 2 if name in TWO_PROCESSES or name == "sigmoid_pp2_recomputed" else 1
        options = {"model": str(tiny_models(*family)), "parallel": parallel}
        wanted[name] = Run(processes, options, "routing_replay")
    models = {
        "in parts": tiny_models("qwen3_moe", True),
        "in sessions": save_policy(tmp_path_factory.mktemp("chat"), experts=8),
    }
    for name, parallel in OF_PARTS.items():
        options = {"model": str(models[name]), "parallel": parallel, "rollout": name}
        wanted[name] = Run(1, options, "routing_replay")
    return runs_by_name(wanted, FULL_SUITE, tmp_path_factory.mktemp)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_token_is_routed_otherwise(runs, layout):
    """engine/routing_mismatch: 0 with the engine's choices, most tokens without. Gradients are
    those of one process.
    """
    padded = runs("sigmoid_padded" if layout in SIGMOID else "padded")[0]
    for found in runs(layout):
        assert max(found["replayed/gaps"]) < EDGE / 5
        assert np.mean(np.array(found["alone/gaps"]) > EDGE) > 0.9
        for name in ("replayed", "alone"):
            assert found[f"{name}/loss"] == pytest.approx(padded[f"{name}/loss"], rel=1e-4)
            assert found[f"{name}/norm"] == pytest.approx(padded[f"{name}/norm"], rel=1e-3)
    assert padded["replayed/norm"] != pytest.approx(padded["alone/norm"], rel=0.01)
    assert len(set(padded["lengths"])) > 3


@pytest.mark.parametrize("rollout", OF_PARTS)
def test_no_token_of_a_response_in_parts_is_routed_otherwise(runs, rollout):
    """Parts of partial rollouts, and the segments and branches of sessions."""
    (found,) = runs(rollout)
    assert max(found["replayed/gaps"]) < EDGE / 5
    assert np.mean(np.array(found["alone/gaps"]) > EDGE) > 0.8
    if rollout == "in sessions":
        assert min(found["sequences"]) >= 3
    else:
        assert max(found["lengths"]) > 14, "a response of three parts"
