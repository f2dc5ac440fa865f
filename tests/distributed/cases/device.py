"""One rank on whatever device there is: what ``tests/gpu`` asks of a GPU, and a unit test once of
the CPU.

``options["what"]`` is the name of a function below. ``model``, ``dtype``, ``layers``
(``model.transformer_impl``) and ``distributed`` (the optimizer) describe the policy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rank_memory import loss, measured_state, storages
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.checkpoints.state import checkpoint_state, load_checkpoint
from megatron_dcpo.config import Config, ParallelConfig
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import make_plan
from megatron_dcpo.policy import optimizer as policy_optimizer
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload, PolicyOptimizer, on_host, optimizer_parts
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.local_engine import build_local_engine
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.runtime import host_memory
from megatron_dcpo.runtime.device import (
    _CPU,
    current_device,
    empty_cache,
    has_cuda,
    memory_gb,
    synchronize,
)
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.types import TrainingSample
from megatron_dcpo.weights.reshard import export_buckets, plan_for
from tests.distributed.cases.common import config_for_test, initialize_layout, samples_for_test
from tests.helpers.samples import bare
from tests.helpers.vllm import prompts_for_test

RUN = dict.fromkeys(("seed", "data", "reward", "engine"), 0)


@dataclass
class Trainer:
    """A policy that can be trained on samples of its own."""

    config: Config
    topology: Topology
    policy: Policy
    optimizer: PolicyOptimizer

    @classmethod
    def of(cls, options: dict[str, Any]) -> Trainer:
        parallel = ParallelConfig(use_distributed_optimizer=options.get("distributed", False))
        topology = initialize_layout(parallel)
        config = config_for_test(
            options["model"], options["dtype"], parallel, options["layers"], lr=1e-3
        )
        policy = build_policy(config.model, parallel, topology)
        return cls(config, topology, policy, PolicyOptimizer(policy, config))

    def update(self, samples: list[TrainingSample], micro_batch_size: int = 4) -> float:
        """One optimizer step; the norm of its gradient."""
        splits = micro_batches(samples, micro_batch_size)
        self.optimizer.zero_gradients()
        accumulate_gradients(
            self.policy, samples, splits, loss, temperature=1.0, packing=False, separable=True
        )
        _, norm, _ = self.optimizer.megatron.step()
        self.optimizer.scheduler.step(1)
        return float(norm)

    def state(self) -> Iterator[Tensor]:
        """The policy's parameters, main parameters where they are others, moments."""
        yield from (p.data for gpt in self.policy.gpt for p in gpt.parameters())
        for part in optimizer_parts(self.optimizer.megatron):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.data
                    state = part.optimizer.state.get(parameter, {})
                    yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)

    def steps(self) -> list[Any]:
        """What the optimizer and the schedule have counted."""
        parts = optimizer_parts(self.optimizer.megatron)
        counted = [group.get("step") for part in parts for group in part.optimizer.param_groups]
        return [
            *(None if step is None else int(step) for step in counted),
            self.optimizer.scheduler.num_steps,
        ]


def micro_batches(samples: list[TrainingSample], size: int) -> list[list[int]]:
    return [list(range(i, min(i + size, len(samples)))) for i in range(0, len(samples), size)]


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the tensors' bytes, in their order."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        copied = (
            tensor.detach().reshape(-1).view(torch.uint8).to("cpu", copy=True)
        )  # NumPy pins the storage it is given
        hashed.update(copied.numpy().tobytes())
    return hashed.hexdigest()


def save_and_resume(options: dict[str, Any]) -> dict[str, Any]:
    """Save in the background, go on training meanwhile, load into another policy: what was saved is
    what is loaded.
    """
    out, first = Path(options["out"], "checkpoints"), Trainer.of(options)
    samples = samples_for_test()
    for _ in range(2):
        first.update(samples)
    saved, steps = digest(first.state()), [first.steps()]
    saver = Saver(
        out, first.topology.rank, 1, background=True, replicas=first.topology.replica_group
    )
    saver.begin(1, checkpoint_state(first.policy, first.optimizer, 1, RUN))
    norm = first.update(samples)
    saver.wait()
    second = Trainer.of(options)
    fresh = digest(second.state())
    load_checkpoint(out, 1, second.policy, second.optimizer)
    resumed, loaded = digest(second.state()), second.steps()
    return {
        "saved": saved,
        "fresh": fresh,
        "resumed": resumed,
        "trained on": digest(first.state()),
        "norms": [norm, second.update(samples)],
        "steps": [*steps, loaded],
    }


