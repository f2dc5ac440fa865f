"""``model.adapter``: low-rank adapters on a frozen policy, against Hugging Face's model with the
same pairs.
"""

import numpy as np
import pytest
import torch
from torch.func import functional_call

from megatron_dcpo.policy.adapter import first_A
from megatron_dcpo.weights.adapter_shape import PROJECTIONS
from megatron_dcpo.weights.hf_checkpoint import HFReader
from tests.distributed.cases.common import samples_for_test
from tests.distributed.cases.policy_adapter import ALPHA, LR, RANK, STEPS
from tests.helpers.cases import full_only
from tests.helpers.launch import torchrun
from tests.helpers.transformer_engine import environment

LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}, [{}, {"sequence_packing": True}]),
    "tp2_sp": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        [{"recompute_granularity": "full"}, {"sequence_packing": True}],
    ),
    "pp2_vpp2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        [{"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}],
    ),
    "dp2": (2, {}, [{}]),
    "cp2": (2, {"context_parallel_size": 2}, [{}, {"sequence_packing": True}]),
    "tp2_pp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        [{}],
    ),
}
SOME = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def one(tiny_models, tmp_path_factory):
    settings = [
        {"parallel": {}},
        {"parallel": {"recompute_granularity": "full"}, "separable": False},
        {"parallel": {}, "targets": SOME, "bucket_bytes": 1 << 18},
        {"parallel": {}, "layers": "last 1"},
        {"parallel": {"recompute_granularity": "full"}, "layers": "last 1"},
    ]
    out = tmp_path_factory.mktemp("one")
    return torchrun(
        "policy_adapter", 1, out, {"model": str(tiny_models("qwen3", True)), "settings": settings}
    )[0]


@pytest.fixture(scope="module")
def gemma(tiny_models, tmp_path_factory):
    """Norms that multiply by 1 + weight, also of what a layer with a pair returns."""
    out = tmp_path_factory.mktemp("gemma")
    options = {"model": str(tiny_models("gemma3", True)), "settings": [{"parallel": {}}]}
    return torchrun("policy_adapter", 1, out, options)[0][0]


