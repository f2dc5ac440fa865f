"""The server that ``dcpo launch --engines`` starts: its command, its devices, its watch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import server_launch
from megatron_dcpo.rollout.server_launch import EngineServer, server_command
from megatron_dcpo.rollout.server_link import BROKEN
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.training.run import longest_of
from megatron_dcpo.weights.table import engine_weight_bytes
from tests.helpers.paths import QUICKSTART

# says which cores it has; its weights are broken after a POST
SCRIPT = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    broken = False
    def log_message(self, *_): pass
    def do_POST(self):
        type(self).broken = True
        self.do_GET()
    def do_GET(self):
        name = b'{"weight_version": "broken"}' if self.broken else b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)
print("cores", sorted(os.sched_getaffinity(0)), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineServer:
    monkeypatch.setattr(server_launch, "_PAUSE_SECONDS", 0.05)
    cores = os.sched_getaffinity(0)
    port = free_port()
    made = EngineServer(
        [sys.executable, "-S", "-c", SCRIPT, str(port)],
        f"http://127.0.0.1:{port}/v1",
        1,
        1,
        tmp_path / "run" / "log",
    )
    rest = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        assert (rest, made.cores) == (cores - {max(cores)}, [max(cores)])
    return made


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_ends_is_started_again(
    server: EngineServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with server:
        first = server.process
        assert first is not None
        os.kill(first.pid, signal.SIGUSR1)  # a scheduler's warning is for the ranks
        time.sleep(0.2)
        assert first.poll() is None
        first.kill()
        wait_until(lambda: server.process is not first and server._healthy())
    assert server.process is not None
    assert server.process.wait(10) == -signal.SIGTERM
    assert "the engines' server ended with status -9" in capfd.readouterr().err
    lines = server.log.read_text().splitlines()
    assert len([line for line in lines if line.startswith("cores")]) == 2
    if server.cores:
        assert set(lines) == {f"cores {server.cores}"}


def test_a_server_that_an_update_has_broken_is_started_again(server: EngineServer) -> None:
    with server:
        first = server.process
        server.client.call("/update_weight_version", {"new_version": BROKEN})
        wait_until(lambda: server.process is not first and server._healthy())
        assert not server._broken()


def test_a_server_that_cannot_start_is_an_error(server: EngineServer) -> None:
    server.command = [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]
    with pytest.raises(UserError, match="ended with status 1 before it answered"), server:
        pass
    assert "no such model" in server.log.read_text()


def test_another_server_at_the_address_is_an_error(server: EngineServer, tmp_path: Path) -> None:
    with server:
        again = EngineServer(server.command, server.url, 10**6, 1, tmp_path / "log")
        with pytest.raises(UserError, match=r"answers at .* already"), again:
            pass


def test_the_engines_have_the_devices_behind_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        server_launch, "capabilities", lambda: SimpleNamespace(separate_memory=True)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for own, first, expected in ((None, 6, "6,7"), ("3,4,5,6", 2, "5,6"), (None, 0, "0,1")):
        if own:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        made = EngineServer([], "http://h:1/v1", first, 2, tmp_path)
        assert made.environment["CUDA_VISIBLE_DEVICES"] == expected
        assert made.environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in made.environment, "that is the trainer's"


def test_an_engine_of_several_gpus() -> None:
    two = "rollout.tensor_model_parallel_size=2"
    config = load_config(QUICKSTART / "async.yaml", [two])
    found = dict(pairwise(server_command(config, 4, 48)))
    sizes = (found["--tensor-parallel-size"], found["--data-parallel-size"])
    assert sizes == ("2", "2")
    for other in ("", "python server.py"):
        with pytest.raises(UserError, match=r"parallel_size=2 .*--engines"):
            server_command(config, 3, 48, other)
    heads = read_architecture(QUICKSTART / "policy").num_attention_heads
    many = f"rollout.tensor_model_parallel_size={2 * heads}"
    config = load_config(QUICKSTART / "async.yaml", [many])
    with pytest.raises(UserError, match="attention heads"):
        server_command(config, 2 * heads, 48)


def test_without_a_gpu_the_engines_share_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each would take its share of the whole host, and bind to a NUMA node of its own."""
    monkeypatch.setattr(server_launch, "host_memory_available", lambda: 64 << 20)
    config = load_config(QUICKSTART / "async.yaml")
    shares = []
    for engines in (1, 2, 4):
        found = dict(pairwise(server_command(config, engines, 48)))
        shares.append(engines * int(found["--kv-cache-memory-bytes"]))
    assert max(shares) <= 0.6 * (64 << 20)
    made = EngineServer([], "http://h:1/v1", 10**6, 2, tmp_path)
    assert made.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_the_commands_of_a_launch() -> None:
    config = load_config(
        QUICKSTART / "async.yaml", ["model.params_dtype=bf16", "model.head_dtype=fp32"]
    )
    own = server_command(config, 1, 48, "python server.py --swift")
    assert own[:5] == ["python", "server.py", "--swift", "--model", str(config.model.path)]
    assert own[5:] == [
        "--host",
        "127.0.0.1",
        "--port",
        "8011",
        "--max-num-seqs",
        "512",
        "--dtype",
        "bfloat16",
    ]
    command = server_command(config, 8, 48)
    found = dict(pairwise(command))
    assert (found["--data-parallel-size"], found["--max-model-len"]) == ("8", "48")
    assert found["--tensor-parallel-size"] == "1"
    assert (found["--dtype"], found["--logprobs-mode"]) == ("bfloat16", "processed_logprobs")
    assert found["--generation-config"] == "vllm", (
        "the model's own defaults would bend the distribution that is trained on"
    )
    assert found["--hf-overrides"] == '{"head_dtype": "float32"}'
    assert "--quantization" not in command
    with pytest.raises(
        UserError, match=r"--engines is for rollout\.engine=server, not transformers"
    ):
        server_command(load_config(QUICKSTART / "dcpo.yaml"), 1, 48)


