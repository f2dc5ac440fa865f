"""Counts what starting a job costs in process groups: calls of ``new_group``, and the connections
of rank 0 over gloo.

    python benchmarks/process_groups.py [--tp 2]

No rank but this one exists: torch's fake backend takes the place of all others. Every group has
gloo for what travels from the host, which connects each pair of its ranks. With a device for
``init_process_group`` each call would also be an ``ncclCommSplit`` of the whole world.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

SIZES = (8, 32, 64, 128, 512)


def count(world_size: int, tp: int) -> dict[str, int]:
    """Return the calls and the connections of rank 0 in a world of ``world_size`` ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    calls, connections, new_group = 0, world_size - 1, dist.new_group

    def counted(ranks: list[int] | None = None, **options: Any) -> Any:
        nonlocal calls, connections
        calls += 1
        members = range(world_size) if ranks is None else ranks
        connections += len(members) - 1 if 0 in members else 0
        return new_group(ranks, backend="fake")

    dist.new_group = counted
    from megatron_dcpo.runtime.megatron_on_cpu import ensure

    ensure()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    return {"ranks": world_size, "new_group": calls, "connections": connections}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        print(json.dumps(count(args.ranks, args.tp)))
        return
    for size in SIZES:
        command = [sys.executable, __file__, "--tp", str(args.tp), "--ranks", str(size)]
        print(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(),
            flush=True,
        )


if __name__ == "__main__":
    main()
