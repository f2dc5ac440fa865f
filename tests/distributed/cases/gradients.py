"""One process: log-probs, and the gradient of a loss with respect to every Hugging Face tensor, by
Megatron's model and by transformers'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.rollout.transformers_library import auto_class
from megatron_dcpo.weights.table import hf_shapes, is_constant, parts_of
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    samples_for_test,
)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Return for ``options["model"]`` the largest differences of log-probs and of gradients, each
    gradient's relative to its own largest number, and the names of the latter.
    """
    parallel = parallel_config(options.get("parallel", {}))
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], "fp32", parallel)
    policy = build_policy(config.model, parallel, topology)
    samples = samples_for_test()
    splits = [[index] for index in range(len(samples))]
    packing = parallel.sequence_packing
    ours = compute_logprobs(policy, samples, splits, temperature=1.0, packing=packing)

    def loss(batch: Any, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs.logprobs / len(samples), {}

    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    accumulate_gradients(policy, samples, splits, loss, temperature=1.0, packing=packing)
    model = auto_class("AutoModelForCausalLM").from_pretrained(
        options["model"], dtype=torch.float32
    )
    theirs = []
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))
        logits = model(ids[None]).logits[0]
        rows = torch.log_softmax(logits, -1)[len(sample.prompt_ids) - 1 : -1]
        chosen = rows.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1)
        (-chosen.sum() / len(samples)).backward()
        theirs.append(chosen.detach().numpy())
    differences = {}
    ours_by_name = gradients_of(policy)
    for name, gradient in gradients_of_transformers(model, policy.arch).items():
        scale = gradient.abs().max().item()
        difference = (ours_by_name.pop(name) - gradient).abs().max().item()
        # an expert that no token chose has no gradient
        differences[name] = difference / (scale or 1.0)
    assert not ours_by_name, sorted(ours_by_name)
    return {
        "logprobs": max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)),
        "gradients": differences,
    }


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    """Return the gradient of every tensor of the weight table that has one; the tied embedding's
    once.
    """
    found = {}
    for name, shape in hf_shapes(policy.arch).items():
        if not is_constant(name):
            found[name] = torch.zeros(shape)
    for gpt, copies in zip(policy.gpt, policy.copies, strict=True):
        parameters = dict(gpt.named_parameters())
        for copy in copies:
            if copy.hf not in found:
                continue
            gradient = parameters[copy.megatron].main_grad
            part = gradient.narrow(copy.dim, copy.start, copy.length)
            found[copy.hf].narrow(copy.dim, copy.hf_start, copy.length).copy_(part)
    return found


def gradients_of_transformers(model: torch.nn.Module, arch: Architecture) -> dict[str, Tensor]:
    """Return the same of a model of transformers, whose tensors may hold several of the table's."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        parts = parts_of(name, gradient.shape, arch)
        if not parts:
            found[name] = gradient
        for part in parts:
            found[part.name] = part.of(gradient)
    return found
