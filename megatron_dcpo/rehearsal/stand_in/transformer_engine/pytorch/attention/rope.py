from __future__ import annotations

import itertools

import torch
from torch import Tensor

from transformer_engine.pytorch import shapes
from transformer_engine.pytorch.pointers import refuse_misread
from transformer_engine.pytorch.signatures import checked


@checked("apply_rotary_pos_emb")
def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, **options: object) -> Tensor:
    """Rotate ``t``, [s, b, h, d] or packed [t, h, d] with ``cu_seqlens``, by ``freqs`` [s, 1, 1, d'
    <= d].
    """
    assert options.get("fused"), "Megatron asks for the fused kernel"
    assert not options.get("interleaved")
    # The kernel reads freqs[position * d' + i] and int32 bounds; of t it is told the strides.
    refuse_misread("the angles", freqs.float(), like=t)
    if shapes.is_fake(t):
        return shapes.rotated(t, freqs)
    if options.get("tensor_format", "sbhd") == "thd":
        refuse_misread("cu_seqlens", options["cu_seqlens"], like=t, dtype=torch.int32)  # type: ignore[arg-type]
        bounds = options["cu_seqlens"].tolist()  # type: ignore[attr-defined]
        size, rank = options.get("cp_size", 1), options.get("cp_rank", 0)
        parts = []
        for start, stop in itertools.pairwise(bounds):
            chunks = torch.arange(stop - start).chunk(2 * size if size > 1 else 1)
            parts += [chunks[rank], chunks[-1 - rank]] if size > 1 else chunks
        positions = torch.cat(parts)
        angles = freqs[positions].squeeze(1)
        assert len(angles) == len(t), "cu_seqlens end where the tokens end"
    else:
        angles = freqs[: t.shape[0]]
    width = angles.shape[-1]
    turned, rest = t[..., :width].float(), t[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    return torch.cat(((turned * angles.cos() + half * angles.sin()).to(t.dtype), rest), dim=-1)
