"""Expandable segments: on while training, off before anything of the engine's is allocated."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_dcpo.policy import optimizer
from megatron_dcpo.policy.optimizer import Offload
from megatron_dcpo.runtime import device, megatron_private
from megatron_dcpo.training import loop, supervised
from megatron_dcpo.training.sampler import Batch


@pytest.fixture
def calls(monkeypatch):
    """A device that writes down what it is told."""
    said: list[str] = []
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty"))
    monkeypatch.setattr(megatron_private, "set_allocator_settings", said.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return said


def test_the_rest_of_the_setting_stays(calls, monkeypatch):
    """torch resets every option that the string does not name
    (vllm/device_allocator/alloc_conf.py).
    """
    device.expandable_segments(True)
    assert calls == ["synchronize", "empty", "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    device.expandable_segments(False)
    assert calls[-1] == "max_split_size_mb:512,expandable_segments:False"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_user_decides(calls, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:False")
    device.expandable_segments(True)
    assert calls == []


def test_nothing_on_the_cpu(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    monkeypatch.setattr(
        megatron_private, "set_allocator_settings", lambda _: pytest.fail("no device")
    )
    device.expandable_segments(True)


def test_on_where_there_is_no_engine(calls, monkeypatch):
    megatron_less = SimpleNamespace(megatron=None)
    frozen = SimpleNamespace(frozen=True)
    monkeypatch.setattr(supervised, "build_policy", lambda *_, **__: frozen)
    monkeypatch.setattr(supervised, "build_optimizer", lambda *_: megatron_less)
    parts = ("open_topology", "Trainer", "start_watch", "build_saver", "Checkpointer")
    for name in (*parts, "SupervisedRecords", "with_steps"):
        monkeypatch.setattr(supervised, name, MagicMock())
    monkeypatch.setattr(supervised.distributed, "all_gather_objects", lambda each: [each])
    supervised.with_steps.return_value = MagicMock(run_dir="run")
    with supervised.build(SimpleNamespace(run_dir="run"), SimpleNamespace(examples=[])):
        pass
    assert calls == ["synchronize", "empty", "expandable_segments:True"]


@pytest.mark.parametrize("away", [True, False])
def test_order_of_a_step(calls, monkeypatch, away):
    """Engine asleep, on, state back, update; state away, off, weights into the engine, which wakes
    up.
    """
    monkeypatch.setattr(optimizer, "ledger", MagicMock())
    offload = object.__new__(Offload)
    offload.active, offload.policy = away, SimpleNamespace(chunks=(), frozen=True)
    note = lambda what: lambda *_, **__: calls.append(what)  # noqa: E731
    state = SimpleNamespace(away=away)
    state.reload = lambda: (calls.append("state here"), setattr(state, "away", False))
    state.offload = lambda: (calls.append("state away"), setattr(state, "away", True))
    offload.state = state
    run = MagicMock()
    run.offload, run.validator = offload, None
    run.timers = run.checkpointer.completing = lambda *_: nullcontext()
    run.rollouts.take = lambda step: (
        calls.append("sample"),
        Batch(samples=[], scores=None, metrics={}),
    )[1]
    run.engine.sleep = note("sleep")
    run.updater.update = lambda **_: (calls.append("update"), None)[1] or ([], {})
    run.weight_sync.push = lambda _: calls.append("wake") or {}
    loop.train_step(run, 1)
    seen = [call for call in calls if call not in ("synchronize", "empty")]
    on, off = "expandable_segments:True", "expandable_segments:False"
    here, gone = (["state here"], ["state away"]) if away else ([], [])
    assert seen == ["sample", "sleep", on, *here, "update", *gone, off, "wake"]
