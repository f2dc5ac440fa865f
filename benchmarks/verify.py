r"""Verification throughput: the pool against math-verify in one process, on the same pairs in the
same run.

    python benchmarks/verify.py --keys FILE [--pairs 5000] [--pathological 20] [--workers 2]

The pairs are made from real keys (``.parquet``, ``.json`` or ``.jsonl`` with an answer): the key
itself, the key spelt in another way, and the key of another problem, a third each. Each
pathological pair keeps sympy busy for ever. The baseline is ``parse`` and ``verify`` of math-verify
as published, one pair after another, with its own timeouts (5 s each): without them it would not
end. Where its alarm cannot interrupt, its process is ended after ``--patience`` seconds and started
again. Printed: seconds and pairs per second of both, their ratio, the ratio on the ordinary pairs
alone, and how the verdicts differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from measurement import DATA, QUICK, Measurement, absent, not_installed

from megatron_dcpo.data import load_records
from megatron_dcpo.judging.math.pool import VerifierPool

PATHOLOGICAL = (
    r"\sum_{{k=1}}^{{10000000}} \frac{{1}}{{k^2+k+{0}}}",
    r"\prod_{{k=1}}^{{3000000}} \left(1+\frac{{1}}{{k^2+{0}}}\right)",
    r"9^{{9^{{9^{{{0}}}}}}}+x",
    r"({0}0000000)!+x",
)
CHUNKS = 5
Pair = tuple[str, str]


def make_pairs(
    keys: list[str], count: int, pathological: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    generator = random.Random(seed)
    ordinary = []
    for i in range(count - pathological):
        key = generator.choice(keys)
        answer = key if i % 3 == 0 else respelt(key) if i % 3 == 1 else generator.choice(keys)
        ordinary.append((answer, key))
    hanging = [
        (PATHOLOGICAL[i % len(PATHOLOGICAL)].format(7 + i), "5x") for i in range(pathological)
    ]
    return ordinary, hanging


def respelt(key: str) -> str:
    """The same answer as a model might write it."""
    if re.fullmatch(r"-?\d+", key):
        return f"{int(key):,}" if len(key) > 3 else f"x = {key}"
    return (
        key.replace("\\frac", "\\dfrac")
        .replace("\\left", "")
        .replace("\\right", "")
        .replace(" ", "")
    )


def naive(answer: str, key: str) -> bool:
    from math_verify import parse, verify

    try:
        return bool(verify(parse(f"${key}$"), parse(f"\\boxed{{{answer}}}")))
    except Exception:
        return False


def serve(connection: Connection) -> None:
    naive("x+1", "1+x")
    connection.send(True)
    while True:
        connection.send(naive(*connection.recv()))


def baseline(pairs: list[Pair], patience: float) -> tuple[list[bool], float, int]:
    """One process, one pair at a time. Its start is not timed."""
    verdicts: list[bool] = []
    seconds, ended = 0.0, 0
    context = multiprocessing.get_context("spawn")
    process = None
    for pair in pairs:
        if process is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            ours.recv()
        begin = time.monotonic()
        ours.send(pair)
        answered = ours.poll(patience)
        verdicts.append(ours.recv() if answered else False)
        seconds += time.monotonic() - begin
        if not answered:
            process.kill()
            process, ended = None, ended + 1
    if process is not None:
        process.kill()
    return verdicts, seconds, ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", required=True, help="data set whose answers are the keys")
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--pathological", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result, differ = compare(
        args.keys, args.pairs, args.pathological, args.workers, args.patience, args.seed
    )
    print(json.dumps(result, indent=1))
    for (answer, key), a, b in differ[:20]:
        print(f"  pool {a}, math-verify {b}: {answer!r} against {key!r}")


def compare(
    path: str, count: int, pathological: int, workers: int, patience: float, seed: int
) -> tuple[dict[str, Any], list[tuple[Pair, bool, bool]]]:
    """Both on the same pairs, in turns; the numbers, and the pairs whose verdicts differ."""
    keys = [record.answer for record in load_records(path, task="keys")]
    ordinary, hanging = make_pairs(keys, count, pathological, seed)

    pool = VerifierPool(workers)
    pool.verify(
        [(f"x+{i}", f"{i}+x") for i in range(64)]
    )  # both sides are timed with their processes started
    ours: list[bool] = []
    theirs: list[bool] = []
    our_ordinary = their_ordinary = 0.0
    size = -(-len(ordinary) // CHUNKS)
    for start in range(0, len(ordinary), size):  # in turns: other load on the machine meets both
        chunk = ordinary[start : start + size]
        begin = time.monotonic()
        ours += pool.verify(chunk)
        our_ordinary += time.monotonic() - begin
        verdicts, seconds, _ = baseline(chunk, patience)
        theirs, their_ordinary = theirs + verdicts, their_ordinary + seconds
    begin = time.monotonic()
    ours += pool.verify(hanging)
    our_seconds = our_ordinary + time.monotonic() - begin
    late, their_hanging, ended = baseline(hanging, patience)
    theirs += late
    their_seconds = their_ordinary + their_hanging
    pool.close()

    differ = [
        (pair, a, b) for pair, a, b in zip(ordinary + hanging, ours, theirs, strict=True) if a != b
    ]
    result = {
        "pairs": count,
        "pathological": pathological,
        "workers": workers,
        "load_average": os.getloadavg(),
        "pool": {
            "seconds": our_seconds,
            "pairs_per_second": count / our_seconds,
            **vars(pool.statistics),
        },
        "math_verify": {
            "seconds": their_seconds,
            "pairs_per_second": count / their_seconds,
            "ended": ended,
        },
        "ratio": their_seconds / our_seconds,
        "ratio_without_pathological": their_ordinary / our_ordinary,
        "differing_verdicts": len(differ),
        "only_pool_accepts": sum(a for _, a, _ in differ),
    }
    return result, differ


def measurements() -> Iterator[Measurement]:
    """2,000 pairs from MATH-500's keys, 4 of which hang."""
    what = (
        "verify",
        "s (wall time of 2,000 pairs, 4 hanging)",
        "math-verify 0.9.0 in one process, its own timeouts",
    )
    file = DATA / "math500" / "test.jsonl"
    if importlib.util.find_spec("math_verify") is None:
        yield absent(*what, not_installed("math-verify==0.9.0"), goal=1.0)
    elif not file.exists():
        yield absent(*what, f"no {file}", goal=1.0)
    else:
        pairs, hanging = (40, 1) if QUICK else (2000, 4)
        result, differ = compare(str(file), pairs, hanging, 2, 20.0, 0)
        name, unit, other_is = what
        ours, theirs = (result[side]["seconds"] for side in ("pool", "math_verify"))
        reason = f"{len(differ)} verdicts differ (at most 2 % may: the pool knows more forms)"
        same = len(differ) <= 0.02 * pairs
        yield Measurement(
            name, ours, theirs, unit, other_is, goal=1.0, same=same, reason=reason, raw=result
        )


if __name__ == "__main__":
    main()
