"""How much longer do others wait for ``dcpo serve`` while one bad exchange runs? The median time of
an answer in turns, quiet and during the exchange, in one run.

    python benchmarks/serve_neighbours.py

The bad exchanges: a reply of 30 MB of log-probs, an event of 4 MB in pieces of 16 KB, an event
without an end, a reply without an end, a request's body that is too large, and 300 requests that
are half sent. The upstream is a stand-in in a process of its own; it, the proxy and the client
share the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measurement import QUICK, REPOSITORY, Measurement, alone, environment
from serve_overhead import _free_port, _wait_for

from megatron_dcpo.evaluation.posthoc_predictors import Posthoc

GOAL = 2.0
ROUNDS = 1 if QUICK else 3
PAUSE = 0.01  # between two answers to the neighbour
QUIET_SECONDS = 0.3 if QUICK else 2.0
PIECE = 16 << 10
MB = 1 << 20


def worker(options: dict[str, Any]) -> None:
    """The upstream, in a process of its own."""
    asyncio.run(upstream(options["port"]))


async def upstream(port: int) -> None:
    """Says in ``user`` of a request which exchange it is."""
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0] or 0)
            content = await reader.readexactly(length)
            kind = json.loads(content).get("user", "") if content else "models"
            stream = kind.startswith("event")
            form = "text/event-stream" if stream else "application/json"
            writer.write(
                f"HTTP/1.1 200 OK\r\ncontent-type: {form}\r\n"
                "transfer-encoding: chunked\r\n\r\n".encode()
            )
            for piece in pieces_of(kind):
                writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


def pieces_of(kind: str) -> Iterator[bytes]:
    if kind == "models":
        yield b'{"object":"list","data":[{"id":"policy"}]}'
    elif kind == "reply of 30 MB":
        content = reply_of(tokens=40_000, tops=10)
        for at in range(0, len(content), PIECE):
            yield content[at : at + PIECE]
    elif kind == "reply without end":
        for _ in range(200 * MB // PIECE):
            yield b" " * PIECE
    elif kind.startswith("event"):
        yield b"data: "
        for _ in range((4 if kind == "event of 4 MB" else 64) * MB // PIECE):
            yield b"x" * PIECE
        yield b"\n\ndata: [DONE]\n\n"
    else:
        yield reply_of(tokens=30, tops=0)


def reply_of(tokens: int, tops: int) -> bytes:
    row = {
        "token": " word",
        "logprob": -0.1234567,
        "bytes": list(b" word"),
        "top_logprobs": [
            {"token": f"t{k}", "logprob": -1.5 - k, "bytes": [1]} for k in range(tops)
        ],
    }
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * tokens},
        "logprobs": {"content": [row] * tokens},
        "finish_reason": "stop",
    }
    return json.dumps({"id": "a", "choices": [choice]}).encode()


EXCHANGES = (
    *("reply of 30 MB", "reply without end", "event of 4 MB", "event without end"),
    *("a large body", "half-sent requests"),
)


async def exchange(kind: str, port: int) -> None:
    """One bad exchange, from its first byte to its end."""
    if kind == "half-sent requests":
        writers = []
        for _ in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
            writers.append(writer)
        await asyncio.sleep(QUIET_SECONDS)
        for writer in writers:
            writer.close()
    elif kind == "a large body":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = 200 * MB
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n" % size
        )
        try:
            for _ in range(size // PIECE):
                writer.write(b"x" * PIECE)
                await writer.drain()
            await reader.read()
        except OSError:
            pass
        writer.close()
    else:
        await ask(port, kind)


async def ask(port: int, kind: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "2*3="}],
        "user": kind,
        "stream": kind.startswith("event"),
    }
    content = json.dumps(body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content)
    )
    writer.write(content)
    found = b""
    while piece := await reader.read(MB):
        found = (found + piece)[-MB:]
    writer.close()
    return found


async def neighbour(port: int, during: asyncio.Task[Any]) -> list[float]:
    """Seconds of a neighbour's answers until a task has ended."""
    seconds = []
    while not during.done():
        start = time.perf_counter()
        found = await ask(port, "neighbour")
        seconds.append(time.perf_counter() - start)
        assert b'"confidence":0.' in found, found[:500]
        await asyncio.sleep(PAUSE)
    return seconds


async def in_turns(kind: str, port: int) -> tuple[list[float], list[float]]:
    quiet: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        pause = asyncio.ensure_future(asyncio.sleep(QUIET_SECONDS))
        quiet += await neighbour(port, pause)
        bad = asyncio.ensure_future(exchange(kind, port))
        beside += await neighbour(port, bad)
        await bad
    return quiet, beside


def measurements() -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        calibrator = Path(folder, "confidence.npz")
        weights = {
            "mean": np.zeros(6),
            "deviation": np.ones(6),
            "slopes": np.full(6, 0.01),
            "intercept": np.array(0.3),
        }
        Posthoc("logistic", "response", weights).save(calibrator)
        ports = [_free_port(), _free_port()]
        commands = [
            [sys.executable, __file__, json.dumps({"port": ports[0]})],
            [
                *(sys.executable, "-m", "megatron_dcpo", "serve"),
                *("--endpoint", f"http://127.0.0.1:{ports[0]}/v1"),
                *("--calibrator", str(calibrator), "--accept-mismatch"),
                *("--port", str(ports[1])),
            ],
        ]
        processes = []
        try:
            for command, port in zip(commands, ports, strict=True):
                processes.append(subprocess.Popen(command, env=environment(), cwd=REPOSITORY))
                _wait_for(port)
            asyncio.run(ask(ports[1], "neighbour"))
            for kind in EXCHANGES:
                yield measured(kind, ports[1])
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def measured(kind: str, port: int) -> Measurement:
    quiet, beside = asyncio.run(in_turns(kind, port))
    return Measurement(
        f"serve_neighbours: {kind}",
        1000 * statistics.median(beside),
        1000 * statistics.median(quiet),
        "ms until another client has its answer (median)",
        "without the exchange",
        goal=GOAL,
        reason=f"{len(beside)} and {len(quiet)} answers; longest {1000 * max(beside):.0f} ms; "
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores",
        raw={
            name: [round(1000 * float(np.percentile(values, q)), 2) for q in (10, 50, 90, 100)]
            for name, values in (("quiet_ms", quiet), ("beside_ms", beside))
        },
    )


if __name__ == "__main__":
    alone("serve_neighbours", measurements, worker)
