"""One rank: export a policy together with the others, and say which files this rank wrote."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_dcpo.config import ModelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.training.weight_sync import writers_of
from megatron_dcpo.weights import hf_checkpoint
from megatron_dcpo.weights.reshard import gather_full
from tests.distributed.cases.common import initialize_layout, parallel_config


def run(options: dict[str, Any]) -> dict[str, Any]:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    model = ModelConfig(path=options["model"], params_dtype="fp32", transformer_impl="local")
    policy = build_policy(model, parallel, topology, training=False)
    written: list[str] = []
    write_tensors = hf_checkpoint.write_tensors

    def noted(path: Path, shard: hf_checkpoint.Shard, read: Callable[[str], torch.Tensor]) -> None:
        if options.get("fails_on") == dist.get_rank():
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path.name)
        write_tensors(path, shard, read)

    error = ""
    with mock.patch.object(hf_checkpoint, "write_tensors", noted):
        try:
            hf_checkpoint.write_checkpoint(
                out=Path(options["export"]),
                source_dir=Path(options["model"]),
                arch=policy.arch,
                dtype=torch.float32,
                collect=lambda shapes: gather_full(policy, shapes),
                writers=writers_of(topology),
                max_bytes=options["max_bytes"],
            )
        except UserError as raised:
            error = str(raised)
    dist.barrier()
    return {"written": written, "error": error}
