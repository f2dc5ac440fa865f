"""One rank: train an adapter of the whole, frozen policy in the given layouts, and export it
merged.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron_dcpo.config import AdapterConfig, TrainingConfig
from megatron_dcpo.policy.adapter import Adapter, AdapterOptimizer, MergedPolicy
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.weights.adapter_shape import PROJECTIONS
from megatron_dcpo.weights.reshard import Traffic, export_buckets, gather_full, plan_for
from megatron_dcpo.weights.table import hf_shapes
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    samples_for_test,
    shared_out,
)
from tests.distributed.cases.policy import digest

STEPS, RANK, ALPHA, LR = 3, 4, 8.0, 1e-2


def weighted(total: int, batch: Any, outputs: Any) -> Any:
    """A loss whose weights differ from token to token."""
    return -((1 + batch.targets % 3).float() / total * outputs.logprobs), {}


def measure(setting: dict[str, Any], options: dict[str, Any], topology: Any) -> dict[str, Any]:
    parallel = parallel_config(setting["parallel"])
    schedule = {
        "lr": LR,
        "min_lr": 0.1 * LR,
        "lr_decay_style": "linear",
        "weight_decay": 0.0,
        "clip_grad": 0.0,
    }
    eps = dataclasses.replace(parallel, megatron={**parallel.megatron, "adam_eps": 1e-4})
    config = config_for_test(options["model"], "fp32", eps, **schedule)
    config = dataclasses.replace(config, training=TrainingConfig(steps=100))
    policy = build_policy(config.model, parallel, topology, training=False)
    shape = AdapterConfig(
        rank=RANK,
        alpha=ALPHA,
        targets=tuple(setting.get("targets", PROJECTIONS)),
        layers=setting.get("layers"),
    )
    optimizer = AdapterOptimizer(Adapter(policy, shape), config)
    adapter, samples = optimizer.adapter, samples_for_test()
    frozen = [digest(p) for gpt in policy.gpt for p in gpt.parameters()]
    indices, splits = shared_out(samples, parallel, topology, 4, max_tokens=260)
    mine = [samples[i] for i in indices]
    forward = {"temperature": 1.0, "packing": parallel.sequence_packing}
    loss = partial(weighted, sum(len(sample.response_ids) for sample in samples))
    measured: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(STEPS):
        optimizer.zero_gradients()
        separable = setting.get("separable", True)
        parts = accumulate_gradients(policy, mine, splits, loss, separable=separable, **forward)
        everyone = [
            part for rank in all_gather_objects(parts if topology.reports else []) for part in rank
        ]
        measured["losses"].append(sum(part["loss"] for part in everyone))
        measured["norms"].append(optimizer.gradient_norm())
        optimizer.step()
    with adapter.inactive():
        started_from = compute_logprobs(policy, mine, splits, **forward)
    now = compute_logprobs(policy, mine, splits, **forward)
    for name, rows in (("now", now), ("before", started_from)):
        of_all = {
            i: row.tolist()
            for part in all_gather_objects(dict(zip(indices, rows, strict=True)))
            for i, row in part.items()
        }
        measured[name] = [of_all[i] for i in range(len(samples))]
    measured["adapter"] = {name: tensor.tolist() for name, tensor in adapter.whole().items()}
    exported, bound = MergedPolicy.of(adapter), setting.get("bucket_bytes", 1 << 29)
    plan, traffic = plan_for(exported, 1, bound), Traffic()
    for _ in export_buckets(exported, plan, traffic):
        pass
    rank = topology.pp_rank * topology.tp_size + topology.tp_rank
    measured["bytes"] = [traffic.received, plan.received[rank], plan.least[rank]]
    measured["peak"] = [traffic.peak, plan.peak_bytes, bound]
    measured["merged"] = {
        name: t.tolist() for name, t in gather_full(exported, dict(hf_shapes(policy.arch))).items()
    }
    measured["unchanged"] = frozen == [digest(p) for gpt in policy.gpt for p in gpt.parameters()]
    measured["gradients"] = sum(p.grad is not None for gpt in policy.gpt for p in gpt.parameters())
    return measured


def run(options: dict[str, Any]) -> Any:
    topology = initialize_layout(parallel_config(options["settings"][0]["parallel"]))
    return [measure(setting, options, topology) for setting in options["settings"]]