def test_a_server_is_told_to_quantize_and_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_launch, "host_memory_available", lambda: 8 << 20)
    options = ["model.params_dtype=bf16", "objective.tis_level=token"]
    plain = server_command(load_config(QUICKSTART / "async.yaml", options), 1, 48)
    options.append("rollout.vllm.quantization=fp8_per_block")
    config = load_config(QUICKSTART / "async.yaml", options)
    for other in ("", "python server.py"):
        found = dict(pairwise(server_command(config, 1, 48, other)))
        assert found["--quantization"] == "fp8_per_block"
    before, after = (
        int(dict(pairwise(command))["--kv-cache-memory-bytes"])
        for command in (plain, server_command(config, 1, 48))
    )
    arch = read_architecture(config.model.path)
    assert after - before == engine_weight_bytes(arch, 2, None) - engine_weight_bytes(
        arch, 2, "fp8_per_block"
    )


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("http://localhost:8011/v1", "localhost"), ("http://node02:8000/v1", "0.0.0.0")],
)
def test_a_server_for_other_nodes_is_bound_to_all_interfaces(endpoint: str, host: str) -> None:
    config = load_config(QUICKSTART / "async.yaml", [f"rollout.endpoint={endpoint}"])
    found = dict(pairwise(server_command(config, 1, 48)))
    assert found["--host"] == host


def test_a_launcher_starts_one_of_several_servers() -> None:
    two = "rollout.endpoint=http://node1:8000/v1,http://node2:8000/v1"
    config = load_config(QUICKSTART / "async.yaml", [two])
    with pytest.raises(UserError, match=r"--engines .*rollout\.endpoint names 2"):
        server_command(config, 1, 48)


def test_servers_of_several_nodes_have_logs_of_their_own() -> None:
    names = [server_launch.log_name(f"http://{host}:1/v1") for host in ("a", "b", "localhost")]
    assert names == ["engines-a.log", "engines-b.log", "engines.log"]


def test_held_out_problems_count_in_the_longest_sequence(tmp_path: Path) -> None:
    trained = load_config(QUICKSTART / "async.yaml")
    assert longest_of(trained) == 16 + trained.rollout.max_response_length
    problems = tmp_path / "long.jsonl"
    row = {"problem": "+".join(["1"] * 40) + "=", "answer": "40"}
    problems.write_text(json.dumps(row) + "\n")
    validated = load_config(
        QUICKSTART / "async.yaml",
        [f"evaluation.benchmarks=long={problems}", "evaluation.interval=1"],
    )
    assert longest_of(validated) > 80 + trained.rollout.max_response_length - 8


def test_a_server_is_asked_without_the_proxy_of_the_environment(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with server:
        assert server._healthy()
        with pytest.raises(HttpError):
            JsonClient(server.url, timeout=2.0).call("/health")
