"""One rank of one parallel grid: for each setting, loss and gradient norm of two updates from the
same checkpoint.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from megatron_dcpo.policy.layers import CausalAttention
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.policy.schedule import accumulate_gradients
from megatron_dcpo.runtime.distributed import all_gather_objects
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    samples_for_test,
    shared_out,
)


def measure(setting, options, topology) -> list[float]:
    """[loss, gradient norm, loss, gradient norm] with an optimizer step in between."""
    parallel = parallel_config(setting["parallel"])
    config = config_for_test(options["model"], setting.get("dtype", "fp32"), parallel, lr=1e-3)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    samples, size = samples_for_test(), setting["micro_batch_size"]
    indices, splits = shared_out(samples, parallel, topology, size, max_tokens=130 * size)
    mine = [samples[i] for i in indices]
    total = sum(len(sample.response_ids) for sample in samples)

    def loss(batch, outputs):
        value = -(
            (1 + batch.targets % 3).float() / total * (outputs.logprobs + 0.01 * outputs.entropy)
        )
        return value, {}

    measured = []
    for separable in (True, False):  # the output layer in one pass, then in two
        optimizer.zero_gradients()
        options_of_pass = {
            "temperature": 1.0,
            "packing": parallel.sequence_packing,
            "separable": separable,
        }
        parts = accumulate_gradients(policy, mine, splits, loss, **options_of_pass)
        everyone = all_gather_objects(parts if topology.reports else [])
        measured += [
            sum(part["loss"] for rank in everyone for part in rank),
            optimizer.gradient_norm(),
        ]
        optimizer.step()
        optimizer.gather_parameters()
    return measured


def counted(function, calls):
    def call(attention, query, key, value):
        calls.append(key.shape[2] / query.shape[2])
        return function(attention, query, key, value)

    return call


def run(options: dict[str, Any]) -> Any:
    topology = initialize_layout(parallel_config(options["settings"][0]["parallel"]))
    calls: list[float] = []
    results = []
    with patch.object(CausalAttention, "_attend", counted(CausalAttention._attend, calls)):
        for setting in options["settings"]:
            calls.clear()
            measured = measure(setting, options, topology)
            results.append(
                {
                    "measured": measured,
                    "attention_calls": len(calls),
                    "keys_per_query": sorted(set(calls)),
                }
            )
    return results
