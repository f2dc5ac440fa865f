"""Low-rank adapters (LoRA) on Megatron's parallel linear layers, and their optimizer.

The parameters of the policy itself are frozen; an adapted layer computes W x + (alpha / rank) B A
x. Names and shapes of the parameters are PEFT's, by Hugging Face's projections: one of Megatron's
fused layers (QKV, gate and up) has one pair A, B for each of its projections. Every rank of a
pipeline stage holds all pairs of the stage whole, in fp32, and computes with its rows of B (in a
row-parallel layer, its columns of A), so that only A x travels between ranks. Gradients are summed
over the stage's ranks (docs/layouts.md#lora).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import AdapterConfig, RunConfig
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import build_scheduler
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.weights.adapter_shape import adapter_shape, described, layer_of
from megatron_dcpo.weights.peft_adapter import (
    KEPT,
    SCALE,
    LowRank,
    read_low_rank,
    scale_key,
    write_adapter,
)
from megatron_dcpo.weights.table import hf_shapes

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)

_COLUMN = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_ROW = {"self_attn": "o_proj", "mlp": "down_proj"}
# A Megatron linear layer returns its output and its bias.
LinearOutput = tuple[Tensor, Tensor | None]
# a forward hook of such a layer: module, inputs, output -> the output to use instead, if any
Hook = Callable[[Module, tuple[Tensor, ...], LinearOutput], LinearOutput | None]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adapter:
    """The adapter of this rank's pipeline stage. ``parameters`` holds its tensors by PEFT's names,
    in fp32, equal on all ranks of the stage; ``pairs`` holds A and B by the tensor to which their
    product is added. They begin as ``start`` says, or else with B zero.

    The adapter takes part in every forward pass of the policy, except inside :meth:`inactive`.
    """

    def __init__(self, policy: Policy, config: AdapterConfig) -> None:
        self.policy = policy
        self.config = config
        self.shape = adapter_shape(config, policy.arch)
        self.start: dict[str, LowRank] = {}
        if config.path:
            self.start = read_low_rank(Path(config.path), policy.arch)
        self.active = True
        self.parameters: dict[str, Tensor] = {}
        self.pairs: dict[str, LowRank] = {}
        for gpt in policy.gpt:
            for layer in gpt.decoder.layers:
                self._adapt(layer, layer.layer_number - 1)
        self._start_gradients()

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Use the policy without its adapter, as it was before training."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters of all stages, on the CPU of every rank. Collective."""
        topology = self.policy.topology
        stage: dict[str, Tensor] = {}
        if topology.tp_rank == 0 and topology.replica == 0:
            stage = {name: tensor.detach().cpu() for name, tensor in self.parameters.items()}
        parameters = {}
        for each in all_gather_objects(stage):
            parameters.update(each)
        return parameters

    def not_finite(self) -> list[str]:
        """Return the names of parameters that hold a NaN or an infinity."""
        names = []
        for name, tensor in self.parameters.items():
            if not torch.isfinite(tensor.detach()).all():
                names.append(name)
        return names

    # --------------------------------------------------------------------------------------- layers
    def _adapt(self, layer: TransformerLayer, number: int) -> None:
        """Add pairs to the linear layers of decoder layer ``number``, counted from 0."""
        arch = self.policy.arch
        attention = f"model.layers.{number}.self_attn."
        mlp = f"model.layers.{number}.mlp."
        qkv = [self._low_rank(attention + projection) for projection in _COLUMN["self_attn"]]
        rows = self._qkv_rows(arch)
        layer.self_attention.linear_qkv.register_forward_hook(
            self._column(qkv, rows, _by_group(arch, rows))
        )
        out = self._low_rank(attention + _ROW["self_attn"])
        layer.self_attention.linear_proj.register_forward_hook(self._row(out))
        gate_up = [self._low_rank(mlp + projection) for projection in _COLUMN["mlp"]]
        rows_of_each = self._shard(arch.ffn_hidden_size)
        layer.mlp.linear_fc1.register_forward_hook(
            self._column(gate_up, [rows_of_each, rows_of_each])
        )
        down = self._low_rank(mlp + _ROW["mlp"])
        layer.mlp.linear_fc2.register_forward_hook(self._row(down))

    def _start_gradients(self) -> None:
        """Let the gradient's path begin at the input of the first adapted layer. If layers are
        recomputed in groups it begins at the embeddings: what is recomputed has a gradient only if
        its input does.
        """
        first = min(map(layer_of, self.shape.ranks))
        in_groups = self.policy.config.recompute_granularity == "full"
        for gpt in self.policy.gpt:
            if gpt.pre_process and in_groups:
                gpt.embedding.register_forward_hook(_with_gradient_behind)
            for layer in gpt.decoder.layers:
                if layer.layer_number - 1 == first and not in_groups:
                    layer.register_forward_pre_hook(_with_gradient_before, with_kwargs=True)

    def _low_rank(self, module: str) -> LowRank | None:
        """Return the pair for ``module``, or None if the module is not adapted. The numbers are the
        same on every rank and in every layout.
        """
        if module not in self.shape.ranks:
            return None
        name = f"{module}.weight"
        rank = self.shape.ranks[module]
        rows, columns = hf_shapes(self.policy.arch)[name]
        A = first_A(module, rank, columns)
        B = torch.zeros(rows, rank)
        if name in self.start:
            A = self.start[name].A
            B = self.start[name].B
        A = A.to(current_device()).requires_grad_()
        B = B.to(current_device()).requires_grad_()
        self.parameters[f"{module}.lora_A.weight"] = A
        self.parameters[f"{module}.lora_B.weight"] = B
        low_rank = LowRank(A=A, B=B, scale=self.shape.scales[module])
        self.pairs[name] = low_rank
        return low_rank

    def share(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, but divide its gradient by the number of tensor-parallel ranks: each
        of them computes the whole gradient, and the sum over ranks must be it again.
        """
        if self.policy.topology.tp_size == 1:
            return tensor
        share = tensor / self.policy.topology.tp_size
        return tensor.detach() + (share - share.detach())

    def copied(self, x: Tensor) -> Tensor:
        """Return ``x``, and sum its gradient over the tensor-parallel ranks."""
        topology = self.policy.topology
        if topology.tp_size == 1:
            return x
        return copy_to_tensor_model_parallel_region(x, group=topology.tp_group)

    def reduced(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the tensor-parallel ranks; each of them gets the gradient of
        the sum.
        """
        topology = self.policy.topology
        if topology.tp_size == 1:
            return x
        return reduce_from_tensor_model_parallel_region(x, group=topology.tp_group)

    def _shard(self, size: int) -> slice:
        """Return this tensor-parallel rank's part of ``size`` rows or columns."""
        topology = self.policy.topology
        part = size // topology.tp_size
        return slice(topology.tp_rank * part, (topology.tp_rank + 1) * part)

    def _qkv_rows(self, arch: Architecture) -> list[slice]:
        queries = self._shard(arch.num_attention_heads * arch.kv_channels)
        keys = self._shard(arch.num_query_groups * arch.kv_channels)
        return [queries, keys, keys]

    def _column(
        self, pairs: Sequence[LowRank | None], rows: Sequence[slice], order: Tensor | None = None
    ) -> Hook:
        """Return the hook of a column-parallel layer, in which each rank adds its ``rows`` of each
        projection. ``order`` sorts the rows as the layer has them; without it the projections
        follow one another. Transformer Engine's layer also applies the norm, so the hook does too.
        """
        present = [pair for pair in pairs if pair is not None]

        def hook(
            linear: Module, inputs: tuple[Tensor, ...], output: LinearOutput
        ) -> LinearOutput | None:
            if not self.active or not present:
                return None
            x = inputs[0]
            norm = getattr(linear, "layer_norm_weight", None)
            if norm is not None:
                arch = self.policy.arch
                scale = norm.float() + arch.zero_centered_norms
                eps = arch.layernorm_epsilon
                x = F.rms_norm(x.float(), norm.shape, scale, eps).to(x.dtype)
            A = torch.cat([pair.A for pair in present])
            if self.policy.config.sequence_parallel:
                inner = gather_from_sequence_parallel_region(
                    F.linear(x, A.to(x.dtype)), group=self.policy.topology.tp_group
                )
            else:
                inner = self.copied(F.linear(x, self.share(A).to(x.dtype)))
            B = _diagonal(pairs, rows)
            if order is not None:
                B = B.index_select(0, order)
            result, bias = output
            scaled = _scaled(inner, present)
            return _plus(output=result, scaled=scaled, B=B), bias

        return hook

    def _row(self, pair: LowRank | None) -> Hook:
        """Return the hook of a row-parallel layer, in which each rank has some columns of the
        input; the ranks' parts of A x are summed.
        """

        def hook(
            linear: Module, inputs: tuple[Tensor, ...], output: LinearOutput
        ) -> LinearOutput | None:
            if not self.active or pair is None:
                return None
            x = inputs[0]
            columns = self._shard(pair.A.shape[1])
            inner = F.linear(x, pair.A[:, columns].to(x.dtype))
            if self.policy.config.sequence_parallel:
                inner = reduce_scatter_to_sequence_parallel_region(
                    inner, group=self.policy.topology.tp_group
                )
                B = pair.B
            else:
                inner = self.reduced(inner)
                B = self.share(pair.B)
            result, bias = output
            scaled = _scaled(inner, [pair])
            return _plus(output=result, scaled=scaled, B=B), bias

        return hook


def _scaled(inner: Tensor, pairs: Sequence[LowRank]) -> Tensor:
    """Return the products A x of one or several pairs, [n, ranks], each times the scale of its
    pair.
    """
    rows = inner.flatten(0, -2)
    if len({pair.scale for pair in pairs}) == 1:
        return rows * pairs[0].scale
    # in fp32, as a Python number is multiplied too
    scales = [torch.full((pair.A.shape[0],), pair.scale) for pair in pairs]
    return (rows.float() * torch.cat(scales).to(rows.device)).to(rows.dtype)


def _plus(output: Tensor, scaled: Tensor, B: Tensor) -> Tensor:
    """Return output [..., out] + scaled [n, ranks] B^T [ranks, out], in one product that passes
    over the output once.
    """
    added = torch.addmm(output.flatten(0, -2), scaled, B.t().to(scaled.dtype))
    return added.view_as(output)


def _diagonal(pairs: Sequence[LowRank | None], rows: Sequence[slice]) -> Tensor:
    """Return the given ``rows`` of each projection's B as a block-diagonal matrix [all rows, ranks
    of all pairs]. A projection without a pair has rows of zeros.
    """
    some_B = next(pair.B for pair in pairs if pair is not None)

    def block(pair: LowRank | None, part: slice) -> Tensor:
        if pair is None:
            return some_B.new_zeros(part.stop - part.start, 0)
        return pair.B[part]

    return torch.block_diag(*map(block, pairs, rows))


def _with_gradient_behind(module: Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Start the gradient's path at the output of a frozen module."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def _with_gradient_before(
    module: Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Start the gradient's path at the input of a layer, unless it has begun."""
    if torch.is_grad_enabled():
        hidden = inputs[0] if inputs else named["hidden_states"]
        hidden.requires_grad_()


@dataclass(frozen=True)
class MergedPolicy(Policy):
    """A frozen policy as it is exported with its adapter: weights plus scale * B A."""

    adapter: Adapter

    @classmethod
    def of(cls, adapter: Adapter) -> MergedPolicy:
        fields = {}
        for field in dataclasses.fields(Policy):
            fields[field.name] = getattr(adapter.policy, field.name)
        return cls(**fields, adapter=adapter)

    @property
    def merged(self) -> tuple[str, ...]:
        return self.adapter.shape.tensors

    def addition(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.adapter.pairs[name].part(dim, start, stop)


def first_A(module: str, rank: int, columns: int) -> Tensor:
    """Return A [rank, columns] of a new pair for ``module``: PEFT's distribution, with numbers that
    depend on the module's name and shape only.
    """
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)


def _by_group(arch: Architecture, rows: Sequence[slice]) -> Tensor:
    """Return Megatron's order of QKV, as indices into this rank's rows of Q, K and V placed one
    after another: for each group its query heads, then its key, then its value.
    """
    sizes = [part.stop - part.start for part in rows]
    groups = sizes[1] // arch.kv_channels
    q, k, v = torch.arange(sum(sizes), device=current_device()).split(sizes)
    by_group = [q.view(groups, -1), k.view(groups, -1), v.view(groups, -1)]
    return torch.cat(by_group, dim=-1).flatten()


def build_adapter_optimizer(config: RunConfig, policy: Policy) -> AdapterOptimizer:
    """Add the adapter of ``model.adapter`` to a policy, and return its optimizer."""
    assert config.model.adapter is not None
    adapter = Adapter(policy, config.model.adapter)
    if adapter.shape.dropout and policy.topology.rank == 0:
        logger.warning(
            "%s was trained with lora_dropout=%g, which is not applied here",
            config.model.adapter.path,
            adapter.shape.dropout,
        )
    optimizer = AdapterOptimizer(adapter, config)
    ledger.put("adapter", optimizer.nbytes)
    return optimizer


class AdapterOptimizer:
    """AdamW on an adapter's parameters, an
    :class:`megatron_dcpo.policy.optimizer.Optimizer`. Gradients are summed over the ranks of
    the stage and clipped by their norm over all stages; the schedule is Megatron's.
    """

    megatron = None

    def __init__(self, adapter: Adapter, config: RunConfig) -> None:
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
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        for group in (topology.tp_group, topology.replica_group):
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        square = flat.double().square().sum()
        if topology.pp_size > 1:
            dist.all_reduce(square, group=topology.pp_group)
        self.norm = float(square.sqrt())
        return self.norm

    def step(self) -> None:
        """Clip by the last :meth:`gradient_norm`, update the parameters, advance the schedule."""
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

    def trained(self) -> dict[str, list[Tensor]]:
        """Return the parameters and moments of the adapter, by the names of their groups in a
        checkpoint.
        """
        found: dict[str, list[Tensor]] = {}
        for parameter in self.adapter.parameters.values():
            for kind, tensor in self._kept(parameter).items():
                found.setdefault(f"{KEPT}{kind}", []).append(tensor)
        return found

    @property
    def done(self) -> int:
        """Return the number of steps taken."""
        some_parameter = next(iter(self.adapter.parameters.values()))
        return int(self.adam.state[some_parameter]["step"])

    @property
    def adapter_options(self) -> dict[str, Any]:
        """Return the options of ``model.adapter``, with the values of those that are not set."""
        return described(self.adapter.config)

    @contextmanager
    def starting_policy(self) -> Iterator[Policy]:
        """Open the policy without its adapter."""
        with self.adapter.inactive():
            yield self.adapter.policy

    def write_adapter(self, directory: Path, base: str) -> None:
        """Write the adapter of the model ``base`` in PEFT's format. Collective."""
        tensors = self.adapter.whole()
        if self.adapter.policy.topology.rank == 0:
            write_adapter(directory, tensors, shape=self.adapter.shape, base=base)

    # ---------------------------------------------------------------------------------- checkpoints
    def adapter_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: parameters and moments under names that do not depend on
        the layout, the number of steps, and the adapter's configuration.
        """
        topology = self.adapter.policy.topology
        replica = (0, topology.tp_rank, topology.replica)
        tensors = {}
        for name, parameter in self.adapter.parameters.items():
            for kind, tensor in self._kept(parameter).items():
                key = f"{KEPT}{kind}.{name}"
                tensors[key] = ShardedTensor.from_rank_offsets(
                    key, tensor.detach(), replica_id=replica
                )
        # tensors, for readers that merge the adapter and open no pickled part
        replica = (topology.pp_rank, topology.tp_rank, topology.replica)
        scale = self.adapter.shape.scale
        scales = {SCALE: scale}
        if scale is None:
            scales = {
                scale_key(module): value for module, value in self.adapter.shape.scales.items()
            }
        for key, value in scales.items():
            tensors[key] = ShardedTensor.from_rank_offsets(
                key, torch.tensor([value]), replica_id=replica
            )
        return {"tensors": tensors, "steps": self.done, "config": self.adapter_options}

    def restore_adapter(self, loaded: dict[str, Any]) -> None:
        """Continue from ``loaded``, which has the form of :meth:`adapter_state`."""
        with torch.no_grad():
            for name, parameter in self.adapter.parameters.items():
                self.adam.state[parameter]["step"].fill_(loaded["steps"])
                for kind, tensor in self._kept(parameter).items():
                    tensor.copy_(loaded["tensors"][f"{KEPT}{kind}.{name}"])

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter and its moments, by the names that checkpoints give them."""
        kept = {"weight": parameter}
        for moment in _MOMENTS:
            kept[moment] = self.adam.state[parameter][moment]
        return kept
