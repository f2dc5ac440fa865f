"""Rank 0 trains, the others are workers of a vLLM server each: weights over gloo instead of NCCL,
requests over HTTP. The workers answer vLLM's routes and unpack by its protocol.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.rollout import server_tensors, vllm_server
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.runtime import device, distributed
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes
from tests.helpers.packed import unpacked


class Gloo:
    """The trainer and one worker, as vLLM's communicator."""

    def __init__(self, worker: int) -> None:
        self.group = dist.new_group([0, worker], backend="gloo")

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(tensor, src=src, group=self.group)


class Worker(BaseHTTPRequestHandler):
    """vLLM's routes. ``init_info`` says how the messages are cut, as a worker of vLLM learns it."""

    group: Gloo
    init_info: dict[str, Any]
    updates: list[dict[str, str]]
    received: list[int]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        known: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info": {"logprobs_mode": "processed_logprobs"},
            "/weight_info": {"weight_version": "0"},
            "/get_world_size": {"world_size": 1},
        }
        self._send(known[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/init_weight_transfer_engine":
            type(self).init_info = body["init_info"]
        if self.path == "/start_weight_update":
            self.updates.append({})
        if self.path == "/update_weights":
            limit = self.init_info["packed_buffer_size_bytes"]
            tensors = unpacked(body["update_info"], limit, self._receive)
            self.updates[-1].update(digests(tensors))
        self._send({})

    def _receive(self, nbytes: int) -> Tensor:
        message = torch.empty(nbytes, dtype=torch.uint8)
        self.group.broadcast(message, src=0)
        self.received.append(nbytes)
        return message

    def _send(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return what changes with any bit of a tensor, its type or its shape."""
    found = {}
    for name, tensor in tensors.items():
        values = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        text = f"{tensor.dtype} {list(tensor.shape)} ".encode() + values
        found[name] = hashlib.sha256(text).hexdigest()
    return found


def run(options: dict[str, Any]) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    groups = [Gloo(worker) for worker in range(1, dist.get_world_size())]
    if dist.get_rank() == 0:
        return train(options, groups)
    return serve(groups[dist.get_rank() - 1])


def serve(group: Gloo) -> dict[str, Any]:
    """Answer until the trainer is done; return digests of each update, and bytes of messages."""
    Worker.group, Worker.updates, Worker.received = group, [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = [0] * dist.get_world_size()
    dist.all_gather_object(ports, server.server_address[1])
    dist.barrier()
    server.shutdown()
    return {"updates": Worker.updates, "received": Worker.received}


def train(options: dict[str, Any], groups: list[Gloo]) -> dict[str, Any]:
    """Send two versions; return their digests, and what was sent to each server."""
    ports = [0] * dist.get_world_size()
    dist.all_gather_object(ports, 0)
    waiting = iter(groups)
    common: Any = ModuleType("nccl_common")
    common.trainer_init = lambda info: next(waiting)
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed")}
    modules["vllm.distributed.weight_transfer"] = ModuleType("weight_transfer")
    modules["vllm.distributed.weight_transfer.nccl_common"] = common
    versions = []
    with (
        mock.patch.dict("sys.modules", modules),
        mock.patch.object(vllm_server, "find_spec", str),
        mock.patch.object(device, "_CPU", device._GPU),
        mock.patch.object(distributed, "topology", return_value=SimpleNamespace(rank=0)),
        mock.patch.object(distributed, "barrier"),
        mock.patch.object(distributed, "max_over_ranks", lambda value: value),
        mock.patch.object(distributed, "broadcast_object", lambda value: value),
        mock.patch.object(server_tensors, "MESSAGE_BYTES", options["message_bytes"]),
        mock.patch.object(server_tensors, "CALL_BYTES", options["call_bytes"]),
    ):
        endpoints = [f"http://127.0.0.1:{port}" for port in ports[1:]]
        engine = ServerEngine(endpoints, options["model"], None)
        for version in (1, 2):
            weights = random_weights(options["model"], version)
            engine.update_weights(in_buckets(weights), version)
            versions.append(digests(weights))
    dist.barrier()
    sent = [(link.sent.messages, link.sent.nbytes) for link in engine.links]
    return {"updates": versions, "sent": sent}


def random_weights(model: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(read_architecture(model))
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def in_buckets(weights: dict[str, Tensor]) -> list[list[WeightSlice]]:
    """Return the weights in slices of at most 100 rows, 7 of them in a bucket."""
    pieces = []
    for name, tensor in weights.items():
        for start in range(0, len(tensor), 100):
            pieces.append(WeightSlice(name, 0, start, tensor[start : start + 100]))
    return [pieces[first : first + 7] for first in range(0, len(pieces), 7)]
