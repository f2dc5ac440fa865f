"""How much later does an answer come through ``dcpo serve`` than from the server behind it? 200
requests at a time, in turns with and without the proxy, in one run.

    python benchmarks/serve_overhead.py

The upstream is a stand-in in a process of its own: it answers a chat of 200 tokens after 1 to 3
seconds, the same for the same request, and with the log-probs of all tokens if it is asked for
them, as the proxy does (a logistic regression on log-probs). The added time is the median over
requests of the difference to the same request without the proxy. The proxy, the upstream and the
client share the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measurement import QUICK, REPOSITORY, Measurement, alone, environment

from megatron_dcpo.evaluation.posthoc_predictors import Posthoc

CONCURRENT = 200
GOAL_MS = 5.0
TOKENS = 200
REQUESTS = 200 if QUICK else 1000
ROUNDS = 1 if QUICK else 3
SHORTEST, LONGEST = (0.05, 0.1) if QUICK else (1.0, 3.0)


def worker(options: dict[str, Any]) -> None:
    """The upstream, in a process of its own."""
    upstream(options["port"])


def upstream(port: int) -> None:
    import uvicorn

    plain, logged = (_reply(with_logprobs) for with_logprobs in (False, True))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content = b""
        more = True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        answer = b'{"object":"list","data":[{"id":"policy"}]}'
        if scope["path"].endswith("/completions"):
            body = json.loads(content)
            await asyncio.sleep(body["seed"])
            answer = logged if body.get("logprobs") else plain
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(app, port=port, log_level="error", access_log=False)
    uvicorn.Server(config).run()


def _reply(with_logprobs: bool) -> bytes:
    tokens = [f" w{i % 97}" for i in range(TOKENS - 4)]
    tokens += [" \\boxed{6}", "\n", "<conf>", " Confidence: 0.83"]
    logged = None
    if with_logprobs:
        rows = [
            {"token": t, "logprob": -0.1, "bytes": list(t.encode()), "top_logprobs": []}
            for t in tokens
        ]
        logged = {"content": rows}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(tokens)},
        "logprobs": logged,
        "finish_reason": "stop",
    }
    reply = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    return json.dumps(reply).encode()


async def ask_all(port: int) -> tuple[list[float], list[Any]]:
    """Seconds of each request, and the confidences that the answers have."""
    generator = np.random.default_rng(0)
    pauses = generator.uniform(SHORTEST, LONGEST, REQUESTS).tolist()
    seconds = [0.0] * REQUESTS
    found: list[Any] = [None] * REQUESTS
    todo = iter(range(REQUESTS))

    async def client(first: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(first)  # requests come one after the other, not all at once
        for number in todo:
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": "2*3="}],
                "seed": pauses[number],
            }
            content = json.dumps(body).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            start = time.perf_counter()
            writer.write(head.encode() + content)
            answer_head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(answer_head.partition("content-length: ")[2].split("\r\n")[0])
            answer = await reader.readexactly(length)
            seconds[number] = time.perf_counter() - start
            found[number] = json.loads(answer)["choices"][0].get("confidence")
        writer.close()

    await asyncio.gather(*(client(i / CONCURRENT) for i in range(CONCURRENT)))
    return seconds, found


def measurements() -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        calibrator = Path(folder, "confidence.npz")
        weights = {
            "mean": np.zeros(6),
            "deviation": np.ones(6),
            "slopes": np.full(6, 0.1),
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
            yield compare(ports, psutil.Process(processes[1].pid))
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def compare(ports: list[int], proxy: psutil.Process) -> Measurement:
    direct: list[float] = []
    proxied: list[float] = []
    confidences: list[Any] = []
    before = sum(proxy.cpu_times()[:2])
    for _ in range(ROUNDS):
        direct += asyncio.run(ask_all(ports[0]))[0]
        seconds, found = asyncio.run(ask_all(ports[1]))
        proxied += seconds
        confidences += found
    cpu_ms = 1000 * (sum(proxy.cpu_times()[:2]) - before) / len(proxied)
    added = [1000 * (b - a) for a, b in zip(direct, proxied, strict=True)]
    return Measurement(
        "serve_overhead",
        statistics.median(added),
        GOAL_MS,
        f"ms added to an answer (median of {len(added)}, {CONCURRENT} at a time)",
        f"the goal of {GOAL_MS:g} ms",
        goal=1.0,
        same=all(confidence is not None for confidence in confidences),
        reason=f"{cpu_ms:.2g} ms of processor time an answer; load {os.getloadavg()[0]:.1f} "
        f"on {len(os.sched_getaffinity(0))} cores",
        raw={
            "added_ms": {
                f"p{q}": round(float(np.percentile(added, q)), 3) for q in (10, 50, 90, 99)
            },
            "direct_s": round(statistics.median(direct), 4),
            "proxied_s": round(statistics.median(proxied), 4),
            "proxy_cpu_ms": round(cpu_ms, 3),
        },
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


if __name__ == "__main__":
    alone("serve_overhead", measurements, worker)
