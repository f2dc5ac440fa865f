"""The vLLM engine asleep, awake, failed, closed and started again in every order, on the allocator
of vLLM's CUDA build.

``my_free`` unmaps what it is given, also what ``sleep`` has unmapped before. That error stays in a
global variable, after which ``unmap_and_release`` returns before ``cuMemRelease``: what is freed
from then on is lost to the process.
"""

import dataclasses
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_dcpo.rollout import vllm_engine
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.device import _CPU, DeviceLost, device_failed
from tests.helpers.cumem import Allocator, Driver, Extension, Llm

SIZES = {"weights": [30, 10], "kv_cache": [20, 20], "cudagraph": [4]}
ENGINE = sum(map(sum, SIZES.values()))
STEPS = (
    "sleep",
    "update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "restart",
    "crowd",
    "leave",
)


class Machine:
    """An engine on a card of 100 bytes, and a trainer that takes 60 of them (``crowd``) or none
    (``leave``).
    """

    def __init__(self):
        self.driver = Driver(total=100)
        self.extension = Extension(self.driver)
        self.trainer = None
        self.engine = VllmEngine.__new__(VllmEngine)
        self.engine.__dict__ |= {
            "options": EngineOptions(),
            "arch": None,
            "_asleep": False,
            "weights_version": 0,
        }
        self.engine._start = lambda: Llm(Allocator(self.extension), SIZES)
        self.engine._enter_in_ledger = lambda tag: None
        self.engine.llm = self.engine._start()

    def do(self, step):
        engine = self.engine
        if step == "crowd" and self.trainer is None and self.driver.used <= 40:
            _, self.trainer = self.driver.create(60)
        elif step == "leave" and self.trainer is not None:
            self.driver.release(self.trainer)
            self.trainer = None
        elif step in ("sleep", "restart"):
            getattr(engine, step)()
        elif step == "update":
            engine.update_weights([[]], engine.weights_version + 1)
        elif step not in ("crowd", "leave"):
            engine.llm.failing = step
            with pytest.raises(EngineError, match="a shape that does not fit"):
                engine.update_weights([[]], 9)
            engine.restart()  # as WeightSync.push does


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    core = SimpleNamespace(cleanup_dist_env_and_memory=None)
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", core)
    sys.modules["vllm.v1.engine"].core = core
    separate = dataclasses.replace(_CPU, separate_memory=True)
    monkeypatch.setattr(vllm_engine, "capabilities", lambda: separate)
    monkeypatch.setattr(
        vllm_engine, "gc", SimpleNamespace(unfreeze=int, collect=int)
    )  # thousands of closed engines


def ends(machine, steps):
    try:
        for step in steps:
            machine.do(step)
        machine.engine.close()
    except DeviceLost as error:
        return error
    return None


@pytest.mark.parametrize("first", STEPS)
def test_sleep_and_updates_in_every_order(first):
    """No error of the driver but for memory that is not there, which ends the process; a closed
    engine leaves nothing.
    """
    ended = 0
    for steps in itertools.product([first], *[STEPS] * 3):
        machine = Machine()
        lost = ends(machine, steps)
        if lost:
            assert machine.trainer is not None, steps
            assert "out of memory" in str(lost) or "Free memory on device" in str(lost)
            assert device_failed(lost), "98, although it speaks of memory"
            ended += 1
            continue
        assert machine.extension.printed == [], steps
        assert machine.driver.used == (60 if machine.trainer else 0), steps
    assert ended, "orders in which the trainer did not leave"


def test_a_failed_update_is_repeated_by_a_whole_engine():
    machine = Machine()
    for step in ("sleep", "update_weights", "update", "sleep", "update"):
        machine.do(step)
    assert machine.driver.used == ENGINE
    assert machine.engine.llm.version == "2"


def test_without_waking_up_the_next_engine_has_no_memory():
    """The stand-in does what the binary does: the break that the tests above would find."""
    machine = Machine()
    machine.do("sleep")
    machine.engine._wake("weights")
    machine.engine._shut_down()  # as close() did before
    unmapped_twice = "CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:245"
    assert machine.extension.printed == [unmapped_twice] * 2, "both parts of the cache"
    assert machine.extension.error_code, "which stays"
    assert machine.driver.used == 40, "the weights were unmapped and not released"
    with pytest.raises(ValueError, match="Free memory"):
        machine.engine._start()


def test_a_process_that_ends_says_nothing(capfd):
    machine = Machine()
    machine.do("sleep")
    machine.do("crowd")
    machine.engine._close_at_exit()
    assert machine.engine.llm is None


def test_a_sleep_that_fails_ends_the_process():
    machine = Machine()
    machine.driver.mapped.pop(next(iter(machine.driver.mapped)))
    with pytest.raises(
        DeviceLost, match="put its memory to sleep: RuntimeError: CUDA Error: invalid argument"
    ):
        machine.do("sleep")
