"""The stand-in for Transformer Engine refuses tensors that the real kernels would misread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY
from tests.helpers.transformer_engine import environment

BEGINNING = """
import torch
from transformer_engine.pytorch import DotProductAttention, Linear, RMSNorm
from transformer_engine.pytorch.attention import apply_rotary_pos_emb
from transformer_engine.pytorch.optimizers import refuse_misread_update
from transformer_engine.pytorch.pointers import Misread

t = torch.zeros(6, 2, 4)
angles = torch.zeros(6, 1, 1, 8)
bounds = torch.tensor([0, 0, 4, 4, 6, 6], dtype=torch.int32)
packed = {"tensor_format": "thd", "fused": True}
attention = DotProductAttention(2, 4)
masked = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 6}
linear = Linear(4, 4, device="cpu", fuse_wgrad_accumulation=True)
parameter = torch.nn.Parameter(torch.zeros(4, 6))
parameter.grad = torch.zeros(4, 6)


def attend(q, k, v, cu_seqlens):
    bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return attention(q, k, v, None, **masked, **bounds)


def updated(parameter, gradient, moment):
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = gradient
    optimizer.state[parameter] = {"exp_avg": moment}
    refuse_misread_update(optimizer)


def trained(main_grad):
    linear.weight.main_grad = main_grad
    linear(torch.zeros(3, 4))[0].sum().backward()


"""
RIGHT = (
    "apply_rotary_pos_emb(t, torch.stack([angles, angles])[1][..., :4].contiguous(), "
    "cu_seqlens=bounds[::2].contiguous(), **packed)",
    # of queries, keys and values the kernel is told the strides
    "attend(*torch.zeros(6, 6, 4).split(2, 1), bounds[::2].contiguous())",
    "trained(torch.zeros(4, 4))",
    "updated(parameter, torch.zeros(4, 6), torch.zeros(4, 6))",
)
WRONG = {
    "angles side by side": "apply_rotary_pos_emb(t, angles.chunk(2, -1)[1], "
    "cu_seqlens=bounds[::2].contiguous(), **packed)",
    "bounds of 8 bytes": "apply_rotary_pos_emb(t, angles[..., :4].contiguous(), "
    "cu_seqlens=bounds[::2].long(), **packed)",
    "every second bound": "apply_rotary_pos_emb(t, angles[..., :4].contiguous(), "
    "cu_seqlens=bounds[::2], **packed)",
    "angles elsewhere": "apply_rotary_pos_emb(t, angles[..., :4].contiguous().to('meta'), "
    "cu_seqlens=bounds[::2].contiguous(), **packed)",
    "every second element": "attend(t, t, torch.zeros(6, 2, 8)[..., ::2], "
    "bounds[::2].contiguous())",
    "an odd beginning": "attend(t, t, torch.zeros(6 * 8 + 1)[1:].view(6, 2, 4), "
    "bounds[::2].contiguous())",
    "bounds of the attention": "attend(t, t, t, bounds[::2])",
    "a transposed weight": "linear.weight.data = torch.zeros(4, 4).t(); linear(t)",
    "a weight of another type": "linear.weight.data = torch.zeros(4, 4).bfloat16(); linear(t)",
    "a transposed gradient": "trained(torch.zeros(4, 4).t())",
    "the weight of a norm": "norm = RMSNorm(4); norm.weight.data = torch.zeros(8)[::2]; norm(t)",
    "a moment": "updated(parameter, torch.zeros(4, 6), torch.zeros(6, 4).t())",
    "a gradient of the optimizer": "updated(parameter, torch.zeros(6, 4).t(), torch.zeros(4, 6))",
}


@pytest.mark.slow
def test_a_tensor_that_a_kernel_would_misread_is_refused() -> None:
    lines = [BEGINNING, *RIGHT]
    for name, code in WRONG.items():
        lines += ["try:", f"    {code}", "except Misread:", f"    print({name!r})"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=REPOSITORY,
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(WRONG)
