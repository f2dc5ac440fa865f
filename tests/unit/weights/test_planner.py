"""The copy planner: together the ranks hold every Hugging Face element, primary copies exactly
once; bad layouts refused.
"""

import math

import numpy as np
import pytest

from megatron_dcpo.architectures.architecture import Architecture, YarnScaling
from megatron_dcpo.architectures.config_json import parse_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.planner import check_layout, checksum, padded_vocab_size, plan
from megatron_dcpo.weights.table import hf_shapes


def architecture(**changes) -> Architecture:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return parse_architecture(config | changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(
    ("tp", "pp", "vp", "first"),
    [
        (1, 1, 1, None),
        (2, 1, 1, None),
        (4, 1, 1, None),
        (1, 2, 1, 3),
        (2, 2, 2, None),
        (4, 3, 1, 2),
        (4, 4, 1, None),
    ],
)
def test_primary_copies_cover_every_element_once(name, tied, tp, pp, vp, first):
    arch = architecture(architectures=[name], tie_word_embeddings=tied)
    layout = Layout(
        tp, pp, vp, 8, transformer_engine=tp == 2, num_layers_in_first_pipeline_stage=first
    )
    count = {hf: np.zeros(shape, int) for hf, shape in hf_shapes(arch).items()}
    for at in [Coordinates(t, p, v) for t in range(tp) for p in range(pp) for v in range(vp)]:
        for copy in plan(arch, layout, at):
            if copy.primary:
                index = (slice(None),) * copy.dim + (slice(copy.hf_start, copy.hf_stop),)
                count[copy.hf][index] += 1
    assert all((c == 1).all() for c in count.values())


def test_interleaving_of_query_groups():
    """Rank 1 of 2: groups 2 and 3, each two query heads, one key head, one value head of size 2."""
    copies = [
        c
        for c in plan(architecture(), Layout(2, 1), Coordinates(1))
        if "layers.0.self_attention.linear_qkv" in c.megatron
    ]
    assert [(c.hf[-13:-7], c.hf_start, c.hf_stop, c.start) for c in copies] == [
        ("q_proj", 8, 12, 0),
        ("k_proj", 4, 6, 4),
        ("v_proj", 4, 6, 6),
        ("q_proj", 12, 16, 8),
        ("k_proj", 6, 8, 12),
        ("v_proj", 6, 8, 14),
    ]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [
        (151_643, 1, 151_680),
        (151_936, 4, 152_064),
        (128_256, 2, 128_256),
        (500, 4, 512),
        (500, 1, 512),
    ],
)
def test_vocabulary_padding(vocab, tp, padded):
    assert padded_vocab_size(architecture(vocab_size=vocab), Layout(tp)) == padded


def test_plan_is_deterministic_and_checksummed():
    first = plan(architecture(), Layout(2, 2), Coordinates(1, 1))
    plan.cache_clear()
    assert checksum(plan(architecture(), Layout(2, 2), Coordinates(1, 1))) == checksum(first)
    assert checksum(plan(architecture(), Layout(2, 2), Coordinates(0, 1))) != checksum(first)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(3), "tensor_model_parallel_size=3 does not divide"),
        (Layout(8), "key/value heads"),
        (Layout(1, 3), "pipeline_model_parallel_size=3"),
        (Layout(1, 1, 2), "virtual_pipeline_model_parallel_size"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout, message):
    with pytest.raises(UserError, match=message):
        check_layout(architecture(), layout)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
SIGMOID = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"),
    [(1, 1, 1, None), (1, 2, 3, None), (2, 1, 2, None), (2, 1, 2, 1), (2, 2, 6, 1), (4, 1, 2, 1)],
)
def test_ranks_share_the_experts_evenly(tp, pp, ep, etp, transformer_engine):
    """Of the ranks that have the model once, how many hold an element: of an expert's 1 / (EP x
    ETP), of what is split over tensor ranks 1 / TP, of the rest all. Each rank has its parameters
    under consecutive local numbers.
    """
    arch = architecture(**EXPERTS)
    options = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    layout = Layout(tp, pp, 1, 8, transformer_engine=transformer_engine, **options)
    count = {hf: np.zeros(shape, int) for hf, shape in hf_shapes(arch).items()}
    for place in range(layout.width):
        names = set()
        for pipeline in range(pp):
            for copy in plan(arch, layout, layout.at(place, pipeline)):
                index = (slice(None),) * copy.dim + (slice(copy.hf_start, copy.hf_stop),)
                count[copy.hf][index] += 1
                names.add(copy.megatron)
        name = (
            "mlp.experts.linear_fc{n}.weight{e}"
            if transformer_engine
            else "mlp.experts.local_experts.{e}.linear_fc{n}.weight"
        )
        local = {
            f"decoder.layers.0.{name.format(n=n, e=e)}" for n in (1, 2) for e in range(6 // ep)
        }
        assert {name for name in names if name.startswith("decoder.layers.0.mlp.experts")} == local
        assert "decoder.layers.0.pre_mlp_layernorm.weight" in names
    for name, found in count.items():
        cut = "proj" in name or "embed" in name or "head" in name
        parts = ep * (etp or tp) if "experts" in name else tp if cut else 1
        assert (found == layout.width // parts).all(), name


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(expert_model_parallel_size=4),
            "expert_model_parallel_size=4 does not divide the model's 6 experts",
        ),
        (Layout(2, expert_tensor_parallel_size=1), "expert_tensor_parallel_size=1 must be"),
        (
            Layout(1, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
            "expert_tensor_parallel_size=2 must be",
        ),
        (
            Layout(2, expert_model_parallel_size=3, expert_tensor_parallel_size=1),
            "one must divide the other",
        ),
    ],
)
def test_layouts_of_experts_that_are_wrong_are_refused(layout, message):
    with pytest.raises(UserError, match=message):
        check_layout(architecture(**EXPERTS), layout)


@pytest.mark.parametrize(
    "options", [{"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}]
)
def test_a_dense_model_has_no_experts_to_divide(options):
    with pytest.raises(UserError, match="qwen3 has no experts"):
        check_layout(architecture(), Layout(**options))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_is_read_as_model_cards_write_it() -> None:
    """Qwen3's card adds it to rope_scaling and leaves the number of positions as it is."""
    arch = architecture(rope_scaling=YARN, max_position_embeddings=40960)
    assert arch.max_position_embeddings == 131072
    scaling = arch.rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32, 1, True)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    own = YARN | {"attention_factor": 0.1 * math.log(4) + 1}
    assert architecture(rope_scaling=own).rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (EXPERTS | {"decoder_sparse_step": 9}, "no layer has experts"),
        (EXPERTS | {"mlp_only_layers": [9]}, "mlp_only_layers"),
        (EXPERTS | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (EXPERTS | {"n_shared_experts": 1}, "n_shared_experts=1"),
        (SIGMOID | {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (SIGMOID | {"num_experts_per_tok": 1}, "norm_topk_prob=True"),
        (SIGMOID | {"n_group": 4}, "n_group=4"),
        (SIGMOID | {"n_group": 2, "topk_group": 4}, "n_group=2 and topk_group=4"),
        (SIGMOID | {"first_k_dense_replace": 4}, "no layer has experts"),
        (SIGMOID | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (SIGMOID | {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        (SIGMOID | {"n_routed_experts": None}, "n_routed_experts"),
        (EXPERTS | {"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than the 6 experts"),
        (EXPERTS | {"num_experts": "six"}, "num_experts must be a number"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "needs the key"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "factor"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_unknown_architectures_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        architecture(**changes)
