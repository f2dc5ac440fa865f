"""Mixtures of experts: every layout of them gives the losses, gradient norms, log-probs and weights
of one process, which is compared with transformers. ``cases/policy.py`` asserts besides that a
synchronization moves the least bytes.
"""

import numpy as np
import pytest
import torch

from tests.distributed.cases.common import samples_for_test
from tests.distributed.test_parallel_parity import agrees
from tests.helpers.cases import full_only
from tests.helpers.launch import Run, runs_by_name

DO = {"use_distributed_optimizer": True}
EP2 = DO | {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
PACKED = {"sequence_packing": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "ep2": (2, EP2),
    "ep2_packed_recomputed_overlap": (
        2,
        EP2 | PACKED | OVERLAP | {"recompute_granularity": "full"},
    ),
    "ep2_cp2_packed": (2, EP2 | PACKED | {"context_parallel_size": 2}),
    "tp2_ep1_etp2": (2, TP2),
    "tp2_ep2_etp1_packed": (2, TP2 | EP2 | ETP1 | PACKED),
    "tp2_ep2_etp2": (4, TP2 | EP2),
    "tp2_ep4_etp1": (4, TP2 | DO | ETP1 | {"expert_model_parallel_size": 4}),
    "ep2_pp2": (4, EP2 | PP2),
}
# what a run saved after one step at "ep2" continues at
RESUMED = {
    "ep2": (2, EP2),
    "dp2": (2, DO),
    "tp2_ep2_etp2": (4, TP2 | EP2),
    "ep2_pp2": (4, EP2 | PP2),
}
ONE_PROCESS = ("qwen3_moe", "qwen3_moe_unnormalized")
# with `make test-full`: their parts stand in the others
FULL = (
    "ep2",
    "ep2_packed_recomputed_overlap",
    "tp2_ep1_etp2",
    "tp2_ep2_etp2",
    "tp2_ep4_etp1",
    "ep2_pp2",
)
FULL_RESUMED = ("ep2_pp2", "tp2_ep2_etp2")


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    options = {"bucket_bytes": 20_000, "micro_batch_size": 3, "steps": 2}
    models = {family: str(tiny_models(family, True, 2)) for family in ONE_PROCESS}
    wanted = {family: Run(1, options | {"model": models[family]}) for family in ONE_PROCESS}
    options |= {"model": models["qwen3_moe"]}
    for name, (processes, parallel) in LAYOUTS.items():
        wanted[name] = Run(processes, options | {"parallel": parallel})
    saved = str(tmp_path_factory.mktemp("saved") / "checkpoints")
    saving = {"parallel": EP2, "steps": 3, "save": saved}
    wanted["went_on"] = Run(2, options | saving)
    for name, (processes, parallel) in RESUMED.items():
        again = {"parallel": parallel, "load": saved}
        wanted["resumed", name] = Run(processes, options | again)
    full = [*FULL, *(("resumed", name) for name in FULL_RESUMED)]
    return runs_by_name(wanted, full, tmp_path_factory.mktemp)


@pytest.mark.parametrize("family", ONE_PROCESS)
def test_one_process_equals_transformers(tiny_models, runs, family):
    """HF forward = Megatron forward: fp32 |difference of log-probs| <= 1e-4."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models(family, True, 2), dtype=torch.float32)
    ours = runs(family)[0]["logprobs"]
    with torch.no_grad():
        for index, sample in enumerate(samples_for_test()):
            ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
            logp = torch.log_softmax(model(ids).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
            theirs = logp.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1).numpy()
            np.testing.assert_allclose(ours[str(index)], theirs, atol=1e-4)


@pytest.mark.parametrize("layout", full_only(LAYOUTS, FULL))
def test_layout_equals_one_process(runs, layout):
    agrees(runs(layout), runs("qwen3_moe")[0], LAYOUTS[layout][1])


@pytest.mark.parametrize("layout", full_only(RESUMED, FULL_RESUMED))
def test_resumes_at_any_layout_of_the_experts(runs, layout):
    """Model, moments and step counts of a chain of optimizers; at the same layout bit for bit."""
    went_on, resumed = runs("went_on")[0], runs(("resumed", layout))[0]
    exact = layout == "ep2"
    for name, tolerance in (("losses", 1e-5), ("norms", 2e-5)):
        np.testing.assert_allclose(resumed[name], went_on[name][1:], rtol=0 if exact else tolerance)
    assert not exact or resumed["weights"] == went_on["weights"]
