"""An adapter on the confidence: the policy is trained bit for bit as without it, and the adapter alike in every layout."""

import numpy as np
import pytest
import torch

from megatron_dcpo.judging.statement import NUM_FEATURES
from megatron_dcpo.rollout import TransformersEngine
from megatron_dcpo.rollout.confidence_adapter import ConfidenceAdapter
from megatron_dcpo.weights.peft_adapter import DIRECTORY, read_adapter
from tests.distributed.cases.adapter import features_of, form_for_test, reasoning_of
from tests.distributed.cases.common import samples_for_test
from tests.helpers.launch import torchrun
from tests.helpers.transformer_engine import environment

# layout (ranks and groups) -> what else is varied within one launch
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}, [{}, {"sequence_packing": True}]),
    "tp2_sp": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        [{}, {"sequence_packing": True, "recompute_granularity": "full"}],
    ),
    "pp2": (
        2,
        {"pipeline_model_parallel_size": 2},
        [
            {},
            {"sequence_packing": True},
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
        ],
    ),
    "pp2_vpp2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        [{}, {"sequence_packing": True}],
    ),
    "dp2": (
        2,
        {},
        [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}],
    ),
    "tp2_pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        [{}],
    ),
}
PLAIN = {"parallel": {}}
ONE = [
    PLAIN,
    {"parallel": {}, "adapter": False},
    {"parallel": {"sequence_packing": True}},
    {"parallel": {"recompute_granularity": "full"}},
    {"parallel": {}, "choices": 100},
    {"parallel": {"sequence_packing": True}, "choices": 100},
    {"parallel": {}, "choices": 101},  # tokens of its own
]
WHOLE = {"activated": False}  # acts on the whole text, not on the statement alone


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where trained adapters of the tiny model are, on a policy that was not trained: activated or not."""
    return {activated: tmp_path_factory.mktemp("saved") for activated in (True, False, "tokens")}


@pytest.fixture(scope="module")
def one(tiny_models, tmp_path_factory, saved):
    settings = [*ONE, PLAIN | WHOLE]
    settings += [PLAIN | {"lr": 0.0, "save": str(saved[form]), "activated": form} for form in (True, False)]
    settings += [PLAIN | {"lr": 0.0, "save": str(saved["tokens"]), "choices": 101}]
    out = tmp_path_factory.mktemp("one")
    return torchrun("adapter", 1, out, {"model": str(tiny_models("qwen3", True)), "settings": settings})[0]


def sequences():
    """Prompt and reasoning of every sample."""
    samples = samples_for_test()
    return [np.concatenate([s.prompt_ids, s.response_ids[: reasoning_of(s)]]).tolist() for s in samples]


@pytest.mark.parametrize(("form", "place"), [(True, -3), (False, -2), ("tokens", -1)])
def test_the_embedded_engine_states_what_the_trainer_computes(one, saved, tiny_models, form, place):
    logits = stated_by_the_engine(saved, tiny_models, form, features_of(samples_for_test()))
    np.testing.assert_allclose(logits, np.array(one[place]["last"]), atol=1e-4)


def stated_by_the_engine(saved, tiny_models, activated, features):
    engine = TransformersEngine.from_pretrained(tiny_models("qwen3", True))
    adapter = read_adapter(saved[activated] / DIRECTORY)
    form = form_for_test(adapter.own_tokens or 10, adapter.activated)
    return ConfidenceAdapter(engine, adapter, form).logits(sequences(), features).numpy()


@pytest.mark.parametrize("activated", [True, False])
def test_peft_loads_the_adapter(one, saved, tiny_models, activated):
    """Without what the confidence sees beside the text, which PEFT does not know."""
    peft = pytest.importorskip("peft", reason="peft is not installed here: make test-peft")
    from transformers import AutoModelForCausalLM

    nothing = np.zeros((12, NUM_FEATURES), np.float32)
    expected = stated_by_the_engine(saved, tiny_models, activated, nothing)[:, 0]
    base = AutoModelForCausalLM.from_pretrained(tiny_models("qwen3", True), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(saved[activated] / DIRECTORY)).eval()
    form = form_for_test(10)
    for ids, logits in zip(sequences(), expected, strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([[*ids, *form.lead]])).logits[0, -1, form.digits]
        np.testing.assert_allclose(theirs.numpy(), logits, atol=1e-4)


def same(found, expected):
    for name in ("losses", "stated", "logits", "norms", "adapter_norms"):  # the scores of a statement cancel out
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name)
    assert found["adapter"].keys() == expected["adapter"].keys()
    for name, value in expected["adapter"].items():
        assert found["adapter"][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name


def test_the_policy_is_the_one_without_adapter_bit_for_bit(one):
    with_adapter, without, *_ = one
    assert with_adapter["losses"] == without["losses"]
    assert with_adapter["norms"] == without["norms"]
    assert with_adapter["weights"] == without["weights"] == one[7]["weights"] == one[6]["weights"]
    assert one[7]["stated"] != with_adapter["stated"]


def test_the_adapter_learns_from_every_part(one):
    result = one[0]
    assert result["stated"][-1] < result["stated"][0]
    assert len(result["adapter"]) == 4 * 7 * 2 + 1
    assert all(value for value in result["adapter"].values()), "a pair was not trained"


def test_packing_and_recomputation_do_not_matter(one):
    same(one[2], one[0])
    same(one[3], one[0])
    same(one[5], one[4])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_the_same_adapter(one, layout, tiny_models, tmp_path):
    ranks, parallel, variants = LAYOUTS[layout]
    settings = [{"parallel": parallel | variant} for variant in variants]
    settings += [{"parallel": parallel, "choices": 100}, {"parallel": parallel, "choices": 101}]
    settings += [{"parallel": parallel | variants[-1]} | WHOLE]
    results = torchrun("adapter", ranks, tmp_path, {"model": str(tiny_models("qwen3", True)), "settings": settings})
    for rank in results:
        *found, hundred, own, whole = rank
        for each in found:
            same(each, one[0])
        same(hundred, one[4])
        same(own, one[6])
        same(whole, one[7])


def test_through_the_layers_of_transformer_engine(one, tiny_models, tmp_path):
    settings = [
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "sequence_packing": packed}}
        for packed in (False, True)
    ]
    results = torchrun(
        "adapter",
        2,
        tmp_path,
        {"model": str(tiny_models("qwen3", True)), "settings": settings},
        environment=environment(),
    )
    for rank in results:
        for found in rank:
            same(found, one[0])
