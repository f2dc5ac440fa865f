"""How fast state leaves a GPU for its host and comes back: what off-loading the optimizer costs a
step.

    python benchmarks/host_copies.py [--gib 8] [--pretend]

GB/s each way, from pinned memory, which ``runtime/host_memory.py`` uses, and from memory that is
not; on each NUMA node. ``--pretend``: between two places of the host, 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path


def cpus_of_nodes() -> dict[str, set[int]]:
    """Return the CPUs of each NUMA node that this process may use."""
    allowed, nodes = os.sched_getaffinity(0), {}
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cpus: set[int] = set()
        for part in (node / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1)) if first else set()
        if cpus & allowed:
            nodes[node.name] = cpus & allowed
    return nodes or {"all": allowed}


def rate(copy: Callable[[], object], wait: Callable[[], object], size: int) -> float:
    """Return GB/s of the best of three copies."""
    best = float("inf")
    for _ in range(3):
        wait()
        began = time.perf_counter()
        copy()
        wait()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--pretend", action="store_true")
    args = parser.parse_args()
    import torch

    size = 2**26 if args.pretend else int(args.gib * 2**30)
    device, wait = ("cpu", lambda: None) if args.pretend else ("cuda", torch.cuda.synchronize)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    for node, cpus in cpus_of_nodes().items():
        os.sched_setaffinity(0, cpus)
        for pinned in (True, False):
            here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and not args.pretend)
            here.zero_()  # its pages come from the node of these CPUs
            away = rate(lambda here=here: here.copy_(there, non_blocking=True), wait, size)
            back = rate(lambda here=here: there.copy_(here, non_blocking=True), wait, size)
            print(
                json.dumps(
                    {
                        "node": node,
                        "pinned": pinned,
                        "to_host": round(away, 2),
                        "to_device": round(back, 2),
                    }
                )
            )
            del here


if __name__ == "__main__":
    main()
