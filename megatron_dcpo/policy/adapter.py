"""Low-rank adapters (LoRA) on Megatron's parallel linear layers, with an optimizer of their own.

The policy's own parameters are frozen; an adapted layer computes W x + (alpha / rank) B A x.
Parameters are named and shaped as PEFT has them, by the projections of Hugging Face: a fused layer
of Megatron's (QKV, gate and up) has one pair for each of its projections. Every rank of a pipeline
stage holds the stage's pairs whole, in fp32, and computes with its rows of B (columns of A where a
layer is row-parallel), so that between ranks only A x travels; gradients are summed over the
stage's ranks (docs/scaling.md#lora).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_dcpo.config import AdapterConfig, Config
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import build_scheduler
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.peft_adapter import KEPT, SCALE, LowRank
from megatron_dcpo.weights.table import adapted, hf_shapes

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

_COLUMN = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_ROW = {"self_attn": "o_proj", "mlp": "down_proj"}
Hook = Callable[
    [Any, tuple[Any, ...], tuple[Tensor, Any]], tuple[Tensor, Any] | None
]  # of a forward pass
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adapter:
    """The adapter of this rank's pipeline stage. ``parameters``: by PEFT's names, fp32, the same on
    all ranks of the stage.

    Active in every pass of the policy, but inside :meth:`inactive`.
    """

    def __init__(self, policy: Policy, config: AdapterConfig) -> None:
        self.policy = policy
        self.config = config
        self.active = True
        self.parameters: dict[str, Tensor] = {}
        self.pairs: dict[str, LowRank] = {}  # by the tensor that they are added to
        for gpt in policy.gpt:
            for layer in gpt.decoder.layers:
                self._adapt(layer, layer.layer_number - 1)
            if gpt.pre_process:
                gpt.embedding.register_forward_hook(_with_gradient)

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Open the policy without its adapter: the starting policy."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters of all stages, on the CPU of every rank. Collective."""
        topology = self.policy.topology
        once = topology.tp_rank == topology.replica == 0
        if once:
            own = {name: tensor.detach().cpu() for name, tensor in self.parameters.items()}
        else:
            own = {}
        return {name: tensor for part in all_gather_objects(own) for name, tensor in part.items()}

    def not_finite(self) -> list[str]:
        """Return the names of parameters that hold a NaN or an infinity."""
        return [
            name
            for name, tensor in self.parameters.items()
            if not torch.isfinite(tensor.detach()).all()
        ]

    # --------------------------------------------------------------------------------------- layers
    def _adapt(self, layer: Any, number: int) -> None:
        arch = self.policy.arch
        name = f"model.layers.{number}."
        attention = name + "self_attn."
        mlp = name + "mlp."
        q, k, v = (self._low_rank(attention + p) for p in _COLUMN["self_attn"])
        rows = self._qkv_rows(arch)
        layer.self_attention.linear_qkv.register_forward_hook(
            self._column([q, k, v], rows, _by_group(arch, rows))
        )
        layer.self_attention.linear_proj.register_forward_hook(
            self._row(self._low_rank(attention + _ROW["self_attn"]))
        )
        gate_up = [self._low_rank(mlp + p) for p in _COLUMN["mlp"]]
        own = self._own(arch.ffn_hidden_size)
        layer.mlp.linear_fc1.register_forward_hook(self._column(gate_up, [own, own]))
        layer.mlp.linear_fc2.register_forward_hook(self._row(self._low_rank(mlp + _ROW["mlp"])))

    def _low_rank(self, module: str) -> LowRank | None:
        """Return a new pair for ``module``, B zero; the same on every rank and in every layout."""
        if module.rpartition(".")[2] not in self.config.targets:
            return None
        out, inside = hf_shapes(self.policy.arch)[f"{module}.weight"]
        A = first_A(module, self.config.rank, inside)
        pair = (
            A.to(current_device()).requires_grad_(),
            torch.zeros(out, self.config.rank, device=current_device()),
        )
        pair[1].requires_grad_()
        self.parameters[f"{module}.lora_A.weight"], self.parameters[f"{module}.lora_B.weight"] = (
            pair
        )
        low_rank = self.pairs[f"{module}.weight"] = LowRank(
            *pair, self.config.alpha / self.config.rank
        )
        return low_rank

    def share(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, of which every tensor-parallel rank will have the whole gradient: each
        keeps its share, for the sum over ranks.
        """
        if self.policy.topology.tp_size == 1:
            return tensor
        share = tensor / self.policy.topology.tp_size
        return tensor.detach() + (share - share.detach())

    def copied(self, x: Tensor) -> Tensor:
        """Return ``x``, whose gradient is summed over the tensor-parallel ranks."""
        topology = self.policy.topology
        if topology.tp_size == 1:
            return x
        return copy_to_tensor_model_parallel_region(x, group=topology.tp_group)

    def reduced(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the tensor-parallel ranks, of which each has the whole
        gradient.
        """
        topology = self.policy.topology
        if topology.tp_size == 1:
            return x
        return reduce_from_tensor_model_parallel_region(x, group=topology.tp_group)

    def _own(self, size: int) -> slice:
        """Return this tensor-parallel rank's part of ``size`` rows or columns."""
        part = size // self.policy.topology.tp_size
        return slice(self.policy.topology.tp_rank * part, (self.policy.topology.tp_rank + 1) * part)

    def _qkv_rows(self, arch: Architecture) -> list[slice]:
        heads = arch.num_attention_heads * arch.kv_channels
        groups = arch.num_query_groups * arch.kv_channels
        return [self._own(heads), self._own(groups), self._own(groups)]

    def _column(
        self, pairs: Sequence[LowRank | None], rows: Sequence[slice], order: Tensor | None = None
    ) -> Hook:
        """Return the hook of a column-parallel layer: each rank adds its own ``rows`` of each
        projection, in the layer's ``order`` (None: one projection behind the other). Transformer
        Engine's holds the norm too.
        """
        present = [pair for pair in pairs if pair is not None]

        def hook(
            linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
        ) -> tuple[Tensor, Any] | None:
            if not self.active or not present:
                return None
            x = inputs[0]
            group = self.policy.topology.tp_group
            norm = getattr(linear, "layer_norm_weight", None)
            if norm is not None:
                x = F.rms_norm(
                    x.float(), norm.shape, norm.float(), self.policy.arch.layernorm_epsilon
                ).to(x.dtype)
            A = torch.cat([pair.A for pair in present])
            if self.policy.config.sequence_parallel:
                inner = gather_from_sequence_parallel_region(
                    F.linear(x, A.to(x.dtype)), group=group
                )
            else:
                inner = self.copied(F.linear(x, self.share(A).to(x.dtype)))
            B = _diagonal(pairs, rows)
            if order is not None:
                B = B.index_select(0, order)
            return _plus(
                output=output[0],
                inner=inner,
                B=B,
                scale=present[0].scale,
            ), output[1]

        return hook

    def _row(self, pair: LowRank | None) -> Hook:
        """Return the hook of a row-parallel layer: each rank has its own columns of the input;
        their parts of A x are summed.
        """

        def hook(
            linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
        ) -> tuple[Tensor, Any] | None:
            if not self.active or pair is None:
                return None
            x = inputs[0]
            group = self.policy.topology.tp_group
            inner = F.linear(x, pair.A[:, self._own(pair.A.shape[1])].to(x.dtype))
            if self.policy.config.sequence_parallel:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=group)
                B = pair.B
            else:
                inner = self.reduced(inner)
                B = self.share(pair.B)
            return _plus(
                output=output[0],
                inner=inner,
                B=B,
                scale=pair.scale,
            ), output[1]

        return hook


