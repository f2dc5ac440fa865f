"""The gated delta net (Yang, Kautz and Hatamizadeh 2024) of Qwen3.5, in the place of attention.

A head has a state S, [key_channels, value_channels]. A token has a query q and a key k, both of
length one, and a value v. It decays the state, corrects what it answers to the key, and reads it:

    S <- exp(g) S
    S <- S + beta k (v - k^T S)^T
    o  = q^T S / sqrt(key_channels)

Megatron has a layer of this form with the same parameters, which needs flash-linear-attention and
does not take packed sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.weights.table import DELTA_NET_PARTS

CHUNK = 64  # tokens whose corrections are computed together


class GatedDeltaNet(MegatronModule):
    """A gated delta net, for batches [s, b, hidden] and packed sequences [t, 1, hidden], with
    tensor and sequence parallelism. Each tensor-parallel rank has some of the heads.

    Padding needs no mask: it stands at the end of a row, and nothing after it is a real token.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: object,
        arch: Architecture,
        **__: object,
    ) -> None:
        super().__init__(config=config)
        assert arch.delta_net is not None
        net = arch.delta_net
        ranks = config.tensor_model_parallel_size
        self.layer_number = layer_number
        self.key_channels = net.key_channels
        self.value_channels = net.value_channels
        self.value_heads = net.value_heads // ranks
        self.heads_of_key = net.value_heads // net.key_heads
        # rows on this rank
        self.qkv = [width // ranks for width in (net.key_width, net.key_width, net.value_width)]
        self.sections = [*self.qkv, net.value_width // ranks, self.value_heads, self.value_heads]
        self.in_proj = ColumnParallelLinear(
            arch.hidden_size,
            ranks * sum(self.sections),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        parameter = partial(torch.empty, dtype=config.params_dtype, device=current_device())
        self.conv1d = _CausalConvolution(parameter(sum(self.qkv), 1, net.kernel_size))
        self.dt_bias = torch.nn.Parameter(parameter(self.value_heads))
        self.A_log = torch.nn.Parameter(parameter(self.value_heads))
        self.out_norm = _GatedNorm(parameter(net.value_channels), config)
        self.out_proj = RowParallelLinear(
            net.value_width,
            arch.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self,
        hidden_states: Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, of the shape of ``hidden_states``, and no bias. The boundaries of
        packed sequences are ``cu_seqlens_q`` int32 [sequences + 1].
        """
        projected, _ = self.in_proj(hidden_states)  # type: ignore[misc]
        rows = projected.transpose(0, 1)  # [b, s, rows]
        bounds = [0, rows.shape[1]]
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
        qkv, gate, correction, decay = rows.split([sum(self.qkv), *self.sections[3:]], dim=-1)
        core = partial(self._core, bounds=bounds)
        if self.recomputes and torch.is_grad_enabled():
            read = tensor_parallel.checkpoint(core, False, qkv, correction, decay)
        else:
            read = core(qkv, correction, decay)
        gate = gate.unflatten(-1, (self.value_heads, self.value_channels))
        normed = self.out_norm(read, gate).flatten(-2)
        output: tuple[Tensor, Tensor | None] = self.out_proj(normed.transpose(0, 1))
        return output

    def _core(self, qkv: Tensor, correction: Tensor, decay: Tensor, bounds: list[int]) -> Tensor:
        """Return what the tokens read, [b, s, heads, value_channels], given the projections
        [b, s, ...]. The sequences between ``bounds`` do not see each other.
        """
        rate = self.A_log.float().exp()
        log_decay = -rate * F.softplus(decay.float() + self.dt_bias)
        beta = correction.sigmoid()
        read = []
        for start, stop in itertools.pairwise(bounds):
            here = slice(start, stop)
            query, key, value = self.conv1d(qkv[:, here]).split(self.qkv, dim=-1)
            query = query.unflatten(-1, (-1, self.key_channels))
            key = key.unflatten(-1, (-1, self.key_channels))
            read.append(
                gated_delta_rule(
                    query=query.repeat_interleave(self.heads_of_key, dim=2),
                    key=key.repeat_interleave(self.heads_of_key, dim=2),
                    value=value.unflatten(-1, (-1, self.value_channels)),
                    log_decay=log_decay[:, here],
                    beta=beta[:, here],
                )
            )
        return torch.cat(read, dim=1).to(qkv.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameters for Megatron's checkpoints. The parts that are one below the other
        on each rank are tensors of their own there, each split over the tensor-parallel ranks.
        """
        split = {"dt_bias": 0, "A_log": 0, "conv1d.weight": 0, "in_proj.weight": 0}
        own = dict(self.named_parameters())
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, {**split, "out_proj.weight": 1}, sharded_offsets
        )
        sections = {"in_proj.weight": self.sections, "conv1d.weight": self.qkv}
        for name, rows in sections.items():
            parts = dict(zip(DELTA_NET_PARTS.values(), rows, strict=False))
            found[prefix + name] = _in_parts(found[prefix + name], parts)
        return found


class _CausalConvolution(torch.nn.Module):
    """A convolution of each channel with the tokens before, and SiLU. Takes and returns
    [b, s, channels].
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)  # [channels, 1, kernel_size]

    def forward(self, x: Tensor) -> Tensor:
        channels, _, size = self.weight.shape
        before = F.pad(x.transpose(1, 2), (size - 1, 0))
        mixed = F.conv1d(before, self.weight, groups=channels)
        return F.silu(mixed).transpose(1, 2)


class _GatedNorm(torch.nn.Module):
    """A root-mean-square norm of each head, times SiLU of a gate. Each tensor-parallel rank norms
    its own heads, so that the gradient of the weight is summed over them.
    """

    def __init__(self, weight: Tensor, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.eps = config.layernorm_epsilon
        self.ranks = config.tensor_model_parallel_size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = self.weight
        if self.ranks > 1:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight)
        normalized = F.rms_norm(x.float(), weight.shape, weight=None, eps=self.eps)
        scaled = weight * normalized.to(x.dtype)
        return (scaled * F.silu(gate.float())).to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Return what each token of a sequence reads of the state, fp32 [b, s, heads, value_channels].

    Queries and keys [b, s, heads, key_channels] are normed to length one here; ``log_decay`` (g)
    and ``beta`` are [b, s, heads]. The recurrence runs over chunks: within one, the corrections of
    all tokens solve a triangular system, whose right-hand sides are the values, and the keys by
    which the state before the chunk is read.
    """
    tokens = query.shape[1]
    size = min(CHUNK, tokens)

    def in_chunks(x: Tensor) -> Tensor:
        """Return [b, heads, chunks, size, channels], with zeros behind the last token."""
        x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -tokens % size))
        return x.unflatten(2, (-1, size))

    q = in_chunks(_unit_length(query)) * query.shape[-1] ** -0.5
    k = in_chunks(_unit_length(key))
    v = in_chunks(value)
    rate = in_chunks(beta.unsqueeze(-1))
    decay = in_chunks(log_decay.unsqueeze(-1)).cumsum(dim=-2)  # from the first of a chunk
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = decay - decay.transpose(-1, -2)  # from the token of a column to a row's
    between = between.masked_fill(later, -torch.inf).exp()
    system = (rate * k) @ k.transpose(-1, -2) * between
    # The diagonal, which is taken to be one, and what is above it are not read.
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([rate * v, rate * k * decay.exp()], dim=-1),
        upper=False,
        unitriangular=True,
    )
    values, reading = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.transpose(-1, -2) * between
    from_state = q * decay.exp()
    whole_chunk = decay[..., -1:, :]
    to_state = (k * (whole_chunk - decay).exp()).transpose(-1, -2)
    kept = whole_chunk.exp()
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    read = []
    for chunk in range(q.shape[2]):
        corrections = values[:, :, chunk] - reading[:, :, chunk] @ state
        read.append(from_state[:, :, chunk] @ state + within[:, :, chunk] @ corrections)
        state = state * kept[:, :, chunk] + to_state[:, :, chunk] @ corrections
    return torch.cat(read, dim=2)[:, :, :tokens].transpose(1, 2)


def _unit_length(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _in_parts(whole: ShardedTensor, rows: dict[str, int]) -> ShardedTensorFactory:
    """Return ``whole``, which has these parts one below the other on each tensor-parallel rank, as
    one tensor for each part.
    """
    without_data = whole.without_data()

    def build(key: str, data: Tensor, replica_id: Any, *_: object) -> list[Any]:  # noqa: ANN401
        local = replace(without_data, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        parts = []
        start = 0
        for name, count in rows.items():
            (part,) = local.narrow(0, start, count)
            part.key = f"{key}.{name}"
            parts.append(part)
            start += count
        return parts

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)
