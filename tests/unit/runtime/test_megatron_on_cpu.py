"""The CPU runtime: Adam equals torch's, checkpoints its step per group, CUDA names do not leak out
of Megatron's calls.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch

from megatron_dcpo.runtime import megatron_on_cpu
from megatron_dcpo.runtime.device import has_cuda
from megatron_dcpo.runtime.megatron_on_cpu import FusedAdam, ensure
from tests.helpers.transformer_engine import environment


def trained(optimizer_class, steps, **options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    optimizer = optimizer_class(parameters, lr=1e-2, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(("ours", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_equals_torch(ours, theirs):
    expected, _ = trained(theirs, 7, weight_decay=0.1)
    parameters, _ = trained(FusedAdam, 7, weight_decay=0.1, adam_w_mode=ours)
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-6, atol=1e-7)


def test_step_is_in_the_group_and_survives_a_state_dict():
    """Dropping the step would restart the bias correction: the next update would differ."""
    parameters, optimizer = trained(FusedAdam, 3)
    assert optimizer.param_groups[0]["step"] == 3
    assert "step" not in optimizer.state[parameters[0]]
    clones = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = FusedAdam(clones, lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, clone in zip(parameters, clones, strict=True):
        parameter.grad = clone.grad = torch.ones_like(parameter)
    optimizer.step(), resumed.step()
    for parameter, clone in zip(parameters, clones, strict=True):
        assert torch.equal(parameter, clone)


@pytest.mark.skipif(has_cuda(), reason="with CUDA the runtime changes nothing")
def test_cuda_names_stay_inside_megatron():
    ensure()
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: F401
    from megatron.core.pipeline_parallel import schedules

    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros([], device="cuda")


@pytest.mark.skipif(has_cuda(), reason="with CUDA the runtime changes nothing")
def test_the_installed_release_has_all_that_is_replaced(monkeypatch):
    ensure()
    assert megatron_on_cpu._missing == []
    monkeypatch.setattr(megatron_on_cpu, "_missing", [])
    megatron_on_cpu._replace("tensor_parallel.nowhere", "gather", lambda there: there)
    megatron_on_cpu._replace("tensor_parallel.mappings", "no_such_function", lambda there: there)
    assert megatron_on_cpu._missing == [
        "tensor_parallel.nowhere.gather",
        "tensor_parallel.mappings.no_such_function",
    ]


IN_A_FRESH_PROCESS = """
import sys, types
import torch
from megatron_dcpo.runtime import megatron_on_cpu
megatron_on_cpu.has_cuda = lambda: True
sys.modules["transformer_engine"] = None  # not installed
synchronize = torch.cuda.synchronize
if sys.argv[1] == "apex":
    for name in ("apex", "apex.optimizers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["apex.optimizers"].FusedAdam = fused = type("FusedAdam", (), {})
    sys.modules["apex.optimizers"].FusedSGD = type("FusedSGD", (), {})
else:
    fused = megatron_on_cpu.FusedAdam
megatron_on_cpu.ensure()
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
assert optimizer.Adam is distrib_optimizer.Adam is fused, optimizer.Adam
assert not optimizer.USING_PYTORCH_OPTIMIZER
assert distrib_optimizer.HAVE_APEX_OR_TE and distrib_optimizer.USING_APEX_OPTIMIZER
assert torch.cuda.synchronize is synchronize, "nothing else is replaced on a GPU"
"""


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["nothing", "apex"])
def test_on_a_gpu_only_torchs_adam_is_replaced(installed):
    """With torch's Adam a resumption fails: ``assert len(steps) == 1``
    (``DistributedOptimizer.state_dict``).
    """
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, installed], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


WITH_KERNELS_OF_A_GPU = """
import torch
from megatron_dcpo.runtime import megatron_on_cpu
megatron_on_cpu.ensure()
from megatron.core.optimizer import Adam, clip_grads, optimizer
from transformer_engine.pytorch import optimizers
for kernel in (optimizers.multi_tensor_l2norm, optimizers.multi_tensor_scale):
    try:
        kernel()
    except RuntimeError:
        continue
    raise SystemExit("the stand-in takes tensors of the CPU")
dist = torch.distributed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.tensor([3.0, 4.0])
norm = clip_grads.get_grad_norm_fp32([weight.grad])
assert norm == 5.0, norm
optimizer.clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=norm)
assert torch.allclose(weight.grad, torch.tensor([0.6, 0.8]), atol=1e-5), weight.grad
there = [torch.zeros(2)]
optimizer._multi_tensor_copy_this_to_that([weight.grad], there, torch.zeros(1))
assert torch.equal(there[0], weight.grad)
Adam([weight], lr=0.1).step()
assert (weight < 0).all()
"""


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="with CUDA the kernels run")
def test_transformer_engine_without_a_gpu():
    """The image on a login node: its kernels for norm, clipping and update are not called."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_KERNELS_OF_A_GPU],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
