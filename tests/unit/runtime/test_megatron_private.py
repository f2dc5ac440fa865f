"""The private names of Megatron's that functions ask for when they are called are there."""

from __future__ import annotations

import importlib
import inspect
import queue
from importlib.util import find_spec

import pytest

import megatron_dcpo.runtime.distributed  # noqa: F401 - Megatron, importable here
from megatron_dcpo.runtime.megatron_private import (
    APEX_KERNEL,
    use_queue_of_this_process,
    without_asking_for_apex,
    wrapper_tensor,
)

NAMES = [
    ("strategies.torch", "_get_filesystem_reader"),
    ("strategies.torch", "MCoreLoadPlanner"),
    ("strategies.filesystem_async", "_results_queue"),
    ("exchange_utils", "_sharded_tensor_shard_id"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_megatron_has_them(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"megatron.core.dist_checkpointing.{module}"), name)


def test_the_distributed_optimizer_has_them() -> None:
    optimizer = importlib.import_module(
        "megatron.core.optimizer.distrib_optimizer"
    ).DistributedOptimizer
    assert callable(optimizer._get_main_param_and_optimizer_states)


def test_the_queue_is_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    monkeypatch.setattr(module, "_results_queue", None)
    use_queue_of_this_process()
    assert isinstance(module._results_queue, queue.Queue)


def test_a_wrapper_has_a_shape_and_no_storage() -> None:
    import torch

    class Shape(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> None:
            raise AssertionError("nothing is asked of it")

    made = wrapper_tensor(Shape, (3, 5), torch.zeros(1, dtype=torch.bfloat16))
    assert (tuple(made.shape), made.dtype, type(made)) == ((3, 5), torch.bfloat16, Shape)


def test_the_output_layer_does_without_apex() -> None:
    """What ``ColumnParallelLinear.__init__`` demands, which is all that Megatron does with its
    output layer here.
    """
    from megatron.core.tensor_parallel import layers

    assert layers._grad_accum_fusion_available is (find_spec(APEX_KERNEL) is not None)
    with without_asking_for_apex():
        assert layers._grad_accum_fusion_available
    assert f"import {APEX_KERNEL}" in inspect.getsource(layers)
    assert "not _grad_accum_fusion_available" in inspect.getsource(
        layers.ColumnParallelLinear.__init__
    )
