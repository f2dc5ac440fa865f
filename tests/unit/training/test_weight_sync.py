"""WeightSync alone, and the loop's recovery of an engine that fails; weights that are not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.training import weight_sync as module
from megatron_dcpo.training.loop import MAX_RESTARTS, push_weights
from megatron_dcpo.training.run import tensors_to_hand_over
from megatron_dcpo.training.weight_sync import WeightSync
from tests.helpers.samplers import one_rank

PLAN: Any = SimpleNamespace(
    received=[48], least=[40], peak_bytes=16, buckets=[1, 2, 3], checksum="x"
)


class Fragile:
    """An engine that refuses its first ``failures`` updates."""

    tensor_model_parallel_size = 1

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.restarts = 0
        self.version: int | None = None

    def update_weights(self, buckets: Any, version: int) -> None:
        for _ in buckets:
            if self.failures:
                self.failures -= 1
                raise EngineError("no memory")
        self.version = version

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture(autouse=True)
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three buckets of 16 bytes; every weight is finite."""

    def buckets(policy: Any, plan: Any, traffic: Any) -> Iterator[list[Any]]:
        for _ in range(3):
            traffic.received += 16
            traffic.buckets += 1
            traffic.peak = 16
            yield []

    monkeypatch.setattr(module, "export_buckets", buckets)
    monkeypatch.setattr(module, "not_finite", lambda policy: [])
    with one_rank():
        yield


def sync_of(engine: Any, plan: Any = PLAN, broken: tuple[str, ...] = ()) -> WeightSync:
    topology: Any = SimpleNamespace(rank=0, place=0, replica=0)
    optimizer: Any = SimpleNamespace(exported=None, not_finite=lambda: list(broken))
    policy: Any = None
    return WeightSync(
        policy=policy, optimizer=optimizer, engine=engine, plan=plan, topology=topology
    )


def run_of(engine: Any) -> Any:
    """The parts of a run that push weights."""
    policy = SimpleNamespace(topology=SimpleNamespace(rank=0))
    return SimpleNamespace(weight_sync=sync_of(engine), engine=engine, policy=policy)


def test_a_push_returns_what_the_transport_counted() -> None:
    engine = Fragile()
    assert sync_of(engine).push(version=4) == {
        "reshard/bytes": 48,
        "reshard/bytes_min": 40,
        "reshard/peak_bucket_bytes": 16,
    }
    assert (engine.version, engine.restarts) == (4, 0)


def test_traffic_that_differs_from_the_plan_is_an_error() -> None:
    plan = SimpleNamespace(**{**vars(PLAN), "received": [47]})
    with pytest.raises(RuntimeError, match="the plan says"):
        sync_of(Fragile(), plan).push(version=4)


def test_an_engine_that_fails_is_an_error_on_every_rank() -> None:
    engine = Fragile(failures=1)
    with pytest.raises(EngineError, match="rank 0: no memory"):
        sync_of(engine).push(version=4)
    assert (engine.version, engine.restarts) == (None, 0)


def test_an_engine_that_fails_is_started_again_and_gets_the_same_weights() -> None:
    engine = Fragile(failures=MAX_RESTARTS)
    push_weights(run_of(engine), version=4)
    assert (engine.version, engine.restarts) == (4, MAX_RESTARTS)


def test_an_engine_that_fails_too_often_ends_the_run() -> None:
    engine = Fragile(failures=MAX_RESTARTS + 1)
    with pytest.raises(UserError, match="no memory"):
        push_weights(run_of(engine), version=4)
    assert engine.version is None


def test_weights_that_are_not_finite_are_not_handed_over() -> None:
    engine = Fragile()
    with pytest.raises(UserError, match=r"decoder\.weight"):
        sync_of(engine, broken=("decoder.weight",)).push(version=4)
    assert engine.version is None


def test_servers_take_their_weights_from_the_first_replica_alone() -> None:
    def handed_over(engine: str, replica: int) -> Any:
        config: Any = SimpleNamespace(rollout=SimpleNamespace(engine=engine))
        topology: Any = SimpleNamespace(replica=replica)
        return tensors_to_hand_over(config, topology)

    assert [handed_over("server", replica) for replica in (0, 1, 2)] == [None, (), ()]
    assert [handed_over("vllm", replica) for replica in (0, 1)] == [None, None]
