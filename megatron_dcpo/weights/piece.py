"""What travels between a policy and whoever wants its weights: slices of Hugging Face tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """``values`` are rows (dim 0) or columns (dim 1) ``start : start + values.shape[dim]`` of tensor ``name``."""

    name: str
    dim: int
    start: int
    values: Tensor

    @torch.no_grad()
    def write_into(self, tensor: Tensor) -> None:
        """Copy the slice to its place in the full ``tensor``."""
        tensor.narrow(self.dim, self.start, self.values.shape[self.dim]).copy_(self.values)