def _plus(output: Tensor, inner: Tensor, B: Tensor, scale: float) -> Tensor:
    """Return output [..., out] + scale * inner [..., ranks] B^T [ranks, out], in one product that
    passes over the output once.
    """
    added = torch.addmm(output.flatten(0, -2), inner.flatten(0, -2) * scale, B.t().to(inner.dtype))
    return added.view_as(output)


def _diagonal(pairs: Sequence[LowRank | None], rows: Sequence[slice]) -> Tensor:
    """Return of each projection its ``rows`` of B, [all rows, ranks of all pairs]: zero where the
    ranks are not its own.
    """
    empty = next(pair.B for pair in pairs if pair is not None).new_zeros
    blocks = zip(pairs, rows, strict=True)
    return torch.block_diag(
        *(empty(own.stop - own.start, 0) if p is None else p.B[own] for p, own in blocks)
    )


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> None:
    """Begin the gradient's path at frozen embeddings all the same: recomputed layers only have one
    where their input does.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


@dataclass(frozen=True)
class MergedPolicy(Policy):
    """What is exported of a frozen policy with an adapter: its weights plus scale * B A."""

    adapter: Adapter

    @classmethod
    def of(cls, adapter: Adapter) -> MergedPolicy:
        own = {
            field.name: getattr(adapter.policy, field.name) for field in dataclasses.fields(Policy)
        }
        return cls(**own, adapter=adapter)

    @property
    def merged(self) -> tuple[str, ...]:
        return adapted(self.arch, self.adapter.config.targets)

    def addition(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.adapter.pairs[name].part(dim, start, stop)


def first_A(module: str, rank: int, inside: int) -> Tensor:
    """Return A [rank, inside] of a new pair: PEFT's distribution, and the same numbers wherever it
    is drawn.
    """
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little") >> 1
    bound = 1 / math.sqrt(inside)
    return torch.empty(rank, inside).uniform_(
        -bound, bound, generator=torch.Generator().manual_seed(seed)
    )


def _by_group(arch: Architecture, rows: Sequence[slice]) -> Tensor:
    """Return Megatron's order of QKV, as indices into this rank's rows of Q, K and V one behind the
    other: of each group its query heads, then its key, then its value.
    """
    sizes = [own.stop - own.start for own in rows]
    parts = torch.arange(sum(sizes), device=current_device()).split(sizes)
    return torch.cat(
        [part.view(sizes[1] // arch.kv_channels, -1) for part in parts], dim=-1
    ).flatten()


class AdapterOptimizer:
    """AdamW on an adapter's parameters: gradients summed over the ranks of the stage, clipped by
    the norm over all stages; the schedule is Megatron's. It has the methods of
    :class:`megatron_dcpo.policy.optimizer.PolicyOptimizer`.
    """

    megatron = None

    def __init__(self, adapter: Adapter, config: Config) -> None:
        options = config.optimizer
        megatron = config.parallel.megatron
        self.adapter = adapter
        self.clip_grad = options.clip_grad
        self.norm = 0.0
        self.exported: Policy = MergedPolicy.of(adapter)
        self.adam = torch.optim.AdamW(
            list(adapter.parameters.values()),
            lr=options.lr,
            betas=(megatron.get("adam_beta1", 0.9), megatron.get("adam_beta2", 0.999)),
            eps=megatron.get("adam_eps", 1e-8),
            weight_decay=options.weight_decay,
            fused=True,  # one pass over all of these small tensors, on the CPU too
        )
        for parameter in adapter.parameters.values():
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            self.adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                **moments,
            }
        self.scheduler = build_scheduler(self.adam, config)

    @property
    def nbytes(self) -> int:
        """Return the bytes of parameters, gradients and moments."""
        return 4 * sum(parameter.nbytes for parameter in self.adapter.parameters.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, as torch's optimizers have them."""
        return self.adam.param_groups

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        self.adam.zero_grad()

    def gradient_norm(self) -> float:
        """Sum the gradients over the stage's ranks; return the norm of the whole gradient.
        Collective.
        """
        topology = self.adapter.policy.topology
        parameters = list(self.adapter.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = parameter.grad
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        for group in (topology.tp_group, topology.replica_group):
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        for parameter, part in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        square = flat.double().square().sum()
        if topology.pp_size > 1:
            dist.all_reduce(square, group=topology.pp_group)
        self.norm = float(square.sqrt())
        return self.norm

    def step(self) -> None:
        """Clip by the last :meth:`gradient_norm`, update the parameters and advance the schedule."""
        if self.clip_grad and self.norm > self.clip_grad:
            for parameter in self.adapter.parameters.values():
                assert parameter.grad is not None
                parameter.grad *= self.clip_grad / (self.norm + 1e-6)
        self.adam.step()
        self.scheduler.step(1)

    def gather_parameters(self) -> None:
        """Do nothing: every rank has the whole adapter of its stage."""

    def not_finite(self) -> list[str]:
        """Return the names of the adapter's parameters that are not finite."""
        return self.adapter.not_finite()

    @property
    def done(self) -> int:
        """Return the number of steps taken."""
        return int(self.adam.state[next(iter(self.adapter.parameters.values()))]["step"])

    # ---------------------------------------------------------------------------------- checkpoints
    def sharded_state(self) -> dict[str, Any]:
        """Return parameters and moments under names that do not depend on the layout, the number of
        steps, the configuration.
        """
        topology = self.adapter.policy.topology
        replica = (0, topology.tp_rank, topology.replica)
        tensors = {
            f"{KEPT}{kind}.{name}": ShardedTensor.from_rank_offsets(
                f"{KEPT}{kind}.{name}", tensor.detach(), replica_id=replica
            )
            for name, parameter in self.adapter.parameters.items()
            for kind, tensor in {"weight": parameter, **self._moments(parameter)}.items()
        }
        # for who merges it, and reads no pickled part
        scale = torch.tensor([self.adapter.config.alpha / self.adapter.config.rank])
        replica = (topology.pp_rank, *replica[1:])
        tensors[SCALE] = ShardedTensor.from_rank_offsets(SCALE, scale, replica_id=replica)
        return {
            "tensors": tensors,
            "steps": self.done,
            "config": dataclasses.asdict(self.adapter.config),
        }

    def restore(self, loaded: dict[str, Any]) -> None:
        """Continue from what loading :meth:`sharded_state` gave."""
        with torch.no_grad():
            for name, parameter in self.adapter.parameters.items():
                self.adam.state[parameter]["step"].fill_(loaded["steps"])
                for kind, tensor in {"weight": parameter, **self._moments(parameter)}.items():
                    tensor.copy_(loaded["tensors"][f"{KEPT}{kind}.{name}"])

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: self.adam.state[parameter][name] for name in _MOMENTS}
