"""A weight synchronization against a copy of the same bytes: what is received, how long it takes,
what planning costs.

    python benchmarks/run.py reshard

A 28-million-parameter policy in 1, 2 and 4 ranks hands its weights to engines of one rank each. The
alternative copies the whole weights in the memory of every rank, in turns. Every rank's engine must
hold the checkpoint's bits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, alone, in_turns, torchrun

LAYOUTS = {"1 rank": (1, 1), "TP 2": (2, 1), "PP 2": (1, 2), "TP 2 x PP 2": (2, 2)}
SHAPE, DTYPES, ROUNDS = ("131k", ("fp32",), 1) if QUICK else ("28M", ("bf16", "fp32"), 7)


def measurements() -> Iterator[Measurement]:
    import policies

    with tempfile.TemporaryDirectory() as scratch:
        for dtype in DTYPES:
            model = policies.write_policy(
                Path(scratch, dtype), SHAPE, dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype]
            )
            for name, (tp, pp) in LAYOUTS.items():
                if QUICK and tp * pp > 2:
                    continue
                options = {"model": str(model), "dtype": dtype, "tp": tp, "pp": pp, "out": scratch}
                torchrun(tp * pp, __file__, json.dumps(options))
                ranks = [
                    json.loads(Path(scratch, f"rank{rank}.json").read_text())
                    for rank in range(tp * pp)
                ]
                yield from _compared(f"reshard/{name}, {dtype}", ranks)


def _compared(name: str, ranks: list[dict[str, Any]]) -> Iterator[Measurement]:
    same = all(rank["same"] for rank in ranks)
    most = max(ranks, key=lambda rank: rank["received"])
    if most["least"]:
        unit, other = "bytes received by the busiest rank", "the least possible"
        yield Measurement(
            f"{name}, bytes", most["received"], most["least"], unit, other, 1.0, same=same
        )
    seconds = [max(min(rank[side]) for rank in ranks) for side in ("ours", "copy")]
    unit = f"s (wall time of the slowest rank, min of {ROUNDS})"
    reason = (
        f"{ranks[0]['bytes'] / 1e6:.0f} MB into every engine, "
        f"{most['received'] / 1e6:.0f} MB of them received"
    )
    facts: dict[str, Any] = {"same": same, "reason": reason, "raw": {"ranks": ranks}}
    wired = max(min(rank["copy and wire"]) for rank in ranks) if most["received"] else seconds[1]
    other = "a copy of the same bytes and the same messages over bare gloo"
    if most["received"]:
        facts |= {"bound": wired / seconds[1], "bound_is": other}
    yield Measurement(f"{name}, time", *seconds, unit, "a copy of the same bytes", 2.0, **facts)
    if most["received"]:
        yield Measurement(
            f"{name}, time with the wire", seconds[0], wired, unit, other, 2.0, same=same
        )
    planned, again = (max(rank[key] for rank in ranks) for key in ("planned_s", "planned_again_s"))
    unit = "s to have the plan of the second synchronization"
    yield Measurement(f"{name}, planning", again, planned, unit, "the first", 0.1, same=same)


def worker(options: dict[str, Any]) -> None:
    import os
    import time

    import torch
    import torch.distributed as dist

    from megatron_dcpo.config import ModelConfig, ParallelConfig
    from megatron_dcpo.policy.model import build_policy
    from megatron_dcpo.runtime.distributed import destroy, initialize
    from megatron_dcpo.weights.hf_checkpoint import HFReader
    from megatron_dcpo.weights.reshard import Traffic, export_buckets, plan_for
    from megatron_dcpo.weights.table import hf_shapes

    parallel = ParallelConfig(
        tensor_model_parallel_size=options["tp"], pipeline_model_parallel_size=options["pp"]
    )
    topology = initialize(parallel.sizes)
    settings = ModelConfig(
        path=options["model"], params_dtype=options["dtype"], transformer_impl="local"
    )
    policy = build_policy(settings, parallel, topology, training=False)
    dtype = next(iter(policy.parameters(0).values())).dtype
    engine = {
        name: torch.zeros(shape, dtype=dtype) for name, shape in hf_shapes(policy.arch).items()
    }
    reader = HFReader(options["model"], policy.arch)
    source = {name: reader.tensor(name).to(dtype).clone() for name in engine}
    planning = []
    for _ in range(2):
        begin = time.perf_counter()
        plan = plan_for(policy)
        planning.append(time.perf_counter() - begin)
    traffic = Traffic()

    def synchronize() -> None:
        dist.barrier()
        traffic.received = 0
        with closing(export_buckets(policy, plan, traffic)) as buckets:
            for bucket in buckets:
                for piece in bucket:
                    piece.write_into(engine[piece.name])

    def copy() -> None:
        dist.barrier()
        for name, tensor in engine.items():
            tensor.copy_(source[name])

    for tensor in engine.values():
        tensor.zero_()
    synchronize()
    same = all(torch.equal(tensor, source[name]) for name, tensor in engine.items())
    group, rank = (topology.model_group, topology.pp_rank * topology.tp_size + topology.tp_rank)
    flat = torch.empty(
        max((m.numel for bucket in plan.buckets for m in bucket.messages), default=0), dtype=dtype
    )

    def wire() -> None:
        """The same messages, of no tensor in particular."""
        dist.barrier()
        for message in (message for bucket in plan.buckets for message in bucket.messages):
            values = flat[: message.numel]
            if len(message.readers) == dist.get_world_size(group) - 1:
                dist.broadcast(values, group=group, group_src=message.owner)
            elif rank == message.owner:
                for reader in message.readers:
                    dist.send(values, group=group, group_dst=reader)
            elif rank in message.readers:
                dist.recv(values, group=group, group_src=message.owner)

    turns = in_turns(ROUNDS, ours=synchronize, copy=copy, wire=wire)
    result = {"same": same, "received": traffic.received, "least": plan.least[topology.rank]}
    result |= {
        "bytes": sum(t.nbytes for t in engine.values()),
        "ours": turns["ours"].wall,
        "copy": turns["copy"].wall,
    }
    result["copy and wire"] = [
        a + b for a, b in zip(turns["copy"].wall, turns["wire"].wall, strict=True)
    ]
    result |= {"planned_s": planning[0], "planned_again_s": planning[1]}
    Path(options["out"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    destroy()


if __name__ == "__main__":
    alone("reshard", measurements, worker)
