"""What a rehearsal showed, as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

GB = 1e9
_SHOWN_WAITS = 8


def report_lines(ranks: Sequence[dict[str, Any]], gpus: int) -> Iterator[str]:
    """Yield the lines of a report on the ``ranks`` of a job."""
    yield (
        "Rehearsed: the job's own code, once, on tensors that hold nothing, the first and the last "
        f"tensor-parallel rank of every pipeline stage of {gpus} GPUs."
    )
    yield "Not rehearsed: values, kernels, time, NCCL, the engine's own memory."
    for rank in ranks:
        yield ""
        yield from _rank_lines(rank)


def _rank_lines(rank: dict[str, Any]) -> Iterator[str]:
    batch = rank["batch"]
    yield (
        f"rank {rank['rank']}, stage {rank['stage']}: {batch['updates']} update(s) of "
        f"{batch['micro_batches']} micro-batch(es) of {rank['tokens']:,} tokens"
    )
    yield f"  {'':24}{'device, GB':>20}{'host, GB':>11}{'TFLOP':>11}{'waits':>8}"
    yield f"  {'':24}{'after':>10}{'peak':>10}"
    for phase in rank["phases"]:
        yield (
            f"  {phase['name']:24}{phase['live'] / GB:10.2f}{phase['peak'] / GB:10.2f}"
            f"{phase['host'] / GB:11.2f}{phase['flops'] / 1e12:11.1f}"
            f"{sum(phase['waits'].values()):8}"
        )
    fullest = max(rank["phases"], key=lambda phase: phase["peak"])
    yield f"  largest at the peak of {fullest['name']}:"
    for made in fullest["largest"]:
        of = f" ({made['of']})" if made["of"] else ""
        yield f"    {made['nbytes'] / GB:8.2f} GB  {made['line']}{of}"
    update = next(phase for phase in rank["phases"] if phase["name"] == "update")
    yield "  sent in these updates:"
    for sent in update["traffic"]:
        yield (
            f"    {sent['nbytes'] / GB:8.2f} GB  {sent['count']:5} x {sent['operation']} "
            f"({sent['group']})"
        )
    if update["waits"]:
        yield "  the host waits for the device in these updates:"
    most = sorted(update["waits"].items(), key=lambda wait: -wait[1])
    for line, count in most[:_SHOWN_WAITS]:
        yield f"    {count:5} x {line}"
    if len(most) > _SHOWN_WAITS:
        yield f"    and {len(most) - _SHOWN_WAITS} more lines"
