"""Rotary embeddings: the frequencies that a checkpoint asks for, in layers with and without a
sliding window.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from megatron_dcpo.architectures.architecture import (
    Architecture,
    LinearScaling,
    RopeScaling,
    YarnScaling,
)
from megatron_dcpo.runtime.device import current_device


def set_rotary_frequencies(gpt: Any, arch: Architecture) -> None:  # noqa: ANN401 - a GPTModel
    """Give ``gpt`` the frequencies of the checkpoint. Of Llama-3.1's scaling Megatron reads only
    the factor, of other scalings nothing, and it has one rotation for all layers.
    """
    inv_freq = rotary_inverse_frequencies(arch)
    gpt.rotary_pos_emb.inv_freq = inv_freq.to(current_device())
    if arch.sliding_window is None or not has_two_rotations(arch):
        return
    window_embedding = copy.copy(gpt.rotary_pos_emb)
    window_embedding.inv_freq = _unscaled_frequencies(
        arch.rotary_dimensions, arch.sliding_window.rotary_base
    ).to(current_device())
    gpt.rotary_pos_emb = TwoRotaryEmbeddings(gpt.rotary_pos_emb, window_embedding)


def has_fused_rotation(arch: Architecture) -> bool:
    """Return whether Transformer Engine's fused kernel may rotate: where pairs are neighbors
    (GLM's), Megatron-core tells the kernel for packed sequences so from release 0.17 on.
    """
    if not arch.rotary_interleaved:
        return True
    from megatron.core.extensions import transformer_engine

    rotate = getattr(transformer_engine, "fused_apply_rotary_pos_emb_thd", None)
    return rotate is not None and "interleaved" in inspect.signature(rotate).parameters


def has_two_rotations(arch: Architecture) -> bool:
    """Return whether layers with a sliding window have other rotary frequencies than the others."""
    window = arch.sliding_window
    if window is None:
        return False
    return window.rotary_base != arch.rotary_base or arch.rope_scaling is not None


class TwoRotaryEmbeddings(torch.nn.Module):
    """The angles of two of Megatron's rotary embeddings, [2, s, 1, 1, d]: first those of the layers
    without a sliding window. One tensor, because a recomputed layer is given tensors. Each rotation
    is contiguous in it, because the fused kernel reads angles by pointer and shape.
    """

    def __init__(self, without_window: torch.nn.Module, with_window: torch.nn.Module) -> None:
        super().__init__()
        self.without_window = without_window
        self.with_window = with_window

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the angles. Takes the arguments of Megatron's embedding."""
        both = [self.without_window(*args, **kwargs), self.with_window(*args, **kwargs)]
        return torch.stack(both)

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Return the number of positions, as Megatron's embedding does."""
        without_window: Any = self.without_window
        length: int = without_window.get_rotary_seq_len(*args, **kwargs)
        return length


def angles_of_layer(angles: Tensor, has_window: bool) -> Tensor:
    """Return those angles of :class:`TwoRotaryEmbeddings` that belong to a layer, [s, 1, 1, d],
    contiguous.
    """
    return angles[int(has_window)]


def softmax_scale(arch: Architecture, has_window: bool = False) -> float | None:
    """Return the factor of the attention's scores, None for 1 / sqrt(kv_channels). YaRN, which
    layers with a sliding window do not have, multiplies cosine and sine, and so queries and keys,
    by its factor: the scores by its square.
    """
    scaling = None if has_window else arch.rope_scaling
    if arch.query_scalar is None and not isinstance(scaling, YarnScaling):
        return None
    factor = 1.0
    if isinstance(scaling, YarnScaling):
        factor = scaling.attention_factor**2
    return factor / math.sqrt(arch.query_scalar or arch.kv_channels)


def rotary_inverse_frequencies(arch: Architecture) -> Tensor:
    """Return the angular frequencies [rotary_dimensions / 2] in fp32 of the layers without a
    sliding window, with the scaling that the checkpoint asks for.
    """
    inv_freq = _unscaled_frequencies(arch.rotary_dimensions, arch.rotary_base)
    scaling = arch.rope_scaling
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(inv_freq, arch.rotary_base, scaling)
    if isinstance(scaling, RopeScaling):
        return _llama3_frequencies(inv_freq, scaling)
    return inv_freq


def _unscaled_frequencies(dimensions: int, base: float) -> Tensor:
    exponent = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
    return 1.0 / (base**exponent)


def _llama3_frequencies(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama-3.1's frequencies: wavelengths above ``original / low`` are stretched by
    ``factor``, wavelengths below ``original / high`` are kept, and those in between are
    interpolated linearly in the frequency.
    """
    original = scaling.original_max_position_embeddings
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def _yarn_frequencies(inv_freq: Tensor, base: float, scaling: YarnScaling) -> Tensor:
    """Return YaRN's frequencies [d / 2]: between the dimensions that turn ``beta_fast`` and
    ``beta_slow`` times in the original context, from the own frequency to that divided by
    ``factor``.
    """
    d = 2 * len(inv_freq)

    def dimension(rotations: float) -> float:
        """Return the dimension that turns so often in the original context."""
        wavelength = scaling.original_max_position_embeddings / rotations
        return d * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, d - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(d // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    kept = 1 - ramp
    return inv_freq / scaling.factor * (1 - kept) + inv_freq * kept
