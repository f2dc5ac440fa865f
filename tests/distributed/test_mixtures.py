"""Mixtures of experts whose layers differ, with shared experts and routers with a sigmoid:
transformers gives the log-probs of one process, and every layout its losses and gradients.
"""

import numpy as np
import pytest
import torch

from tests.distributed.cases.common import samples_for_test
from tests.distributed.test_parallel_parity import agrees
from tests.helpers.launch import torchrun_all

DO = {"use_distributed_optimizer": True}
EP2 = DO | {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
PACKED = {"sequence_packing": True}
FULL = {"recompute_granularity": "full"}
# in "alone" the first stage has only the layer without experts
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
RESUMED = {"ep2": (2, EP2), "pp2_alone": (2, DO | ALONE)}
FAMILIES = ("glm4_moe", "dots1", "qwen2_moe")


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    wanted = {}
    for family in FAMILIES:
        model = {
            "model": str(tiny_models(family)),
            "probe": True,
            "bucket_bytes": 20_000,
            "micro_batch_size": 3,
        }
        wanted[family, "one"] = (1, model)
        for name, (processes, parallel) in LAYOUTS.items():
            wanted[family, name] = (processes, model | {"parallel": parallel})
    saved = str(tmp_path_factory.mktemp("saved") / "checkpoints")
    again = wanted["glm4_moe", "one"][1] | {"probe": False}
    on = {"parallel": EP2, "steps": 3, "save": saved}
    wanted["glm4_moe", "went_on"] = (2, again | on)
    for name, (processes, parallel) in RESUMED.items():
        options = {"parallel": parallel, "steps": 2, "load": saved}
        wanted["resumed", name] = (processes, again | options)
    made = {}

    def get(*name):
        if name not in made:
            processes = wanted[name][0]
            names = [other for other in wanted if wanted[other][0] == processes]
            out = tmp_path_factory.mktemp(f"ranks{processes}")
            jobs = [("policy", wanted[other][1]) for other in names]
            made.update(zip(names, torchrun_all(jobs, processes, out), strict=True))
        return made[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_equals_one_process(runs, family, layout):
    agrees(runs(family, layout), runs(family, "one")[0], LAYOUTS[layout][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_equals_transformers(tiny_models, runs, family):
    """HF forward = Megatron forward: fp32 |difference of log-probs| <= 1e-4."""
    from transformers import AutoModelForCausalLM

    directory = tiny_models(family)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = runs(family, "one")[0]["logprobs"]
    for index, sample in enumerate(samples_for_test()):
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))
        target = torch.tensor(sample.response_ids)[:, None]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
        theirs = torch.log_softmax(logits, -1).gather(-1, target).squeeze(-1)
        np.testing.assert_allclose(ours[str(index)], theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("layout", RESUMED)
def test_resumes_at_another_layout(runs, layout):
    """At the same layout bit for bit."""
    went_on, resumed = runs("glm4_moe", "went_on")[0], runs("resumed", layout)[0]
    exact = layout == "ep2"
    for name, tolerance in (("losses", 1e-5), ("norms", 2e-5)):
        tolerance = 0 if exact else tolerance
        np.testing.assert_allclose(
            resumed[name], went_on[name][1:], rtol=tolerance, err_msg=name
        )
    assert not exact or resumed["weights"] == went_on["weights"]