def trained_by_hand(model_dir, started, targets):
    """Losses, pairs and log-probs of ``STEPS`` steps of torch's AdamW on W + (alpha / rank) B A, in
    the model of Hugging Face; A as ours began, B zero.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    weights = {name: p.detach() for name, p in model.named_parameters()}
    modules = [n.removesuffix(".weight") for n in weights if n.split(".")[-2] in targets]
    modules = [module for module in modules if module in started]  # not of every layer
    A = {m: started[m].requires_grad_() for m in modules}
    B = {m: torch.zeros(weights[f"{m}.weight"].shape[0], RANK).requires_grad_() for m in modules}
    adam = torch.optim.AdamW([*A.values(), *B.values()], lr=LR, eps=1e-4, weight_decay=0.0)

    def merged():
        return weights | {
            f"{m}.weight": weights[f"{m}.weight"] + ALPHA / RANK * B[m] @ A[m] for m in modules
        }

    def logprobs(sample):
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
        logits = functional_call(model, merged(), (ids,)).logits[0, len(sample.prompt_ids) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]

    samples, losses = samples_for_test(), []
    total = sum(len(sample.response_ids) for sample in samples)
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = LR * (1 - 0.9 * step / 100)
        adam.zero_grad()
        parts = [
            -((1 + torch.tensor(s.response_ids) % 3) / total * logprobs(s)).sum() for s in samples
        ]
        loss = sum(parts)
        loss.backward()
        losses.append(loss.item())
        adam.step()
    with torch.no_grad():
        rows = [logprobs(sample).tolist() for sample in samples]
    pairs = {
        f"{m}.lora_{name}.weight": t.detach()
        for name, of in (("A", A), ("B", B))
        for m, t in of.items()
    }
    return losses, pairs, rows, merged()


@pytest.mark.parametrize(
    ("which", "targets"), [(0, PROJECTIONS), (2, SOME), (3, PROJECTIONS), (4, PROJECTIONS)]
)
def test_it_learns_what_hugging_faces_model_learns(one, which, targets, tiny_models):
    learned(one[which], tiny_models("qwen3", True), targets)


@pytest.mark.parametrize("which", [3, 4])
def test_only_the_layers_on_top_are_adapted(one, which, tiny_models):
    layers = {name.split(".")[2] for name in one[which]["adapter"]}
    every_layer = {name.split(".")[2] for name in one[0]["adapter"]}
    assert len(every_layer) > 1
    assert layers == {max(every_layer, key=int)}


def test_with_norms_behind_the_adapted_layers(gemma, tiny_models):
    learned(gemma, tiny_models("gemma3", True), PROJECTIONS)


def learned(found, model_dir, targets):
    """It is what Hugging Face's model learns by hand."""
    names = found["adapter"]
    started = {
        n.removesuffix(".lora_A.weight"): first_A(
            n.removesuffix(".lora_A.weight"), RANK, np.shape(v)[1]
        )
        for n, v in names.items()
        if ".lora_A." in n
    }
    losses, pairs, rows, merged = trained_by_hand(model_dir, started, targets)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    assert names.keys() == pairs.keys()
    for name, value in pairs.items():
        np.testing.assert_allclose(names[name], value, rtol=1e-3, atol=2e-5, err_msg=name)
    for mine, theirs in zip(found["now"], rows, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    for name, value in merged.items():
        np.testing.assert_allclose(found["merged"][name], value.detach(), atol=1e-5, err_msg=name)


def test_the_policy_itself_stays_and_is_what_the_adapter_is_measured_against(one, tiny_models):
    reader = HFReader(tiny_models("qwen3", True))
    for found in one:
        assert found["unchanged"]
        assert not found["gradients"]
        assert found["losses"][-1] < found["losses"][0]
        assert found["before"] == one[0]["before"] != found["now"]
    for name, value in one[2]["merged"].items():
        same = np.array_equal(np.array(value, np.float32), reader.tensor(name).float().numpy())
        assert same != (name.split(".")[-2] in SOME), name


def close(found, expected):
    for name in ("losses", "norms"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
    for name, value in expected["adapter"].items():
        np.testing.assert_allclose(
            found["adapter"][name], value, rtol=1e-3, atol=2e-5, err_msg=name
        )
    for name, value in expected["merged"].items():
        np.testing.assert_allclose(found["merged"][name], value, atol=1e-5, err_msg=name)
    for row, other in zip(
        found["now"] + found["before"], expected["now"] + expected["before"], strict=True
    ):
        np.testing.assert_allclose(row, other, rtol=1e-5, atol=2e-5)
    received, planned, least = found["bytes"]
    assert received == planned == least
    peak, planned, bound = found["peak"]
    assert peak <= planned <= bound
    assert found["unchanged"]
    assert not found["gradients"]


def test_recomputation_and_two_passes_of_the_output_layer_do_not_matter(one):
    close(one[1], one[0])


@pytest.mark.parametrize("layout", full_only(LAYOUTS, ("tp2_pp2",)))
def test_layouts_train_the_same_adapter(one, layout, tiny_models, tmp_path):
    ranks, parallel, variants = LAYOUTS[layout]
    settings = [{"parallel": parallel | variant, "bucket_bytes": 1 << 18} for variant in variants]
    for rank in torchrun(
        "policy_adapter",
        ranks,
        tmp_path,
        {"model": str(tiny_models("qwen3", True)), "settings": settings},
    ):
        for found in rank:
            close(found, one[0])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_through_the_layers_of_transformer_engine(one, gemma, family, tiny_models, tmp_path):
    settings = [{"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}]
    options = {"model": str(tiny_models(family, True)), "settings": settings}
    expected = {"qwen3": one[0], "gemma3": gemma}[family]
    for rank in torchrun("policy_adapter", 2, tmp_path, options, environment=environment()):
        close(rank[0], expected)
