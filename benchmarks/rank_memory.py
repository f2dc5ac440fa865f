"""One rank: what it really holds (weights, gradients, optimizer state, tensors saved for the
backward pass), and what the plan says about it. Started under torchrun by ``plan_memory.py``, and
by the tests of the plan.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

sys.path.insert(1, str(Path(__file__).parents[1]))

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import Config, DataConfig, ModelConfig
from megatron_dcpo.planning.memory import (
    LOGITS_AT_ONCE,
    in_flight,
    kept_per_token,
    stage_activations,
    stage_state,
    widths,
)
from megatron_dcpo.policy import output_layer
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import build_optimizer, zero_gradients
from megatron_dcpo.policy.schedule import accumulate_gradients
from megatron_dcpo.runtime.distributed import destroy, initialize
from megatron_dcpo.weights.layout import Layout
from tests.distributed.cases.common import parallel_config
from tests.helpers.samples import bare


def measured_state(policy, optimizer) -> dict[str, int]:
    """Bytes of weights, gradient buffers, fp32 main parameters and moments, each storage once."""
    buffers = [
        buffer
        for chunk in policy.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    weights = storages(p.data for gpt in policy.gpt for p in gpt.parameters())
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    moments = [
        state[key]
        for one in inner
        for state in one.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    main = storages(p.data for one in inner for group in one.param_groups for p in group["params"])
    return {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers),
        "main_params": sum(nbytes for pointer, nbytes in main.items() if pointer not in weights),
        "moments": sum(storages(moments).values()),
    }


def saved_bytes(
    arch: Architecture,
    layout: Layout,
    config: Config,
    stage: int,
    tokens: int,
    responses: int,
    micro_batches: int,
) -> int:
    """What a measurement sees on a rank of ``stage`` when its first backward pass begins: saved
    tensors, tensors between the stages, the gradient of one micro-batch's response rows.
    ``responses``: its response tokens.
    """
    w, flying = widths(arch, layout, config), in_flight(layout, stage, micro_batches)
    per_token = (
        kept_per_token(arch, layout, config, stage, flying) + 8 + 4 * w.rotary
    )  # ids, angles
    scored = (
        responses * (w.bytes * arch.hidden_size + 8)
        if stage == layout.pipeline_model_parallel_size - 1
        else 0
    )
    return int(tokens * per_token) + scored


def storages(tensors) -> dict[int, int]:
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def measured_activations(policy, samples, splits, packing: bool) -> int:
    """Bytes of the storages that this rank keeps when its first backward pass begins: saved tensors
    and what travels between the stages. Parameters and buffers are not counted.
    """
    owned = storages([p.data for gpt in policy.gpt for p in gpt.parameters()])
    owned |= storages([b for gpt in policy.gpt for b in gpt.buffers()])
    kept, saved = {}, {}
    whole_forward, whole_backward = schedules.forward_step, schedules.backward_step

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and not saved:
            kept.setdefault(storage.data_ptr(), storage)  # held, so that no other gets its address
        return tensor

    def forward(*args, **kwargs):
        output, tokens = whole_forward(*args, **kwargs)
        inputs = args[4] if isinstance(args[4], list) else [args[4]]
        for tensor in [*inputs, *(output if isinstance(output, list) else [output])]:
            if tensor is not None:
                keep(tensor)
        return output, tokens

    def backward(*args, **kwargs):
        saved.setdefault("bytes", sum(storage.nbytes() for storage in kept.values()))
        kept.clear()
        return whole_backward(*args, **kwargs)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with (
        patch.object(schedules, "forward_step", forward),
        patch.object(schedules, "backward_step", backward),
        hooks,
    ):
        accumulate_gradients(
            policy, samples, splits, loss, temperature=1.0, packing=packing, separable=True
        )
    return saved["bytes"]


def measured_peak(policy, samples, splits, packing: bool) -> int:
    """Most bytes that one forward-backward has allocated at a time, as torch's CPU allocator counts
    them, with the buffers that Megatron makes for it and keeps.
    """
    parallel_state.get_global_memory_buffer().buffer.clear()
    with (
        patch.object(dist.Work, "wait", _wait_for_gloo),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler,
    ):
        accumulate_gradients(
            policy, samples, splits, loss, temperature=1.0, packing=packing, separable=True
        )
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = itertools.accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    return max(live)


_wait = dist.Work.wait


def _wait_for_gloo(work: dist.Work, *arguments: Any) -> Any:
    """Wait, and let gloo's threads drop a message's memory before the thread that waits does: what
    they release the profiler does not see.
    """
    done = _wait(work, *arguments)
    time.sleep(0.003)
    return done


def loss(batch, outputs):
    return -(outputs.logprobs + 0.01 * outputs.entropy), {}


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every one of ``options["settings"]``: bytes measured and predicted."""
    parallel = parallel_config(options.get("parallel", {}))
    topology = initialize(parallel.sizes)
    output_layer.CHUNK_ROWS = (
        LOGITS_AT_ONCE  # the plan is of a GPU, which takes as many rows as fit
    )
    results = []
    for setting in options["settings"]:
        config = Config(
            run_dir="unused",
            model=ModelConfig(
                path=options["model"],
                params_dtype=setting.get("dtype", "bf16"),
                transformer_impl="local",
            ),
            data=DataConfig(path="unused"),
            parallel=parallel_config(
                {**options.get("parallel", {}), **setting.get("parallel", {})}
            ),
        )
        policy = build_policy(config.model, config.parallel, topology)
        optimizer = build_optimizer(config, policy)
        state = stage_state(
            policy.arch,
            policy.layout,
            config,
            topology.pp_rank,
            topology.dp_size * topology.cp_size,
        )
        result = {
            "predicted": {
                k: getattr(state, k) for k in ("weights", "gradients", "main_params", "moments")
            }
        }
        prompt, response = options["prompt_tokens"], options["response_tokens"]
        rng = np.random.default_rng(0)
        ids = lambda n: rng.integers(1, policy.arch.vocab_size, n)  # noqa: E731, B023
        samples = [bare(ids(prompt), ids(response)) for _ in range(options.get("samples", 1))]
        packing, stages = config.parallel.sequence_packing, topology.pp_size
        # as many micro-batches as the schedules hold at most, all of the same samples
        micro_batches = stages * parallel.virtual_pipeline_model_parallel_size
        splits = [list(range(len(samples)))] * micro_batches
        zero_gradients(policy, optimizer)
        parts = (
            len(samples) * (prompt + response),
            len(samples) * response,
        )  # of which a CP rank has its share
        batch = *(n // topology.cp_size for n in parts), micro_batches
        at = policy.arch, policy.layout, config, topology.pp_rank, *batch
        if options.get(
            "peak"
        ):  # only where the model is large enough for the formula's terms to be all there is
            result["peak"] = {
                "predicted": stage_activations(*at).total,
                "measured": measured_peak(policy, samples, splits, packing),
            }
        if options.get("activations"):
            measured = measured_activations(policy, samples, splits, packing)
            result["activations"] = {"predicted": saved_bytes(*at), "measured": measured}
        else:
            accumulate_gradients(
                policy, samples, splits, loss, temperature=1.0, packing=packing, separable=True
            )
        optimizer.step()
        result["measured"] = measured_state(policy, optimizer)
        results.append(result)
    destroy()
    return results


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    Path(chosen["out"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(measure(chosen)))
