"""``dcpo plan --reshard``: what a weight synchronisation moves, computed without a process group or a weight."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_dcpo.errors import UserError


def reshard_facts(config: Any, gpus: int | None = None) -> dict[str, Any]:
    """The plan of one synchronisation as plain data; bytes. Raises :class:`UserError` on a layout that does not fit."""
    from megatron_dcpo.planning.state import ITEMSIZE
    from megatron_dcpo.training.preflight import check_model, layout_of
    from megatron_dcpo.weights.reshard_plan import reshard_plan

    arch, layout = check_model(config), layout_of(config)
    model_parallel = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    engine_tp = config.rollout.tensor_model_parallel_size
    gpus = gpus if gpus is not None else max(model_parallel, engine_tp)
    for what, size in (("training TP x PP", model_parallel), ("rollout.tensor_model_parallel_size", engine_tp)):
        if gpus < 1 or gpus % size:
            raise UserError(f"--gpus {gpus} is not a multiple of {what} = {size}")
    itemsize = ITEMSIZE[config.model.params_dtype]
    replicas = gpus // model_parallel
    plan = reshard_plan(arch, layout, engine_tp, replicas, config.rollout.bucket_bytes, itemsize)
    return {
        "model": config.model.path,
        "training_layout": asdict(layout),
        "engine_tensor_model_parallel_size": engine_tp,
        "replicas": replicas,
        "buckets": len(plan.buckets),
        "messages": sum(len(bucket.messages) for bucket in plan.buckets),
        "bucket_bytes": plan.bucket_bytes,
        "peak_bytes": plan.peak_bytes,
        "checksum": plan.checksum,
        "ranks": [
            {
                "rank": rank,
                "received": received,
                "least": plan.least[rank],
                "least_whole_tensors": plan.least_whole[rank],
            }
            for rank, received in enumerate(plan.received)
        ],
    }


def reshard_lines(facts: dict[str, Any]) -> list[str]:
    layout = facts["training_layout"]
    lines = [
        f"training TP {layout['tensor_model_parallel_size']} x PP {layout['pipeline_model_parallel_size']}, "
        f"{facts['replicas']} replica(s) -> engines of TP {facts['engine_tensor_model_parallel_size']}",
        f"{facts['buckets']} buckets of at most {_size(facts['bucket_bytes'])}, {facts['messages']} messages, "
        f"peak extra memory {_size(facts['peak_bytes'])}, plan {facts['checksum']}",
    ]
    lines.append(f"{'rank of replica':>15} {'received':>12} {'least':>12} {'if whole tensors':>17}")
    for row in facts["ranks"]:
        sizes = (_size(row[key]) for key in ("received", "least", "least_whole_tensors"))
        lines.append("{:>15} {:>12} {:>12} {:>17}".format(row["rank"], *sizes))
    return lines


def _size(nbytes: int) -> str:
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} B"