def offload(options: dict[str, Any]) -> dict[str, Any]:
    """Bytes on the device before, while optimizer, gradients and reference are away, and
    afterwards; digests of the values.

    ``pretend``: the CPU is a device with memory of its own.
    """
    if options.get("pretend"):
        for module in (host_memory, policy_optimizer):
            module.capabilities = lambda: dataclasses.replace(_CPU, separate_memory=True)
    trainer = Trainer.of(options)
    trainer.update(samples_for_test())
    reference = build_policy(
        trainer.config.model, trainer.config.parallel, trainer.topology, training=False
    )
    frozen = [p.data for gpt in reference.gpt for p in gpt.parameters()]
    state = measured_state(trainer.policy, trainer.optimizer.megatron)

    def held() -> int:
        if has_cuda():
            synchronize()
            empty_cache()
            return torch.cuda.memory_allocated()
        buffers = [buffer.grad_data for chunk in trainer.policy.chunks for buffer in chunk.buffers]
        return sum(storages([*trainer.state(), *(p.data for p in frozen), *buffers]).values())

    before = {"state": digest(trainer.state()), "reference": digest(frozen)}
    bytes_held, device = [held()], [memory_gb().get("device", 0.0)]
    parked = on_host(reference, "reference")
    bytes_held.append(held())
    away = Offload(trainer.policy, trainer.optimizer.megatron, wanted=True)
    away.offload()
    bytes_held.append(held())
    device.append(memory_gb().get("device", 0.0))
    away.reload()
    with parked.on_device():
        bytes_held.append(held())
        after = {"state": digest(trainer.state()), "reference": digest(frozen)}
    norm = trainer.update(samples_for_test())
    return {
        "held": bytes_held,
        "device_gb": device,
        "reference": sum(storages(frozen).values())
        or sum(p.numel() * p.element_size() for p in frozen),
        "optimizer": state["gradients"] + state["main_params"] + state["moments"],
        "before": before,
        "after": after,
        "norm": norm,
    }


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Bytes measured and planned in the phases of ``tests.helpers.memory``: the engine is
    elsewhere.
    """
    prompt, response, size = (
        options["prompt_tokens"],
        options["response_tokens"],
        options["micro_batch_size"],
    )
    base = memory_base()
    trainer = Trainer.of(options)
    config, rng = (planned(trainer.config, prompt, response, size), np.random.default_rng(0))
    (stage,) = make_plan(config, Machine(gpus=1)).stages

    def ids(number: int) -> np.ndarray:
        return rng.integers(1, trainer.policy.arch.vocab_size, number)

    samples = [bare(ids(prompt), ids(response)) for _ in range(2 * size)]
    trainer.update(samples, size)  # makes the moments
    away = Offload(trainer.policy, trainer.optimizer.megatron, wanted=True)
    away.offload()
    measured = {"resting": allocated(trainer) - base}
    away.reload()
    reset_peak()
    trainer.update(samples, size)
    measured["update"] = peak(trainer) - base
    trainer.optimizer.zero_gradients()
    empty_cache()
    reset_peak()
    saver = Saver(
        Path(options["out"], "checkpoints"),
        0,
        1,
        background=True,
        replicas=trainer.topology.replica_group,
    )
    saver.begin(1, checkpoint_state(trainer.policy, trainer.optimizer, 1, RUN))
    measured["save"] = peak(trainer) - base
    saver.wait()
    without_engine = {"update": stage.total - stage.engine, "save": stage.saving - stage.engine}
    return {"measured": measured, "predicted": {"resting": stage.resting} | without_engine}


def planned(config: Config, prompt: int, response: int, size: int) -> Config:
    """A run whose micro-batches are those of :func:`memory`."""
    replace = dataclasses.replace
    return replace(
        config,
        data=replace(config.data, max_prompt_length=prompt, prompts_per_step=1),
        rollout=replace(
            config.rollout, max_response_length=response, group_size=2 * size, engine="transformers"
        ),
        training=replace(
            config.training,
            micro_batch_size=size,
            offload_optimizer_during_rollout=has_cuda(),
            updates_per_rollout=1,
        ),
    )


def memory_base() -> int:
    return torch.cuda.memory_allocated() if has_cuda() else 0


def reset_peak() -> None:
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()


def allocated(trainer: Trainer) -> int:
    return (
        torch.cuda.memory_allocated()
        if has_cuda()
        else sum(measured_state(trainer.policy, trainer.optimizer.megatron).values())
    )


def peak(trainer: Trainer) -> int:
    """The most since :func:`reset_peak`; the CPU counts only the state that is there."""
    return torch.cuda.max_memory_allocated() if has_cuda() else allocated(trainer)


def logprobs(options: dict[str, Any]) -> dict[str, Any]:
    """[mean, largest] |difference| of log-probs: packed and padded, each and transformers (fp32);
    and what transformers in ``dtype`` differs from itself in fp32, the floor.
    """
    samples, ours = samples_for_test(), {}
    for name, packing in (("padded", False), ("packed", True)):
        parallel = ParallelConfig(sequence_packing=packing)
        topology = initialize_layout(parallel)
        config = config_for_test(options["model"], options["dtype"], parallel, options["layers"])
        policy = build_policy(config.model, parallel, topology, training=False)
        splits = micro_batches(samples, 4)
        ours[name] = compute_logprobs(policy, samples, splits, temperature=1.0, packing=packing)
    exact, rounded = (
        of_transformers(options["model"], dtype, samples) for dtype in ("fp32", options["dtype"])
    )
    return {
        "packed, padded": gap(ours["packed"], ours["padded"]),
        "padded, transformers": gap(ours["padded"], exact),
        "packed, transformers": gap(ours["packed"], exact),
        "floor": gap(rounded, exact),
    }


def of_transformers(model: str, dtype: str, samples: list[TrainingSample]) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    # a checkpoint's values, rounded as the policy's are, computed with in ``dtype``
    network: Any = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch_dtype(dtype))
        .to(current_device())
        .eval()
    )
    found = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor(
                np.concatenate([sample.prompt_ids, sample.response_ids]), device=current_device()
            )[None]
            logp = torch.log_softmax(network(ids).logits[0].float(), -1)[
                len(sample.prompt_ids) - 1 : -1
            ]
            target = torch.tensor(sample.response_ids, device=current_device())[:, None]
            found.append(logp.gather(-1, target).squeeze(-1).cpu().numpy())
    return found


def gap(a: list[np.ndarray], b: list[np.ndarray]) -> list[float]:
    difference = np.abs(np.concatenate(a) - np.concatenate(b))
    return [float(difference.mean()), float(difference.max())]


def restart(options: dict[str, Any]) -> dict[str, Any]:
    """An engine samples, is closed and is restarted in this process: GB of the device in use, and
    what both sampled.
    """
    trainer = Trainer.of(options)
    plan, tokens = plan_for(trainer.policy, 1, 1 << 20), []
    used = [memory_gb().get("device", 0.0)]  # before, started, closed, started again
    settings = EngineOptions(
        dtype=options["dtype"],
        max_model_len=192,
        max_num_seqs=64,
        dummy_weights=True,
        arguments={"enforce_eager": options.get("eager", False)},
    )
    engine: Any = build_local_engine(options["engine"], options["model"], settings)
    for round_number in range(2):
        used.append(memory_gb().get("device", 0.0))
        engine.update_weights(export_buckets(trainer.policy, plan), 1)
        responses = engine.generate(prompts_for_test(), SamplingConfig(top_k=1, max_tokens=24), 0)
        tokens.append([response.token_ids.tolist() for response in responses])
        if round_number == 0:
            if options.get("asleep"):
                engine.sleep()
                engine._wake("weights")  # an update that fails closes it so
            getattr(engine, "close", lambda: None)()
            synchronize()
            used.append(memory_gb().get("device", 0.0))
            engine.restart()
    return {"device_gb": used, "tokens": tokens, "version": engine.weights_version}


WHAT = {
    function.__name__: function
    for function in (save_and_resume, offload, memory, logprobs, restart)
}


def run(options: dict[str, Any]) -> Any:
    return WHAT[options["what"]](options)
