"""Angles of layers with and without a sliding window."""

from __future__ import annotations

import copy

import torch

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.planning.plan import MODELS
from megatron_dcpo.policy.rotary import (
    TwoRotaryEmbeddings,
    angles_of_layer,
    has_fused_rotation,
)
from megatron_dcpo.runtime import megatron_on_cpu

megatron_on_cpu.ensure()

from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)


def test_neighbors_are_rotated_by_the_fused_kernel_where_megatron_tells_it_so(monkeypatch) -> None:
    from megatron.core.extensions import transformer_engine

    glm, qwen = (
        read_architecture(MODELS / name) for name in ("zai-org/GLM-4-32B-0414", "Qwen/Qwen3-8B")
    )

    def rotate(t, cu_seqlens, freqs, cp_size=1, cp_rank=0):
        return t

    def rotate_neighbors_too(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
        return t

    for kernel, is_fused in ((None, False), (rotate, False), (rotate_neighbors_too, True)):
        monkeypatch.setattr(
            transformer_engine, "fused_apply_rotary_pos_emb_thd", kernel, raising=False
        )
        assert has_fused_rotation(glm) is is_fused
        assert has_fused_rotation(qwen)


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
