"""One rank that saves after each of three updates, and then writes its former copies once more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.checkpoints import saver as module
from megatron_dcpo.checkpoints.manifest import checksums_in, iteration_dir, iterations
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.config.sections import AdapterConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.adapter import build_adapter_optimizer
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.training.checkpointer import MegatronModel
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config
from tests.helpers.saving import unrefreshed

RUN = dict.fromkeys(("seed", "data", "reward", "engine"), 0)


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], options["dtype"], parallel, lr=1e-6)
    if options["adapter"]:
        config = replace(config, model=replace(config.model, adapter=AdapterConfig(rank=2)))
    policy = build_policy(config.model, parallel, topology)
    if options["adapter"]:
        optimizer = build_adapter_optimizer(config, policy)
    else:
        optimizer = PolicyOptimizer(policy, config)
    model = MegatronModel(policy, optimizer)
    directory = Path(options["out"], "_".join([options["dtype"], *options["parallel"]]))
    saver = Saver(directory, topology.rank, 3, background=True, replicas=topology.replica_group)

    def update_and_save(iteration: int) -> None:
        update(policy, optimizer)
        state = model.state(iteration, RUN)
        saver.begin(iteration, state, model.marks())
        saver.wait()

    for iteration in (1, 2, 3):
        update_and_save(iteration)
    sums = [checksums_in(iteration_dir(directory, number)) for number in iterations(directory)]
    if topology.rank == 1:
        module._refreshed = unrefreshed
    try:
        update_and_save(4)
        error = None
    except UserError as refused:
        error = str(refused)
    return {"sums": sums, "error": error, "iterations": iterations(directory)}


def update(policy: Any, optimizer: Any) -> None:
    """Update by random gradients, equal where ranks hold the same."""
    optimizer.zero_gradients()
    generator = torch.Generator().manual_seed(policy.topology.pp_rank)
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_(generator=generator)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.megatron is None:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
    if optimizer.megatron is None:
        optimizer.adam.step()
    else:
        optimizer.megatron.step()
    optimizer.scheduler.step(1)
