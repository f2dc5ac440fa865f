"""Mixtures of experts whose layers differ, with shared experts and routers with a sigmoid:
log-probs and the gradient of every tensor against transformers, and every layout against one
process.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.test_parallel_parity import agrees
from tests.helpers.launch import torchrun_all
from tests.helpers.parity import cases, differences, results_in

DO = {"use_distributed_optimizer": True}
EP2 = DO | {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
PACKED = {"sequence_packing": True}
FULL = {"recompute_granularity": "full"}
# the first stage has only the layer without experts
ALONE = PP2 | {"num_layers_in_first_pipeline_stage": 1}
LAYOUTS = {
    "ep2": (2, EP2),
    "ep2_packed_recomputed": (2, EP2 | PACKED | FULL),
    "cp2_packed": (2, DO | PACKED | {"context_parallel_size": 2}),
    "tp2": (2, TP2),
    "tp2_ep2_etp1_packed": (2, TP2 | EP2 | ETP1 | PACKED),
    "pp2_alone": (2, DO | ALONE),
    "pp2_virtual2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "ep2_pp2_alone": (4, EP2 | ALONE),
    "tp2_ep2": (4, TP2 | EP2),
}
# what a run of GLM-4.5 that saved after one step at "ep2" continues at
RESUMED = {"ep2": EP2, "pp2_alone": DO | ALONE}
FAMILIES = ("glm4_moe", "dots1", "qwen2_moe", "qwen3_moe_sparse")
# the others are in the full suite
QUICK = {("glm4_moe", "tp2_ep2_etp1_packed")}
CASES = cases(FAMILIES, LAYOUTS, QUICK)


@pytest.fixture(scope="module")
def model(tiny_models):
    return lambda family: str(tiny_models(family))


@pytest.fixture(scope="module")
def against_transformers(model, tmp_path_factory):
    models = {family: model(family) for family in FAMILIES}
    return differences(models, tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def policy_of(model, tmp_path_factory):
    return results_in(model, LAYOUTS, QUICK, {"micro_batch_size": 3}, tmp_path_factory.mktemp)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(against_transformers, family):
    """In fp32: log-probs to a few units in the last place, gradients of each tensor to 3e-6 of its
    largest number, those of queries and keys, whose terms cancel, to 1e-5.
    """
    found = against_transformers[family]
    assert found["logprobs"] <= 5e-6
    for name, difference in found["gradients"].items():
        cancels = "q_proj" in name or "k_proj" in name
        assert difference <= (1e-5 if cancels else 3e-6), name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_layout_equals_one_process(policy_of, family, layout):
    agrees(policy_of(family, layout), policy_of(family, "one process")[0], LAYOUTS[layout][1])


@pytest.mark.full
def test_resumes_at_another_layout(model, tmp_path):
    """At the same layout bit for bit."""
    options = {"model": model("glm4_moe"), "micro_batch_size": 3}
    saved = str(tmp_path / "checkpoints")
    on = {"parallel": EP2, "steps": 3, "save": saved}
    jobs = [("policy", options | on)]
    for parallel in RESUMED.values():
        again = {"parallel": parallel, "steps": 2, "load": saved}
        jobs.append(("policy", options | again))
    went_on, *others = torchrun_all(jobs, 2, tmp_path)
    for layout, resumed in zip(RESUMED, others, strict=True):
        for name, tolerance in (("losses", 1e-5), ("norms", 2e-5)):
            np.testing.assert_allclose(
                resumed[0][name],
                went_on[0][name][1:],
                rtol=0 if layout == "ep2" else tolerance,
                err_msg=f"{layout} {name}",
            )
    assert others[0][0]["weights"] == went_on[0]["weights"]
