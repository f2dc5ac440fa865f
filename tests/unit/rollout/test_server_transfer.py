"""Weights to a server, as files and over NCCL: what rank 0 says and sends. The server and the NCCL
group are stand-ins.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import server_tensors, vllm_server
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.server_tensors import connection, described, in_calls, packed
from megatron_dcpo.rollout.vllm_server import ServerEngine, _address_towards
from megatron_dcpo.runtime import device
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.packed import WORKER_STREAMS, broadcasts
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes, stored_shapes
from tests.helpers.checkpoints import save_model
from tests.helpers.packed import unpacked
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import without_others

POLICY = QUICKSTART / "policy"
ARCH = read_architecture(POLICY)
MESSAGE_BYTES, CALL_BYTES = 10_000, 40_000  # several of each for this policy


@dataclass
class Group:
    """Stands in for vLLM's communicator: the server's workers receive what it broadcasts."""

    server: Server
    destroyed: bool = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self.server.arrived.append(tensor.clone())  # the bucket may be overwritten afterwards

    def destroy(self) -> None:
        self.destroyed = True


@dataclass
class Server:
    """vLLM's routes: what they were asked, and the weights that came of it. As its workers do, it
    forgets an update that fails, and refuses to finish it then.
    """

    asked: list[tuple[str, Any]] = field(default_factory=list)
    arrived: list[torch.Tensor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    refuse: str = ""
    version: str = "default"
    in_update: bool = False

    def call(self, path: str, body: Any = None, **_: Any) -> Any:
        self._follow(path, body)
        self.asked.append((path, body))
        return {
            "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"id": "m"}]},
            "/server_info?config_format=json": {"logprobs_mode": "processed_logprobs"},
            "/get_world_size": {"world_size": 2},
        }.get(path, {})

    def _follow(self, path: str, body: Any) -> None:
        """gpu_worker.py of vLLM 0.32 and 0.33."""
        wants_update = path in ("/update_weights", "/finish_weight_update")
        wants_none = path in ("/start_weight_update", "/shutdown_weight_transfer_engine")
        if (wants_update and not self.in_update) or (wants_none and self.in_update):
            raise HttpError("500: not in this state", 500)
        if path == self.refuse:
            if path == "/update_weights":
                self.in_update = False
            raise HttpError("500: no such backend", 500)
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.in_update = path == "/start_weight_update"
        if path == "/update_weight_version":
            self.version = body["new_version"]

    def start_again(self) -> None:
        self.asked.clear()
        self.arrived.clear()
        self.refuse = ""
        self.version = "default"
        self.in_update = False

    def trainer_init(self, info: dict[str, Any]) -> Group:
        self.groups.append(Group(self))
        self.opened = info
        return self.groups[-1]

    def weights(self) -> dict[str, torch.Tensor]:
        calls = [body["update_info"] for path, body in self.asked if path == "/update_weights"]
        messages = iter(self.arrived)
        tensors: dict[str, torch.Tensor] = {}
        for told in calls:
            came = unpacked(told, MESSAGE_BYTES, receive=lambda nbytes: next(messages))
            assert not came.keys() & tensors.keys()
            tensors |= came
        assert not list(messages)
        return tensors


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    common: Any = ModuleType("nccl_common")
    common.trainer_init = made.trainer_init
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", common)
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: name)
    monkeypatch.setattr(device, "_CPU", device._GPU)
    monkeypatch.setattr(
        JsonClient, "call", lambda self, path, body=None, **_: made.call(path, body)
    )
    monkeypatch.setattr(vllm_server, "_REFUSED_SECONDS", 0.1)
    monkeypatch.setattr(server_tensors, "MESSAGE_BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(server_tensors, "CALL_BYTES", CALL_BYTES)
    without_others(monkeypatch)
    return made


def cut(weights: dict[str, torch.Tensor], parts: int, per_bucket: int) -> list[list[WeightSlice]]:
    """Every matrix in ``parts`` of its rows, some in the other order, as several owners send them;
    in buckets.
    """
    pieces = []
    for number, (name, tensor) in enumerate(weights.items()):
        rows = list(torch.arange(len(tensor)).tensor_split(parts if tensor.dim() > 1 else 1))
        for one in reversed(rows) if number % 2 else rows:
            pieces.append(WeightSlice(name, 0, int(one[0]), tensor[one]))
    return [pieces[start : start + per_bucket] for start in range(0, len(pieces), per_bucket)]


def random_weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).bfloat16() for name, shape in hf_shapes(ARCH).items()}


@pytest.mark.parametrize(("parts", "per_bucket"), [(1, 1), (3, 5), (2, 1000)])
def test_the_server_gets_every_tensor_whole(server: Server, parts: int, per_bucket: int) -> None:
    engine, weights = (ServerEngine(["http://127.0.0.1:1"], POLICY, None), random_weights())
    for version in (1, 2):
        server.asked.clear()
        server.arrived.clear()
        weights = random_weights()
        engine.update_weights(cut(weights, parts, per_bucket), version)
        if ARCH.tied_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        arrived = server.weights()
        assert arrived.keys() == weights.keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in weights.items())
        paths = [
            path for path, _ in server.asked if path not in ("/update_weights", "/weight_info")
        ]
        first = ["/get_world_size", "/init_weight_transfer_engine"] if version == 1 else []
        after = [
            "/update_weight_version",
            "/start_weight_update",
            "/finish_weight_update",
            "/update_weight_version",
            "/reset_prefix_cache",
            "/update_weight_version",
        ]
        assert paths == first + after
        assert server.asked[-1][1] == {"new_version": str(version)}
        assert engine.weights_version == version
    assert len(server.groups) == 1, "one group for all updates"


FIRST, SECOND = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture
def second(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Another server; ``FIRST`` and ``SECOND`` are the addresses of both."""
    other = Server()
    at = {FIRST: server, SECOND: other}
    nccl: Any = sys.modules["vllm.distributed.weight_transfer.nccl_common"]

    def trainer_init(info: dict[str, Any]) -> Group:
        """The group is that of the server that was told of it last."""
        waiting = [
            one
            for one in at.values()
            if ("/init_weight_transfer_engine", {"init_info": connection(info)}) in one.asked
        ]
        return waiting[-1].trainer_init(info)

    monkeypatch.setattr(nccl, "trainer_init", trainer_init)
    monkeypatch.setattr(
        JsonClient, "call", lambda self, path, body=None, **_: at[self.url].call(path, body)
    )
    return other


