"""Norms that Megatron's layer specs do not have: one that takes part in sequence parallelism
without Transformer Engine, one over all heads of a token, and one of the output of attention or
MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm in fp32. Under sequence parallelism the gradient of its weight is
    summed over the tensor-parallel ranks.

    Megatron's wrapper around torch's norm refuses sequence parallelism, although
    ``finalize_model_grads`` only needs the ``sequence_parallel`` mark on the weight.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # Hugging Face's order: normalize in fp32, round to the activation type, then scale.
        eps = cast(float, self.eps)
        normalized = F.rms_norm(x.float(), self.normalized_shape, weight=None, eps=eps)
        if self.zero_centered:
            # Gemma rounds after scaling.
            return (normalized * (1.0 + self.weight.float())).to(x.dtype)
        return normalized.to(x.dtype) * self.weight


class NormOfHeads(MegatronModule):
    """One root-mean-square norm over all heads of a token, of which a tensor-parallel rank has
    some. Takes and returns [..., heads / TP, d]. ``heads`` is Megatron's option that counts them.
    """

    heads: ClassVar[str]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.size = getattr(config, self.heads) * hidden_size
        width = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed heads."""
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.config.tensor_model_parallel_size > 1:
            squares = _SumOverRanks.apply(squares)
        normalized = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normalized.to(x.dtype) * self.weight).view_as(x)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weight, split over the tensor-parallel ranks, for Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class NormOfQueries(NormOfHeads):
    """The norm over all query heads."""

    heads = "num_attention_heads"


class NormOfKeys(NormOfHeads):
    """The norm over all key heads."""

    heads = "num_query_groups"


class _SumOverRanks(torch.autograd.Function):
    """The sum over the tensor-parallel ranks, each of which goes on with it in its own way: the
    gradient is the sum of theirs.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _summed(gradient)


def _summed(x: Tensor) -> Tensor:
    total = x.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(total, group=group)
    return total


class NormedResidual(MegatronModule):
    """The end of a layer's half: the output of attention or MLP is normed and then added to the
    residual, in the place of Megatron's ``get_bias_dropout_add``.
    """

    def __init__(self, config: TransformerConfig, norm: Any) -> None:  # noqa: ANN401 - a class
        super().__init__(config=config)
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that Megatron's layer calls; there is no dropout."""

        def add(
            output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            output, bias = output_and_bias
            if bias is not None:
                output = output + bias
            return residual + self.norm(output)

        return add
