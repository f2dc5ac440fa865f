"""Angles of layers with and without a sliding window."""

from __future__ import annotations

import copy

import torch

from megatron_dcpo.policy.rotary import TwoRotaryEmbeddings, angles_of_layer
from megatron_dcpo.runtime import megatron_on_cpu

megatron_on_cpu.ensure()

from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)


def test_each_rotation_is_what_the_fused_kernel_reads() -> None:
    """``fused_rope.cu`` reads ``freqs[position * d + i]``, whatever the strides are."""
    without_window = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
    with_window = copy.copy(without_window)
    with_window.inv_freq = without_window.inv_freq * 3
    angles = TwoRotaryEmbeddings(without_window, with_window)(5)
    for has_window, rotation in ((False, without_window), (True, with_window)):
        found = angles_of_layer(angles, has_window)
        assert torch.equal(found, rotation(5))
        read = torch.as_strided(angles, (5, 8), (8, 1), found.storage_offset())
        assert torch.equal(read, rotation(5)[:, 0, 0])