def test_every_server_gets_the_tensors_in_a_group_of_its_own(
    server: Server, second: Server
) -> None:
    engine = ServerEngine([FIRST, SECOND], POLICY, None)
    weights = random_weights()
    engine.update_weights(cut(weights, 3, 5), 1)
    for one in (server, second):
        arrived = one.weights()
        assert all(torch.equal(arrived[name], weights[name]) for name in weights)
        assert len(one.groups) == 1
        assert one.asked[-1] == ("/update_weight_version", {"new_version": "1"})


def test_the_servers_load_at_the_same_time(
    server: Server, second: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers a call of tensors when the other one has been told as well."""
    both = threading.Barrier(2, timeout=20)

    def answer(self: Server, path: str, body: Any = None, **_: Any) -> Any:
        if path == "/update_weights":
            both.wait()
        return call(self, path, body)

    call = Server.call
    monkeypatch.setattr(Server, "call", answer)
    engine = ServerEngine([FIRST, SECOND], POLICY, None)
    engine.update_weights(cut(random_weights(), 2, 7), 1)
    assert engine.weights_version == 1


def test_messages_are_few_and_counted(server: Server) -> None:
    engine = ServerEngine([FIRST], POLICY, None)
    engine.update_weights(cut(random_weights(), 1, 3), 1)
    planned = broadcasts(ARCH, itemsize=2, message_bytes=MESSAGE_BYTES, call_bytes=CALL_BYTES)
    (link,) = engine.links
    assert (link.sent.messages, link.sent.nbytes) == (planned.messages, planned.nbytes)
    assert [path for path, _ in server.asked].count("/update_weights") == planned.calls
    assert planned.calls < planned.messages < len(server.weights())
    assert planned.largest == max(message.numel() for message in server.arrived)


def test_every_tensor_begins_where_its_type_can_be_read() -> None:
    """A constant in fp32 behind an odd number of bf16 numbers: views of bytes must be aligned."""
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(5), "c": torch.randn(7).bfloat16()}
    (call,) = in_calls(tensors.items())
    messages = iter(packed(call))
    came = unpacked(described(call), MESSAGE_BYTES, receive=lambda nbytes: next(messages))
    assert came.keys() == tensors.keys()
    assert all(torch.equal(came[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "refuse", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_server_in_which_an_update_fails_is_used_when_it_was_started_again(
    server: Server, second: Server, refuse: str
) -> None:
    """The others lose their group and no update."""
    engine = ServerEngine([FIRST, SECOND], POLICY, None)
    second.refuse = refuse
    with pytest.raises(EngineError, match=SECOND):
        engine.update_weights(cut(random_weights(), 2, 7), 1)
    for one in (server, second):
        assert [group.destroyed for group in one.groups] == [True]
    assert (server.version, second.version) == ("whole", "broken")
    assert not server.in_update
    assert server.asked[-1][0] == "/shutdown_weight_transfer_engine"
    second.refuse = ""
    with pytest.raises(EngineError, match=SECOND):
        engine.update_weights(cut(random_weights(), 2, 7), 1)
    with pytest.raises(UserError, match=SECOND):
        engine.servers[1].wait_for_return(deadline=0.0)
    second.start_again()
    engine.restart()
    server.asked.clear()
    server.arrived.clear()
    weights = random_weights()
    engine.update_weights(cut(weights, 2, 7), 1)
    for one in (server, second):
        assert one.version == "1"
        assert torch.equal(one.weights()["model.norm.weight"], weights["model.norm.weight"])


def test_an_update_of_a_run_that_was_killed_breaks_the_server(server: Server) -> None:
    server.version = "in an update"
    engine = ServerEngine([FIRST], POLICY, None)
    with pytest.raises(EngineError, match=FIRST):
        engine.update_weights(cut(random_weights(), 2, 7), 1)
    assert (server.version, server.arrived) == ("broken", [])


def test_an_engine_that_hangs_behind_its_server_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Server, path: str, body: Any = None, **_: Any) -> Any:
        if path == "/weight_info":
            raise HttpError("the reply was not complete in time")
        return call(self, path, body)

    call = Server.call
    monkeypatch.setattr(Server, "call", answer)
    with pytest.raises(UserError, match=r"rollout\.endpoint.* start it again"):
        ServerEngine([FIRST], POLICY, None)


def test_every_server_reads_the_same_directory(
    server: Server, second: Server, tmp_path: Path
) -> None:
    engine = ServerEngine([FIRST, SECOND], POLICY, tmp_path / "exchange")
    engine.update_weights(cut(random_weights(), 2, 5), 1)
    told = []
    for one in (server, second):
        told += [body for path, body in one.asked if path == "/collective_rpc"]
        assert one.asked[-1] == ("/update_weight_version", {"new_version": "1"})
    assert told[0] == told[1]
    second.refuse = "/collective_rpc"
    with pytest.raises(EngineError, match=SECOND):
        engine.update_weights(cut(random_weights(), 2, 5), 2)
    assert engine.weights_version == 1
    assert (server.version, second.version) == ("whole", "broken")


def test_files_are_complete_and_older_ones_go(server: Server, tmp_path: Path) -> None:
    engine = ServerEngine(["http://127.0.0.1:1"], POLICY, tmp_path / "exchange")
    for version in (1, 2):
        weights = random_weights()
        engine.update_weights(cut(weights, 2, 5), version)
        told = next(body for path, body in reversed(server.asked) if path == "/collective_rpc")
        directory = Path(told["kwargs"]["weights_path"])
        assert (
            [path.name for path in (tmp_path / "exchange").iterdir()]
            == [directory.name]
            == [f"version_{version}"]
        )
        reader = HFReader(directory)
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in weights.items())
    server.refuse = "/collective_rpc"
    with pytest.raises(EngineError, match="no such backend"):
        engine.update_weights(cut(weights, 2, 5), 3)
    assert engine.weights_version == 2


def test_fused_projections_are_files_as_the_checkpoint_has_them(
    server: Server, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "hf", "phi3")
    arch = read_architecture(source)
    engine = ServerEngine(["http://127.0.0.1:1"], source, tmp_path / "exchange")
    weights = {name: torch.randn(shape) for name, shape in hf_shapes(arch).items()}
    engine.update_weights(cut(weights, 2, 5), 1)
    (directory,) = (tmp_path / "exchange").iterdir()
    assert load_file(directory / "model.safetensors").keys() == stored_shapes(arch).keys()
    reader = HFReader(directory, arch)
    for name, tensor in weights.items():
        assert torch.equal(reader.tensor(name), tensor), name


def test_the_workers_are_told_of_the_group_that_the_trainer_opens(server: Server) -> None:
    ServerEngine(["http://127.0.0.1:1"], POLICY, None).update_weights(
        cut(random_weights(), 1, 9), 1
    )
    told = next(
        body["init_info"] for path, body in server.asked if path == "/init_weight_transfer_engine"
    )
    packing = {
        "packed": True,
        "packed_buffer_size_bytes": MESSAGE_BYTES,
        "packed_num_buffers": WORKER_STREAMS,
    }
    assert told == server.opened | {"rank_offset": 1} | packing
    assert (told["master_address"], told["world_size"]) == ("127.0.0.1", 3)


@pytest.mark.parametrize("refuse", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_refusal_is_an_error_of_the_engine_and_the_next_update_connects_anew(
    server: Server, refuse: str
) -> None:
    engine = ServerEngine(["http://127.0.0.1:1"], POLICY, None)
    server.refuse = refuse
    taken: list[Sequence[WeightSlice]] = []
    buckets = cut(random_weights(), 2, 7)

    def handed_over() -> Any:
        for bucket in buckets:
            taken.append(bucket)
            yield bucket

    with pytest.raises(EngineError, match="no such backend"):
        engine.update_weights(handed_over(), 1)
    assert len(taken) == len(buckets), "the other ranks send all of it"
    assert engine.weights_version == 0
    before = len(server.groups)
    assert all(group.destroyed for group in server.groups)
    server.refuse = ""
    if refuse == "/update_weights":
        server.start_again()
    engine.update_weights(cut(random_weights(), 2, 7), 1)
    assert len(server.groups) == before + 1


def test_a_tensor_that_does_not_come_completely(server: Server) -> None:
    engine = ServerEngine(["http://127.0.0.1:1"], POLICY, None)
    with pytest.raises(
        EngineError, match=r"1 tensors did not come completely, model\.norm\.weight among them"
    ):
        engine.update_weights(
            [b for b in cut(random_weights(), 1, 1) if b[0].name != "model.norm.weight"], 1
        )


def test_it_is_refused_in_one_line(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rollout\.weight_transfer=nccl needs vLLM"):
        ServerEngine(["http://127.0.0.1:1"], POLICY, None)
    monkeypatch.setattr(device, "_GPU", device.Capabilities(False, True, False, False, None))
    monkeypatch.setattr(device, "_CPU", device._GPU)
    with pytest.raises(UserError, match="needs a GPU"):
        ServerEngine(["http://127.0.0.1:1"], POLICY, None)
    with pytest.raises(
        UserError, match=r"rollout\.weight_transfer=nccl is for rollout\.engine=server"
    ):
        load_config(QUICKSTART / "dcpo.yaml", ["rollout.weight_transfer=nccl"])


def test_the_address_towards_a_server_is_of_its_family() -> None:
    for host in ("127.0.0.1", "::1"):
        assert _address_towards(f"http://{f'[{host}]' if ':' in host else host}:8000") == host
    with pytest.raises(EngineError, match=r"no\.such"):
        _address_towards("http://no.such.host.invalid:8000")
