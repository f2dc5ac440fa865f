"""How long a checkpoint keeps the loop waiting, against a copy of the state in memory; who writes
what; what is read; what the checksums cost by which a checkpoint shows that it is new.

    python benchmarks/run.py checkpoint

Policies of 28 and 105 million parameters with AdamW's state, 1 and 2 data-parallel ranks,
distributed optimizer, written in the background: blocked is the time until ``Saver.begin`` returns,
state gathered and planned, and that of ``Saver.finish`` once all ranks have written. The
alternative copies what the rank writes into memory that it has, in turns. Checksums are those of
``checkpoints/staleness.py``: the same save with and without them, in turns, from the marks of the
live state to the announcement, by the processor time of all threads.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, alone, in_turns, torchrun

ROUNDS = 1 if QUICK else 5
SHAPES = ("131k",) if QUICK else ("28M", "105M")


def measurements() -> Iterator[Measurement]:
    import policies

    with tempfile.TemporaryDirectory() as scratch:
        for shape in SHAPES:
            model = policies.write_policy(Path(scratch, shape), shape)
            for processes in (1, 2):
                out = Path(scratch, f"run{processes}")
                torchrun(processes, __file__, json.dumps({"model": str(model), "out": str(out)}))
                ranks = [
                    json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)
                ]
                yield from _compared(f"checkpoint/{shape}, {processes} rank(s)", ranks)
                shutil.rmtree(out)


def _compared(name: str, ranks: list[dict[str, Any]]) -> Iterator[Measurement]:
    same, total = (all(rank["same"] for rank in ranks), sum(rank["written"] for rank in ranks))
    slowest = max(ranks, key=lambda rank: min(rank["blocked"]))
    seconds = [min(slowest["blocked"]), min(slowest["clone"])]
    unit = f"s (wall time of the slowest rank, min of {ROUNDS})"
    reason, raw = f"{total / 1e6:.0f} MB", {"ranks": ranks}
    other = "a copy of what the rank writes, into memory that is there"
    described = min(slowest["planned"])
    facts = {"same": same, "bound": 1 + described / seconds[1]}
    facts["bound_is"] = (
        f"Megatron-core's description of the state takes {1e3 * described:.1f} ms, whatever its "
        "size"
    )
    yield Measurement(
        f"{name}, blocked", *seconds, unit, other, 1.2, reason=reason, raw=raw, **facts
    )
    seconds = [max(min(rank[key]) for rank in ranks) for key in ("busy", "busy_cloning")]
    unit = f"s (processor time of the loop's thread, of the slowest rank, min of {ROUNDS})"
    reason = (
        f"the difference, {1e3 * (seconds[0] - seconds[1]):.0f} ms, does not grow with the bytes"
    )
    facts["bound"] = 1 + described / seconds[1]
    yield Measurement(
        f"{name}, blocked, processor time", *seconds, unit, other, 1.2, reason=reason, **facts
    )
    with_them, without = (
        sum(map(min, (rank[key] for rank in ranks))) for key in ("proved", "bare")
    )
    yield Measurement(
        f"{name}, checksums",
        with_them,
        without,
        f"s (processor time of a whole save, all ranks, min of {ROUNDS})",
        "the same save without checksums and marks",
        1.05,
        same=same,
    )
    most = max(rank["written"] for rank in ranks)
    share, fair = f"{name}, largest share", total / len(ranks)
    yield Measurement(
        share,
        most,
        fair,
        "bytes written by the rank that writes most",
        "an even share",
        1.1,
        same=same,
    )
    read = sum(rank["read"] for rank in ranks)
    yield Measurement(
        f"{name}, read to resume",
        read,
        total,
        "bytes (read calls)",
        "bytes of the checkpoint",
        1.01,
        same=same,
    )


def worker(options: dict[str, Any]) -> None:
    import os
    import time
    from unittest.mock import patch

    import torch

    from megatron_dcpo.checkpoints import saver as module
    from megatron_dcpo.checkpoints.manifest import iteration_dir
    from megatron_dcpo.checkpoints.saver import Saver
    from megatron_dcpo.checkpoints.state import (
        RUN_PARTS,
        checkpoint_state,
        load_checkpoint,
        newest_intact,
    )
    from megatron_dcpo.runtime.distributed import barrier, destroy
    from megatron_dcpo.training.checkpointer import MegatronModel

    out = Path(options["out"])
    policy, optimizer = after_one_step(Path(options["model"]), out)
    topology = policy.topology
    model = MegatronModel(policy, optimizer)
    saver = Saver(out / "checkpoints", topology.rank, 1, True, topology.replica_group)
    numbers = iter(range(1, 100))
    run = {
        part: {}
        for part in RUN_PARTS
        if part not in ("iteration", "rng_state", "distributed_optimizer")
    }
    own: list[Any] = []
    kept: list[Any] = []
    blocked, planned, cloned, busy, busy_cloning = ([] for _ in range(5))  # type: list[list[float]]
    proved: list[float] = []
    bare: list[float] = []

    def save() -> None:
        barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        state = checkpoint_state(policy, optimizer, next(numbers), run)
        planned.append(time.perf_counter() - begin)
        saver.begin(state["run"]["iteration"], state, model.marks())
        blocked.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - cpu)
        assert saver._pending is not None
        assert saver._pending.work is not None
        assert saver._known is not None
        own[:] = [host for file in saver._known.files for _, _, host in file.tensors]
        saver._pending.work.join()
        barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        saver.finish()
        blocked[-1] += time.perf_counter() - begin
        busy[-1] += time.thread_time() - cpu
        saver.wait()

    def clone() -> int:
        kept[:] = kept or [tensor.clone() for tensor in own]
        barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        for to, tensor in zip(kept, own, strict=True):
            to.copy_(tensor)
        cloned.append(time.perf_counter() - begin)
        busy_cloning.append(time.thread_time() - cpu)
        return len(kept)

    def whole(seconds: list[float], marks: Any) -> None:
        barrier()
        begin = time.process_time()
        state = checkpoint_state(policy, optimizer, next(numbers), run)
        saver.begin(state["run"]["iteration"], state, marks())
        saver.wait()
        seconds.append(time.process_time() - begin)

    def prove() -> None:
        whole(proved, model.marks)

    def save_bare() -> None:
        none = dict.fromkeys(("checksums", "checksums_of_values"), lambda _: {})
        with patch.multiple(module, **none):
            whole(bare, dict)

    save()
    clone()
    for warm in (blocked, planned, busy, cloned, busy_cloning):
        warm.clear()
    in_turns(ROUNDS, warm_up=0, save=save, clone=clone)
    in_turns(ROUNDS, warm_up=0, prove=prove, save_bare=save_bare)
    before = [tensor.detach().clone() for tensor in trained(policy, optimizer)]
    latest, _ = newest_intact(out / "checkpoints", topology)
    start = read_bytes()
    newest_intact(out / "checkpoints", topology)
    assert latest is not None
    load_checkpoint(out / "checkpoints", latest, policy, optimizer)
    read = read_bytes() - start
    after = trained(policy, optimizer)
    files = iteration_dir(out / "checkpoints", latest).glob(f"__{topology.rank}_*")
    result = {
        "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "blocked": blocked,
        "planned": planned,
        "clone": cloned,
        "read": read,
        "proved": proved,
        "bare": bare,
        "busy": busy,
        "busy_cloning": busy_cloning,
        "written": sum(file.stat().st_size for file in files),
    }
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    destroy()


def after_one_step(model: Path, run_dir: Path) -> tuple[Any, Any]:
    """Policy, optimizer with its moments."""
    import policies

    from megatron_dcpo.config import load_config
    from megatron_dcpo.policy.model import build_policy
    from megatron_dcpo.policy.optimizer import PolicyOptimizer
    from megatron_dcpo.runtime.distributed import initialize

    options = policies.overrides(model, run_dir, 1, 2, 8, "parallel.use_distributed_optimizer=true")
    config = load_config(str(policies.QUICKSTART / "grpo.yaml"), options)
    policy = build_policy(config.model, config.parallel, initialize())
    optimizer = PolicyOptimizer(policy, config)
    optimizer.zero_gradients()
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_()
    optimizer.megatron.step()
    return policy, optimizer


def trained(policy: Any, optimizer: Any) -> list[Any]:
    """Parameters and moments."""
    from megatron_dcpo.policy.optimizer import optimizer_parts

    states = [
        state
        for part in optimizer_parts(optimizer.megatron)
        for state in part.optimizer.state.values()
    ]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return [*(p for gpt in policy.gpt for p in gpt.parameters()), *moments]


def read_bytes() -> int:
    """What this process has read, from the page cache or not; mapped files do not count."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    alone("checkpoint", measurements, worker)
