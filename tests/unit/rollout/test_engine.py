"""What ``auto`` means with and without vLLM, and for a model that vLLM cannot run on the CPU."""

import json
import shutil
from importlib.machinery import ModuleSpec

import pytest

from megatron_dcpo.config import validate
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.rollout import local_engine
from megatron_dcpo.rollout.local_engine import choose_engine
from megatron_dcpo.rollout.random_numbers import request_seed
from megatron_dcpo.rollout.tokens import check_vocabulary, read_eos_token_ids
from megatron_dcpo.runtime import device
from tests.helpers.paths import QUICKSTART


@pytest.fixture
def model(tmp_path):
    def made(**changes):
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 331,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 3,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return made


@pytest.fixture
def installed(monkeypatch):
    """Pretend vLLM is (not) installed, on a machine without a GPU; nothing is imported."""

    def pretend(there, gpu=False):
        monkeypatch.setattr(
            local_engine, "find_spec", lambda name: ModuleSpec(name, None) if there else None
        )
        monkeypatch.setattr(device, "has_cuda", lambda: gpu)

    return pretend


def test_auto_takes_vllm_on_a_gpu_where_it_is_installed(model, installed):
    installed(True, gpu=True)
    assert choose_engine("auto", model()) == choose_engine("vllm", model()) == "vllm"
    installed(True)
    assert choose_engine("auto", model()) == "transformers"
    assert choose_engine("vllm", model()) == "vllm"
    installed(False, gpu=True)
    assert choose_engine("auto", model()) == "transformers"
    with pytest.raises(UserError, match="vLLM is not installed"):
        choose_engine("vllm", model())


def test_what_vllm_cannot_run_here(model, installed, caplog):
    installed(True)
    with pytest.raises(UserError, match="no head_dim 16"):
        choose_engine("vllm", model(head_dim=16))
    assert choose_engine("transformers", model(head_dim=16)) == "transformers"
    installed(True, gpu=True)
    caplog.set_level("INFO")
    assert choose_engine("auto", model(architectures=["GPT2LMHeadModel"])) == "transformers"
    assert "engine auto: transformers, because" in caplog.text


def test_hidden_sizes_of_experts_that_vllm_has_no_kernel_for(model, installed):
    installed(True)
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 24}
    assert choose_engine("vllm", model(**experts)) == "vllm"
    with pytest.raises(
        UserError, match="need a hidden_size that is a multiple of 32 \\(it is 144\\)"
    ):
        choose_engine("vllm", model(**experts, hidden_size=144))


def test_mixtures_that_vllm_does_not_run(model, installed):
    """It has no dots.llm1 any more, and an output layer of its own for GLM-4.5."""
    installed(True, gpu=True)
    experts = {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": None,
    }
    assert choose_engine("auto", model(**experts)) == "transformers"
    with pytest.raises(UserError, match="no dots1"):
        choose_engine("vllm", model(**experts))
    del experts["sliding_window"]
    experts |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    assert choose_engine("vllm", model(**experts)) == "vllm"
    with pytest.raises(UserError, match="tie the embeddings of glm4_moe"):
        choose_engine("vllm", model(**experts, tie_word_embeddings=True))


def test_a_family_whose_projections_vllm_keeps_fused(model, installed):
    installed(True, gpu=True)
    glm = {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "attention_bias": True,
        "head_dim": 32,
        "num_key_value_heads": 2,
    }
    assert choose_engine("auto", model(**glm)) == "transformers"
    with pytest.raises(UserError, match="glm"):
        choose_engine("vllm", model(**glm))


def test_seeds_differ_in_everything_they_are_made_of():
    seeds = {
        request_seed(s, step, p, i)
        for s in (1, 2)
        for step in (1, 2)
        for p in ("a", "b")
        for i in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert request_seed(1, 2, "a", 3) == request_seed(1, 2, "a", 3)


def test_every_end_token_of_the_model_ends_a_response(model):
    assert read_eos_token_ids(model()) == (3,)
    generation = model() / "generation_config.json"
    generation.write_text('{"eos_token_id": [5, 6]}')
    assert read_eos_token_ids(model()) == (5, 6, 3)
    shutil.copyfile(QUICKSTART / "policy" / "tokenizer.json", model() / "tokenizer.json")
    settings = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    (model() / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_eos_token_ids(model()) == (5, 6, 3, 280)
    generation.unlink()
    assert read_eos_token_ids(model(eos_token_id=None)) == (280,)
    (model() / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="eos_token_id"):
        read_eos_token_ids(model(eos_token_id=None))


@pytest.mark.parametrize("eos", [282, -1])
def test_an_end_token_without_an_embedding_is_refused(model, eos):
    with pytest.raises(UserError, match=f"eos_token_id {eos}"):
        check_vocabulary(model(eos_token_id=eos), TokenBytes((b"a",) * 9), 282)


@pytest.mark.parametrize(
    ("rollout", "objective", "what"),
    [
        ({"top_p": 0.9}, {}, "tis_level"),
        ({"top_k": 20}, {}, "tis_level"),
        ({"engine": "server"}, {}, "go together"),
        ({"endpoint": "http://x"}, {}, "go together"),
        (
            {"engine": "transformers", "tensor_model_parallel_size": 2},
            {},
            "needs rollout.engine=vllm",
        ),
        ({"gpu_memory_utilization": 1.5}, {}, "gpu_memory_utilization"),
        ({"bucket_bytes": 10}, {}, "bucket_bytes"),
    ],
)
def test_options_that_do_not_go_together(rollout, objective, what):
    values = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rollout": rollout,
        "objective": objective,
    }
    with pytest.raises(UserError, match=what):
        validate(values)


def test_truncation_with_a_correction_is_allowed():
    values = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    assert (
        validate(
            values | {"rollout": {"top_p": 0.9}, "objective": {"old_logprobs": "engine"}}
        ).rollout.top_p
        == 0.9
    )
    made = validate(
        values | {"rollout": {"top_p": 0.9, "top_k": 50}, "objective": {"tis_level": "token"}}
    )
    assert (made.rollout.top_p, made.rollout.top_k) == (0.9, 50)
