"""Engine = trainer after every weight synchronization, in every layout. Needs vLLM (``make
setup-engine``).

Without ``DCPO_TEST_ENGINE`` one small case runs (``make test``); with it (``make test-engine``)
all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import checks
from tests.helpers.launch import torchrun
from tests.helpers.vllm import at_length, needs_vllm, prompts_for_test

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

MODELS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
MODELS += [("phi3", False)]
BUCKET_BYTES = 8192
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2_pp2": (2, 2)}
EXPERTS = [("qwen3_moe", True), ("qwen3_moe_unnormalized", False)]
FORMS = [("glm4", False), ("olmo2", False), ("olmo3", False), ("gemma3", True)]
FORMS += [("mistral", False)]
MIXTURES = [("qwen2_moe", False), ("glm4_moe", False)]
EP2 = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}


def run(
    tiny_models: Any, out: Path, models: Any, tp: int, pp: int, engine_tp: int, **more: Any
) -> list[dict[str, Any]]:
    paths = {f"{family}_{tied}": str(tiny_models(family, tied)) for family, tied in models}
    return run_models(out, paths, tp, pp, engine_tp, **more)


def run_models(
    out: Path, models: dict[str, str], tp: int, pp: int, engine_tp: int, **more: Any
) -> list[dict[str, Any]]:
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        **more.pop("parallel", {}),
    }
    experts = parallel.get("expert_model_parallel_size", 1) * parallel.get(
        "expert_tensor_parallel_size", tp
    )
    ranks = max(
        experts * pp, tp * pp, engine_tp
    )  # an engine larger than the replica spans two of them
    options = {
        "models": models,
        "parallel": parallel,
        "engine_tp": engine_tp,
        "bucket_bytes": 100_000,
        "updates": 2,
        "dtype": "fp32",
        # what vLLM and the groups would say on their way out is not part of the test
        "leave_at_once": True,
        **more,
    }
    return torchrun("engine_parity", ranks, out, options, timeout=1500)


def check(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]:
        expected = greedy_of_transformers(ranks[0][name]["exported"])
        for rank in ranks:
            assert max(*rank[name]["differences"], rank[name]["interrupted"]) <= 1e-4, (
                name,
                rank[name],
            )
            assert rank[name]["greedy"] == expected, name


def greedy_of_transformers(directory: str) -> list[list[int]]:
    from megatron_dcpo.rollout.sampling import SamplingConfig
    from megatron_dcpo.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine.from_pretrained(directory)
    responses = engine.generate(prompts_for_test(), SamplingConfig(top_k=1, max_tokens=24))
    return [response.token_ids.tolist() for response in responses]


def test_one_process(tiny_models: Any, tmp_path: Path) -> None:
    """The small one: tied models in one process, without and with experts; nothing travels."""
    models = [
        EXPERTS[1],
        ("qwen3", True),
    ]  # in this order: vLLM keeps the groups that it made for its first model
    ranks = run(tiny_models, tmp_path, models, 1, 1, 1)
    check(ranks)
    assert [of_model["received"] for of_model in ranks[0].values()] == [0, 0]


@at_length
def test_the_sampler(tiny_models: Any, tmp_path: Path) -> None:
    """What ``tests/gpu`` asks of the model runner of a GPU first, of the one of the CPU build."""
    options = checks.sampler_options(str(tiny_models("qwen3", True)), "fp32")
    (result,) = torchrun("engine_sampler", 1, tmp_path, options)
    assert not result["second_runner"]
    checks.sampler(result)


@at_length
@pytest.mark.parametrize("engine_tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_is_the_trainer(
    tiny_models: Any, tmp_path: Path, layout: str, engine_tp: int
) -> None:
    """fp32: |difference of log-probs| <= 1e-4 on sampled tokens, greedy tokens of transformers on
    the exported policy.

    Every matrix is larger than a bucket, the embedding ten times; no peak is (asserted by the
    worker).
    """
    ranks = run(
        tiny_models, tmp_path, MODELS, *LAYOUTS[layout], engine_tp, bucket_bytes=BUCKET_BYTES
    )
    check(ranks)
    for name in ranks[0]:
        received = [rank[name]["received"] for rank in ranks]
        if layout == "tp1":
            assert received == [0] * len(ranks), "the trainer's rank has all that its engine needs"
        elif engine_tp == 2:
            assert all(
                r < rank[name]["least_whole"] for r, rank in zip(received, ranks, strict=True)
            )


@at_length
@pytest.mark.parametrize(
    ("tp", "pp", "etp", "engine_tp"),
    [(1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (2, 1, 2, 1), (2, 1, 2, 4), (1, 2, 1, 2)],
)
def test_experts(
    tiny_models: Any, tmp_path: Path, tp: int, pp: int, etp: int, engine_tp: int
) -> None:
    """EP 2 with every kind of layout: after each of three updates the engine has the trainer's
    experts, not those that its kernels packed before. Of the one model the packed form has another
    shape (padded), of the other the same.
    """
    parallel = EP2 | {"expert_tensor_parallel_size": etp, "sequence_parallel": tp > 1}
    more = {"parallel": parallel, "bucket_bytes": BUCKET_BYTES, "updates": 3}
    ranks = run(tiny_models, tmp_path, EXPERTS, tp, pp, engine_tp, **more)
    check(ranks)


@at_length
@pytest.mark.parametrize(("tp", "pp", "engine_tp"), [(1, 1, 1), (2, 1, 2), (1, 2, 2)])
def test_families_of_another_form(
    tiny_models: Any, tmp_path: Path, tp: int, pp: int, engine_tp: int
) -> None:
    """Norms behind attention and MLP, rotations of a part of the head, windows: vLLM's own models,
    and for OLMo those that it takes from transformers.
    """
    check(run(tiny_models, tmp_path, FORMS, tp, pp, engine_tp, bucket_bytes=20_000))


@at_length
@pytest.mark.parametrize(
    ("tp", "pp", "etp", "engine_tp"), [(1, 1, 1, 1), (2, 1, 2, 2), (1, 2, 1, 2)]
)
def test_mixtures(
    tiny_models: Any, tmp_path: Path, tp: int, pp: int, etp: int, engine_tp: int
) -> None:
    """EP 2 of models with shared experts and a layer without experts. The engine begins with random
    weights, the biases of GLM-4.5's routers too.
    """
    parallel = EP2 | {"expert_tensor_parallel_size": etp, "sequence_parallel": tp > 1}
    more = {"parallel": parallel, "bucket_bytes": 20_000}
    ranks = run(tiny_models, tmp_path, MIXTURES, tp, pp, engine_tp, **more)
    check(ranks)


@at_length
@pytest.mark.parametrize(("tp", "pp", "engine_tp"), [(2, 1, 1), (1, 2, 1), (1, 1, 1), (2, 1, 2)])
def test_memory_of_a_synchronization(tmp_path: Path, tp: int, pp: int, engine_tp: int) -> None:
    """Measured, not counted: one embedding of 200 MiB, a bucket of 16 MiB; the peak rises by a
    bucket and 5 % at most.

    The first update makes the trainer's and the engine's memory resident; what its pages are is not
    the update's.
    """
    bucket = 16 << 20
    model = large_vocabulary(tmp_path / "model")
    ranks = run_models(
        tmp_path, {"large": str(model)}, tp, pp, engine_tp, bucket_bytes=bucket, updates=3
    )
    for rank in ranks:
        assert max(rank["large"]["differences"]) <= 1e-4
        print(
            "extra memory of an update, in buckets:",
            [round(extra / bucket, 3) for extra in rank["large"]["extra"]],
        )
        assert max(rank["large"]["extra"][1:]) <= 1.05 * bucket
        small, large = rank["large"]["transport"]  # alone, with the small and the default bucket
        assert small <= 1.05 * bucket
        if (tp, engine_tp) == (2, 1):
            assert large >= 100 << 20, "the measure sees an embedding that is put together whole"


def large_vocabulary(path: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=204_800,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=0,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@at_length
def test_fifty_updates(tiny_models: Any, tmp_path: Path) -> None:
    """No drift, no growing memory, no stale prefix cache (prompts share a prefix and stay the
    same).
    """
    (rank,) = run(tiny_models, tmp_path, [("qwen3", True)], 1, 1, 1, updates=50)
    differences, memory = (rank["qwen3_True"]["differences"], rank["qwen3_True"]["memory"])
    assert len(differences) == 50
    assert max(differences) <= 1e-4
    assert np.mean(differences[25:]) <= 4 * np.mean(differences[:25]) + 1e-6
    assert memory[-1] - memory[9] <= 0.017, memory[::5]  # GB


@at_length
def test_bf16_within_the_floor(tiny_models: Any, tmp_path: Path) -> None:
    """The mismatch in bf16 stays within what transformers differs from itself in bf16 and fp32 with
    the same weights.
    """
    (rank,) = run(tiny_models, tmp_path, [("qwen3", False)], 1, 1, 1, dtype="bf16")
    mean, largest = floor_of_transformers(rank["qwen3_False"]["exported"])
    assert max(rank["qwen3_False"]["mean"]) <= 1.5 * mean
    assert max(rank["qwen3_False"]["differences"]) <= 2 * largest


def floor_of_transformers(directory: str) -> tuple[float, float]:
    """Mean and largest |log-prob difference| of two transformers runs on the same tokens: bf16 and
    fp32 arithmetic.
    """
    from transformers import AutoModelForCausalLM

    from megatron_dcpo.rollout.sampling import SamplingConfig
    from megatron_dcpo.rollout.transformers_engine import TransformersEngine

    prompts = {p.prompt_id: p for p in prompts_for_test()}
    engine = TransformersEngine.from_pretrained(directory, "bf16")
    responses = engine.generate(
        list(prompts.values()), SamplingConfig(n=3, temperature=0.7, max_tokens=24)
    )
    gaps = []
    models = [
        AutoModelForCausalLM.from_pretrained(directory, dtype=t)
        for t in (torch.bfloat16, torch.float32)
    ]
    with torch.no_grad():
        for response in responses:
            prompt = prompts[response.prompt_id].token_ids
            ids = torch.tensor([*prompt, *response.token_ids.tolist()])[None]
            target = torch.tensor(response.token_ids)[:, None]
            logps = [
                torch.log_softmax(m(ids).logits[0].float() / 0.7, -1)[len(prompt) - 1 : -1]
                for m in models
            ]
            first, second = (logp.gather(-1, target).squeeze(-1) for logp in logps)
            gaps.append((first - second).abs().numpy())
    flat = np.concatenate(gaps)
    return float(flat.mean()), float(flat.max())
