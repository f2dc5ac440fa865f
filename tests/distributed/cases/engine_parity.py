"""One rank: a policy in some layout and a vLLM engine beside it; after every update the engine must
be the trainer.

For each model: move the weights, synchronize, sample with the engine, score with the trainer.
Written per model: the largest difference of log-probs, the greedy tokens, the traffic against the
plan.
"""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.schedule import compute_logprobs
from megatron_dcpo.rollout.engine import PartialRollout
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.device import memory_gb
from megatron_dcpo.runtime.distributed import barrier
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.training.weight_sync import writers_of
from megatron_dcpo.types import Prompt
from megatron_dcpo.weights.hf_checkpoint import write_checkpoint
from megatron_dcpo.weights.reshard import Traffic, export_buckets, gather_full, plan_for
from megatron_dcpo.weights.table import is_constant
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config
from tests.helpers.samples import bare
from tests.helpers.vllm import prompts_for_test

TEMPERATURE = 0.7


def move_weights(policy: Any, update: int) -> None:
    """Change every weight that training changes, the same on all ranks that hold it: a function of
    its place in the whole tensor.
    """
    for chunk, copies in enumerate(policy.copies):
        parameters = policy.parameters(chunk)
        for copy in copies:
            if is_constant(copy.hf):
                continue
            seed = zlib.crc32(f"{copy.hf}/{update}".encode()) % 1000
            here = parameters[copy.megatron].narrow(copy.dim, copy.start, copy.length)
            index = torch.arange(copy.hf_start, copy.hf_stop, dtype=torch.float64)
            wave = (1 + 0.2 * torch.sin(index * 0.37 + seed)).to(here.device)
            here.mul_(wave.view(-1, *([1] * (here.dim() - 1))) if copy.dim == 0 else wave).clamp_(
                -3, 3
            )


