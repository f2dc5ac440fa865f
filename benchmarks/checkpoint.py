"""How long a checkpoint keeps the loop waiting, against a copy of the state in memory; who writes what; what is read.

    python benchmarks/run.py checkpoint

A 28-million-parameter policy with AdamW's state, 1 and 2 data-parallel ranks, distributed optimizer, written in the
background: blocked is the time until ``Saver.begin`` returns, state gathered and planned. The alternative clones what
the rank writes, in turns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import Measurement, alone, in_turns, torchrun

ROUNDS = 5


def measurements() -> Iterator[Measurement]:
    import policies

    with tempfile.TemporaryDirectory() as scratch:
        model = policies.write_policy(Path(scratch, "policy"), "28M")
        for processes in (1, 2):
            out = Path(scratch, f"run{processes}")
            torchrun(processes, __file__, json.dumps({"model": str(model), "out": str(out)}))
            ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]
            yield from _compared(f"checkpoint/{processes} rank(s)", ranks)


def _compared(name: str, ranks: list[dict[str, Any]]) -> Iterator[Measurement]:
    same, total = all(rank["same"] for rank in ranks), sum(rank["written"] for rank in ranks)
    slowest = max(ranks, key=lambda rank: min(rank["blocked"]))
    seconds = [min(slowest["blocked"]), min(slowest["clone"])]
    unit = f"s (wall time of the slowest rank, min of {ROUNDS})"
    reason = f"{total / 1e6:.0f} MB; planning alone {min(slowest['planned']):.3f} s, whatever the size of the state"
    raw = {"ranks": ranks}
    other = "a copy of what the rank writes"
    yield Measurement(f"{name}, blocked", *seconds, unit, other, 1.2, same=same, reason=reason, raw=raw)
    seconds = [max(min(rank[key]) for rank in ranks) for key in ("busy", "busy_cloning")]
    unit = f"s (processor time of the loop's thread, of the slowest rank, min of {ROUNDS})"
    yield Measurement(f"{name}, blocked, processor time", *seconds, unit, other, 1.2, same=same)
    most = max(rank["written"] for rank in ranks)
    share, fair = f"{name}, largest share", total / len(ranks)
    yield Measurement(share, most, fair, "bytes written by the rank that writes most", "an even share", 1.1, same=same)
    read = sum(rank["read"] for rank in ranks)
    reason = "read calls; the check of the digests and the loading each go through the files"
    yield Measurement(
        f"{name}, read to resume", read, total, "bytes", "bytes of the checkpoint", 1.0, same=same, reason=reason
    )


def worker(options: dict[str, Any]) -> None:
    import os
    import time

    import policies
    import torch

    from megatron_dcpo.checkpoints.manifest import iteration_dir
    from megatron_dcpo.checkpoints.saver import Saver
    from megatron_dcpo.checkpoints.state import RUN_PARTS, checkpoint_state, load_checkpoint, newest_intact
    from megatron_dcpo.config import load_config
    from megatron_dcpo.policy.model import build_policy
    from megatron_dcpo.policy.optimizer import build_optimizer, zero_gradients
    from megatron_dcpo.runtime.distributed import barrier, destroy, initialize

    out = Path(options["out"])
    more = ["parallel.use_distributed_optimizer=true"]
    config = load_config(
        str(policies.QUICKSTART / "grpo.yaml"), policies.overrides(Path(options["model"]), out, 1, 2, 8, *more)
    )
    topology = initialize()
    policy = build_policy(config.model, config.parallel, topology)
    optimizer, scheduler = build_optimizer(config, policy)
    zero_gradients(policy, optimizer)
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_()
    optimizer.step()
    saver = Saver(out / "checkpoints", topology.rank, 1, True, topology.dp_group)
    numbers = iter(range(1, 100))
    run = {part: {} for part in RUN_PARTS if part not in ("iteration", "rng_state", "distributed_optimizer")}
    own: list[Any] = []
    blocked, planned, cloned, busy, busy_cloning = ([] for _ in range(5))  # type: list[list[float]]

    def save() -> None:
        barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        state = checkpoint_state(policy, optimizer, scheduler, next(numbers), run)
        planned.append(time.perf_counter() - begin)
        saver.begin(state["run"]["iteration"], state)
        blocked.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - cpu)
        assert saver._pending is not None
        buckets = saver._pending.writer.write_buckets
        own[:] = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors] or own
        saver.wait()

    def clone() -> int:
        """All of it at a time, in memory that is new, as a save needs it."""
        barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        copies = [tensor.clone() for tensor in own]
        cloned.append(time.perf_counter() - begin)
        busy_cloning.append(time.thread_time() - cpu)
        return len(copies)

    save()
    for warm in (blocked, planned, busy):
        warm.clear()
    in_turns(ROUNDS, warm_up=0, save=save, clone=clone)
    before = [tensor.detach().clone() for tensor in trained(policy, optimizer)]
    latest, _ = newest_intact(out / "checkpoints", topology)
    start = read_bytes()
    newest_intact(out / "checkpoints", topology)
    assert latest is not None
    load_checkpoint(out / "checkpoints", latest, policy, optimizer, scheduler)
    read = read_bytes() - start
    after = trained(policy, optimizer)
    files = iteration_dir(out / "checkpoints", latest).glob(f"__{topology.rank}_*")
    result = {
        "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "blocked": blocked, "planned": planned, "clone": cloned, "read": read, "busy": busy, "busy_cloning": busy_cloning,
        "written": sum(file.stat().st_size for file in files),
    }  # fmt: skip
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    destroy()


def trained(policy: Any, optimizer: Any) -> list[Any]:
    """Parameters and moments."""
    from megatron_dcpo.policy.optimizer import optimizer_parts

    states = [state for part in optimizer_parts(optimizer) for state in part.optimizer.state.values()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return [*(p for gpt in policy.gpt for p in gpt.parameters()), *moments]


def read_bytes() -> int:
    """What this process has read, from the page cache or not; mapped files do not count."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    alone("checkpoint", measurements, worker)
