"""One rank of one parallel grid: for each setting, loss and gradient norm of two updates from the same checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_dcpo.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_dcpo.policy.batching import assign_to_ranks, sequence_length, split_micro_batches
from megatron_dcpo.policy.layers import CausalAttention
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import build_optimizer, gather_parameters, gradient_norm, zero_gradients
from megatron_dcpo.policy.schedule import accumulate_gradients
from megatron_dcpo.runtime.distributed import all_gather_objects, destroy, initialize
from tests.distributed.policy_worker import samples_for_test


def measure(setting, options, topology) -> list[float]:
    """[loss, gradient norm, loss, gradient norm] with an optimizer step in between."""
    parallel = ParallelConfig(**setting["parallel"])
    model = ModelConfig(path=options["model"], params_dtype=setting.get("dtype", "fp32"))
    optimizer_config = OptimizerConfig(lr=1e-3)
    config = Config(
        run_dir="unused", model=model, data=DataConfig(path="unused"), parallel=parallel, optimizer=optimizer_config
    )
    policy = build_policy(model, parallel, topology)
    optimizer, scheduler = build_optimizer(config, policy)
    samples = samples_for_test()
    lengths = [sequence_length(sample) for sample in samples]
    shares = assign_to_ranks(lengths, topology.dp_size)
    mine = [samples[i] for i in shares[topology.dp_rank]]
    splits = split_micro_batches(
        [[lengths[i] for i in share] for share in shares],
        topology.dp_rank,
        micro_batch_size=setting["micro_batch_size"],
        max_tokens=130 * setting["micro_batch_size"],
        packing=parallel.sequence_packing,
        multiple_of=topology.pp_size if parallel.virtual_pipeline_model_parallel_size > 1 else 1,
    )
    total = sum(len(sample.response_ids) for sample in samples)

    def loss(batch, outputs):
        value = -((1 + batch.targets % 3).float() / total * (outputs.logprobs + 0.01 * outputs.entropy)).sum()
        return value, {"loss": float(value.detach())}

    measured = []
    for _ in range(2):
        zero_gradients(policy, optimizer)
        parts = accumulate_gradients(policy, mine, splits, loss, temperature=1.0, packing=parallel.sequence_packing)
        once = topology.is_last_stage and topology.tp_rank == 0
        everyone = all_gather_objects(parts if once else [])
        measured += [sum(part["loss"] for rank in everyone for part in rank), gradient_norm(optimizer)]
        optimizer.step()
        scheduler.step(1)
        gather_parameters(policy)
    return measured


def counted(function, calls):
    def call(*arguments):
        calls.append(1)
        return function(*arguments)

    return call


def main() -> None:
    options = json.loads(sys.argv[1])
    sizes = options["settings"][0]["parallel"]
    topology = initialize(
        sizes.get("tensor_model_parallel_size", 1),
        sizes.get("pipeline_model_parallel_size", 1),
        sizes.get("virtual_pipeline_model_parallel_size", 1),
    )
    calls: list[int] = []
    CausalAttention._attend = counted(CausalAttention._attend, calls)
    results = []
    for setting in options["settings"]:
        calls.clear()
        results.append({"measured": measure(setting, options, topology), "attention_calls": len(calls)})
    Path(options["out"], f"rank{topology.rank}.json").write_text(json.dumps(results))
    destroy()


if __name__ == "__main__":
    main()