def memory_peak(reset: bool = False) -> int:
    """Peak memory of this process in bytes; ``reset``: begin anew, from what it holds now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return int(line.split()[1]) * 1024


def extra_memory_of_transport(policy: Any, plan: Any) -> int:
    before = memory_peak(reset=True)
    for _ in export_buckets(policy, plan):
        pass
    return memory_peak() - before


def trainer_logprobs(policy: Any, prompts: list[Prompt], responses: list[Any]) -> list[np.ndarray]:
    by_id = {p.prompt_id: p for p in prompts}
    samples = [bare(by_id[r.prompt_id].token_ids, r.token_ids) for r in responses]
    splits = [list(range(i, min(i + 4, len(samples)))) for i in range(0, len(samples), 4)]
    return compute_logprobs(policy, samples, splits, temperature=TEMPERATURE, packing=False)


def interrupted(
    engine: Any, policy: Any, plan: Any, sampling: SamplingConfig, update: int
) -> float:
    """Responses that are cut off and continued by other weights: the largest difference of any
    part's log-probs from the trainer's with the weights of that part.
    """
    prompts, asked, gaps = prompts_for_test(), itertools.count(1), []
    samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
    cut = PartialRollout(lambda: next(asked) == 6, {})
    first = [r for responses in engine.stream(samples, sampling, update, cut) for r in responses]
    begun = {(r.prompt_id, r.sample_index): r for r in first if r.finish_reason == "abort"}
    assert begun
    assert all(0 < len(r.token_ids) <= 6 for r in first)
    for ours, response in zip(trainer_logprobs(policy, prompts, first), first, strict=True):
        gaps.append(np.abs(ours - response.logprobs).max())
    move_weights(policy, update + 1)
    engine.update_weights(export_buckets(policy, plan), update + 1)
    left = [(prompt, index) for prompt, index in samples if (prompt.prompt_id, index) in begun]
    to_the_end = PartialRollout(lambda: False, begun)
    rest = [
        r for responses in engine.stream(left, sampling, update + 1, to_the_end) for r in responses
    ]
    assert len(rest) == len(begun)
    for ours, response in zip(trainer_logprobs(policy, prompts, rest), rest, strict=True):
        before = begun[response.prompt_id, response.sample_index]
        n, total = len(before.token_ids), len(response.token_ids)
        assert response.segments == ((update, n), (update + 1, total - n))
        assert (response.step, response.finish_reason != "abort") == (update, True)
        assert total <= sampling.max_tokens
        assert (response.token_ids[:n].tolist(), response.logprobs[:n].tolist()) == (
            before.token_ids.tolist(),
            before.logprobs.tolist(),
        )
        gaps.append(np.abs(ours - response.logprobs)[n:].max())
    return float(max(gaps))


def check_model(model: str, options: dict[str, Any], topology: Any) -> dict[str, Any]:
    parallel, dtype = parallel_config(options["parallel"]), options["dtype"]
    config = config_for_test(model, dtype, parallel, options.get("layers", "auto"))
    policy = build_policy(config.model, parallel, topology, training=False)
    size, prompts = options["engine_tp"], prompts_for_test()
    settings = EngineOptions(
        dtype=dtype,
        tensor_model_parallel_size=size,
        max_model_len=192,
        max_num_seqs=64,
        dummy_weights=True,
        arguments={
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": options.get("eager", False),
        },
    )
    engine = VllmEngine(model, settings)
    plan = plan_for(policy, size, options["bucket_bytes"])
    rank = topology.place
    sampling = SamplingConfig(n=3, temperature=TEMPERATURE, max_tokens=24, seed=5)
    differences, memory, mean, extra, asleep = [], [], [], [], []
    for update in range(1, options["updates"] + 1):
        if options.get("sleep"):
            awake = memory_gb().get("device", 0.0)
            engine.sleep()
            asleep.append(awake - memory_gb().get("device", 0.0))
        move_weights(policy, update)
        traffic = Traffic()
        before = memory_peak(reset=True)
        engine.update_weights(export_buckets(policy, plan, traffic), update)
        extra.append(memory_peak() - before)
        assert traffic.received == plan.received[rank] == plan.least[rank], (
            traffic,
            plan.received,
            plan.least,
        )
        assert traffic.peak <= plan.peak_bytes <= options["bucket_bytes"]
        responses = engine.generate(prompts, sampling, update)
        assert {r.weights_version for r in responses} == {update}
        ours = trainer_logprobs(policy, prompts, responses)
        gaps = np.concatenate(
            [np.abs(a - r.logprobs) for a, r in zip(ours, responses, strict=True)]
        )
        differences.append(float(gaps.max()))
        mean.append(float(gaps.mean()))
        memory.append(memory_gb()["rss"])
    transport = [
        extra_memory_of_transport(policy, plan),
        extra_memory_of_transport(policy, plan_for(policy, size)),
    ]
    between = interrupted(engine, policy, plan, sampling, options["updates"])
    greedy = engine.generate(prompts, SamplingConfig(top_k=1, max_tokens=24), 0)
    out = Path(options["out"], Path(model).name + "_exported")
    write_checkpoint(
        out,
        Path(model),
        policy.arch,
        torch_dtype(dtype),
        lambda shapes: gather_full(policy, shapes),
        writers_of(topology),
    )
    barrier()
    engine.close()
    return {
        "differences": differences,
        "interrupted": between,
        "mean": mean,
        "memory": memory,
        "extra": extra,
        "given_back": asleep,
        "transport": transport,
        "greedy": [r.token_ids.tolist() for r in greedy],
        "exported": str(out),
        "received": plan.received[rank],
        "least_whole": plan.least_whole[rank],
        "buckets": len(plan.buckets),
        "messages": sum(len(bucket.messages) for bucket in plan.buckets),
    }


def run(options: dict[str, Any]) -> Any:
    topology = initialize_layout(parallel_config(options["parallel"]))
    return {
        name: check_model(model, options, topology) for name, model in options["models"].items()
    }
