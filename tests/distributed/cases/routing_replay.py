"""One rank: an engine whose routers choose experts that nobody else would; the policy's log-probs
with and without them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np
import torch

from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.types import replaced
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    shared_out,
)
from tests.helpers.samples import bare
from tests.helpers.vllm import prompts_for_test


def choose_otherwise(
    router: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Qwen3MoeTopKRouter.forward, with experts chosen by their scores and a preference for later
    ones.
    """
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = torch.softmax(logits, -1, torch.float)
    chosen = (scores + torch.linspace(0, 0.5, router.num_experts)).topk(router.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def choose_otherwise_by_sigmoid(
    router: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Glm4MoeTopkRouter.forward, with experts chosen by the preference and not by the correction
    bias.
    """
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = logits.sigmoid()
    preferred = scores + torch.linspace(0, 0.5, router.num_experts)
    chosen = preferred.topk(router.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor
    return logits, weights, chosen


ROUTERS = {
    "Qwen3MoeTopKRouter": choose_otherwise,
    "Glm4MoeTopkRouter": choose_otherwise_by_sigmoid,
    "Dots1TopkRouter": choose_otherwise_by_sigmoid,
}


def rollout(model: str) -> list[Any]:
    """Samples of the engine's, equal on every rank, in two batches, of several lengths."""
    engine = TransformersEngine.from_pretrained(model, max_num_seqs=5, record_experts=True)
    for module in engine.model.modules():
        choose = ROUTERS.get(type(module).__name__)
        if choose is not None:
            module.forward = MethodType(choose, module)
    engine.eos_token_ids = tuple(range(0, 331, 9))
    prompts = {prompt.prompt_id: prompt for prompt in prompts_for_test()}
    responses = engine.generate(list(prompts.values()), SamplingConfig(n=2, max_tokens=16))
    return [
        replaced(bare(prompts[r.prompt_id].token_ids, r.token_ids), response=r) for r in responses
    ]


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options.get("parallel", {}))
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], "fp32", parallel, lr=1e-2)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    samples = rollout(options["model"])
    mine, splits = shared_out(samples, parallel, topology, 2, max_tokens=60)
    total = sum(len(sample.response_ids) for sample in samples)
    forward = {"temperature": 1.0, "packing": parallel.sequence_packing}

    def loss(batch, outputs):
        return -((1 + batch.targets % 3).float() / total * outputs.logprobs), {}

    found: dict[str, Any] = {"lengths": [len(sample.response_ids) for sample in samples]}
    for replay in (True, False):
        chosen = [
            samples[i] if replay else bare(samples[i].prompt_ids, samples[i].response_ids)
            for i in mine
        ]
        ours = compute_logprobs(policy, chosen, splits, **forward)
        gaps = np.concatenate(
            [np.abs(a - samples[i].response.logprobs) for a, i in zip(ours, mine, strict=True)]
        )
        optimizer.zero_gradients()
        parts = accumulate_gradients(policy, chosen, splits, loss, **forward)
        every = all_gather_objects(parts if topology.reports else [])
        name = "replayed" if replay else "alone"
        found |= {f"{name}/gaps": gaps.tolist(), f"{name}/norm": optimizer.gradient_norm()}
        found[f"{name}/loss"] = sum(part["loss"] for rank in every for part in rank)
    return found
