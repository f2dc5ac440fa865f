"""``engine/routing_mismatch``: 0 where engine and trainer have the same weights in fp32, more where
their routers differ.
"""

from types import SimpleNamespace

import numpy as np
import torch

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.training.mismatch import (
    ROUTING_MISMATCH_THRESHOLD,
    mismatch_statistics,
    routing_mismatch,
)
from megatron_dcpo.types import BLOCKS, TokenOutputs
from megatron_dcpo.weights.planner import WeightSlice
from tests.helpers.vllm import prompts_for_test


def model_in(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


@torch.no_grad()
def logprobs(model, ids, start):
    logp = torch.log_softmax(model(ids[None]).logits[0].float(), -1)[start - 1 : -1]
    return logp.gather(-1, ids[start:, None]).squeeze(-1)


def measured(path, engine):
    prompts = {prompt.prompt_id: list(prompt.token_ids) for prompt in prompts_for_test()}
    responses = engine.generate(prompts_for_test(), SamplingConfig(n=4, max_tokens=24))
    trainer = model_in(path)
    texts = [
        (torch.tensor(prompts[r.prompt_id] + r.token_ids.tolist()), len(prompts[r.prompt_id]))
        for r in responses
    ]
    engine_logprobs = torch.tensor(np.concatenate([r.logprobs for r in responses]))
    trainer_logprobs = torch.cat([logprobs(trainer, *text) for text in texts])
    block_ids = torch.full((len(engine_logprobs),), next(iter(BLOCKS.values())))
    rows = {block: (block_ids == index).nonzero()[:, 0] for block, index in BLOCKS.items()}
    columns = {"engine_logprobs": engine_logprobs, "block_ids": block_ids}
    batch = SimpleNamespace(columns=columns, block_rows=rows)
    statistics = mismatch_statistics(
        batch, TokenOutputs(trainer_logprobs, torch.zeros_like(trainer_logprobs))
    )
    return routing_mismatch(
        read_architecture(path), "fp32", {name: float(x) for name, x in statistics.items()}
    )


def test_only_other_routers_are_a_mismatch(tiny_models):
    path = tiny_models("qwen3_moe", True, 2)
    engine = TransformersEngine.from_pretrained(path)
    assert measured(path, engine) == {"engine/routing_mismatch": 0.0}
    gate = "model.layers.1.mlp.gate.weight"
    router = engine.model.get_parameter(gate).detach().roll(1, 0)
    engine.update_weights([[WeightSlice(gate, 0, 0, router)]], 1)
    assert measured(path, engine)["engine/routing_mismatch"] > 0.5


def test_none_without_experts(tiny_models):
    path = tiny_models("qwen3", True)
    assert measured(path, TransformersEngine.from_pretrained(path)) == {}


def test_what_bf16_routes_otherwise(tiny_models):
    """The documented measurement: rounding moves no token of a dense model by the edge; another
    choice moves most.
    """
    gaps, others = {}, {}
    for family in ("qwen3", "qwen3_moe"):
        path = tiny_models(family, True)
        rounded = model_in(path, torch.bfloat16)
        exact = model_in(path, torch.bfloat16).float()
        torch.manual_seed(0)
        ids = exact.generate(
            torch.randint(1, 328, (8, 1)), max_new_tokens=96, do_sample=True, eos_token_id=None
        )
        (gaps[family], choices), (theirs, their_choices) = (taken(exact, ids), taken(rounded, ids))
        gaps[family] = (gaps[family] - theirs).abs()
        others[family] = choices != their_choices
    gap, other = gaps["qwen3_moe"], others["qwen3_moe"].any(-1).any(-1)
    edge = ROUTING_MISMATCH_THRESHOLD["bf16"]
    assert gaps["qwen3"].max() < edge
    assert 0 < other.float().mean() < 0.1
    assert gap[other].mean() > 4 * gap[~other].mean()
    assert (gap[other] >= edge).float().mean() > 10 * (gap[~other] >= edge).float().mean()


@torch.no_grad()
def taken(model, ids):
    """Log-probs [T] of the tokens behind the first, and the experts [T, L, k] chosen at the tokens
    before them.
    """
    chosen = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, out: chosen.append(out[2].sort(-1).values))
    logp = (
        torch.log_softmax(model(ids).logits.float(), -1)[:, :-1]
        .gather(-1, ids[:, 1:, None])
        .flatten()
    )
    experts = [layer.view(*ids.shape, -1)[:, :-1].flatten(0, 1) for layer in chosen]
    return logp, torch.stack(experts, 1) if experts else torch.zeros(0)
