"""One rank: build a policy in the given layout from a checkpoint, measure log-probs, train a few
steps, export.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.gradient_probe import compare, part_gradient
from megatron_dcpo.checkpoints.state import load_checkpoint
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.weights.reshard import Traffic, export_buckets, plan_for
from megatron_dcpo.weights.table import is_constant
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    samples_for_test,
    shared_out,
)
from tests.distributed.cases.optimizer_shards import save


def compare_with_engine(policy, options, samples, splits):
    """Push the weights into a transformers engine: their hashes there, and the largest log-prob
    difference.
    """
    packing = options.get("parallel", {}).get("sequence_packing", False)
    engine = TransformersEngine.from_pretrained(options["model"], options.get("dtype", "fp32"))
    for name, buffer in engine.model.named_buffers():
        if is_constant(name):
            buffer.zero_()
    plan, traffic = (plan_for(policy, bucket_bytes=options.get("bucket_bytes", 2**29)), Traffic())
    engine.update_weights(export_buckets(policy, plan, traffic), version=1)
    rank = policy.topology.place
    assert traffic.received == plan.received[rank] == plan.least[rank], (
        traffic,
        plan.received,
        plan.least,
    )
    assert traffic.peak <= plan.peak_bytes
    weights = {name: digest(parameter) for name, parameter in engine.model.named_parameters()}
    ours = compute_logprobs(policy, samples, splits, temperature=1.0, packing=packing)
    difference = 0.0
    with torch.no_grad():
        for sample, logprobs in zip(samples, ours, strict=True):
            ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
            logp = torch.log_softmax(engine.model(ids).logits[0].float(), -1)[
                len(sample.prompt_ids) - 1 : -1
            ]
            theirs = logp.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1).numpy()
            difference = max(difference, float(np.abs(theirs - logprobs).max()))
    return weights, difference


def digest(parameter):
    return hashlib.sha256(parameter.detach().float().numpy().tobytes()).hexdigest()


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options.get("parallel", {}))
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], options.get("dtype", "fp32"), parallel, lr=1e-2)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    packing = parallel.sequence_packing
    samples = samples_for_test()
    indices, splits = shared_out(
        samples, parallel, topology, options.get("micro_batch_size", 4), max_tokens=260
    )
    mine = [samples[i] for i in indices]
    logprobs = compute_logprobs(policy, mine, splits, temperature=1.0, packing=packing)
    total = sum(len(sample.response_ids) for sample in samples)

    def loss(batch, outputs, block=None):
        # An uneven weighting over tokens and an entropy term, so that every part of the backward
        # pass is exercised.
        weight = (1 + batch.targets % 3).float() / total
        if block is not None:
            weight = weight * ((batch.targets % 2) == (block == "reasoning"))
        return -(weight * (outputs.logprobs + 0.01 * outputs.entropy)), {}

    def everywhere(parts):
        return sum(
            part["loss"]
            for rank in all_gather_objects(parts if topology.reports else [])
            for part in rank
        )

    losses, norms, probe = [], [], None
    if "load" in options:
        load_checkpoint(Path(options["out"]) / options["load"], 1, policy, optimizer)
    for step in range(options.get("steps", 3)):
        optimizer.zero_gradients()
        if step == 1 and options.get("probe"):  # there are second moments, which it reads
            reasoning, confidence = (
                part_gradient(
                    policy,
                    optimizer.megatron,
                    partial(
                        accumulate_gradients,
                        policy,
                        mine,
                        splits,
                        partial(loss, block=block),
                        temperature=1.0,
                        packing=packing,
                    ),
                )[1]
                for block in ("reasoning", "confidence")
            )
            compared = compare(policy, optimizer.megatron, a=reasoning, b=confidence)
            probe = dataclasses.asdict(compared)
            optimizer.zero_gradients()
        collected = accumulate_gradients(
            policy, mine, splits, loss, temperature=1.0, packing=packing, separable=True
        )
        _, norm, _ = optimizer.megatron.step()
        optimizer.scheduler.step(1)
        optimizer.gather_parameters()
        losses.append(everywhere(collected))
        norms.append(norm)
        if step == 0 and "save" in options:
            save(Path(options["out"]) / options["save"], policy, optimizer, topology)

    weights, difference = compare_with_engine(policy, options, mine, splits)
    return {
        "losses": losses,
        "norms": norms,
        "logprobs": {str(i): lp.tolist() for i, lp in zip(indices, logprobs, strict=True)},
        "engine_difference": difference,
        "weights": weights,
        "layers": "transformer_engine" if policy.layout.transformer_engine else "local",
        "replicated": [
            digest(p)
            for name, p in policy.gpt[0].named_parameters()
            if "norm" in name and not getattr(p, "tensor_model_parallel", False)
        ],
        "probe": probe,
    }
