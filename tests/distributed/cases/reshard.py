"""One rank of a weight synchronization that is disturbed: a slow reader, a dead one, an engine that
refuses, a NaN.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcpo.config import ModelConfig
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.reshard import (
    SynchronizationError,
    Traffic,
    export_buckets,
    not_finite,
    plan_for,
)
from megatron_dcpo.weights.reshard_plan import engine_slice
from tests.distributed.cases.common import initialize_layout, parallel_config


def receive(policy, plan, traffic, mode, engine_tp):
    """Take all buckets as an engine would; returns whether every slice equals the checkpoint's, bit
    for bit.
    """
    rank, reader, same = dist.get_rank(), HFReader(os.environ["MODEL"]), True
    arrived: dict[str, tuple[int, int]] = {}
    with closing(export_buckets(policy, plan, traffic)) as buckets:
        for number, bucket in enumerate(buckets, 1):
            if mode == "slow" and rank == 1:
                time.sleep(0.05)  # the others must not overwrite what is being read
            if mode == "dead" and rank == 1 and number == 3:
                os._exit(17)
            if mode == "refuses" and rank == 1 and number == 3:
                raise ValueError("the engine says no")
            for piece in bucket:
                length = piece.values.shape[piece.dim]
                whole = reader.tensor(piece.name)
                same &= torch.equal(
                    piece.values.float(), whole.narrow(piece.dim, piece.start, length).float()
                )
                first, stop = arrived.get(piece.name, (piece.start, piece.start))
                same &= stop == piece.start  # large ones come in pieces, one after the other
                arrived[piece.name] = (first, stop + length)
    return same and all(
        arrived[name] == engine_slice(policy.arch, name, engine_tp, rank % engine_tp)[1:]
        for name in reader.specs
    )


def run(options: dict[str, Any]) -> Any:
    os.environ["MODEL"] = options["model"]
    parallel, mode = parallel_config(options["parallel"]), options["mode"]
    topology = initialize_layout(parallel)
    policy = build_policy(
        ModelConfig(path=options["model"], params_dtype="fp32"), parallel, topology, training=False
    )
    if mode == "nan" and topology.rank == 1:
        next(iter(policy.parameters(0).values()))[0, 0] = float("nan")
    plan, traffic = (plan_for(policy, options["engine_tp"], options["bucket_bytes"]), Traffic())
    result = {"not_finite": not_finite(policy), "buckets": len(plan.buckets)}
    started = time.monotonic()
    try:
        result["same"] = receive(policy, plan, traffic, mode, options["engine_tp"])
    except (SynchronizationError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result |= {
        "seconds": time.monotonic() - started,
        "received": traffic.received,
        "peak": traffic.peak,
    }
    result |= {"planned": plan.received[topology.rank], "planned_peak": plan.peak_bytes}
    return result
