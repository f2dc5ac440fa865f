"""The gradients of two parts of a loss against each other, per group of layers, under any parallel
layout.

One part's gradient is taken by a backward pass of its own and compared with the other's, or with
the rest of the step's: norms and cosine, under two metrics. While training the parts are the
reasoning and the confidence tokens; ``training/probe.py`` has more.

* plain: <a, b> = sum_i a_i b_i;
* fisher: <a, b> = sum_i a_i b_i / (F_i + damping), the direction in which a natural step would
trade one part for the
  other. F is the empirical diagonal Fisher matrix as Adam keeps it, the bias-corrected running mean
  of squared gradients of
  the step's loss (before the first step: the sum of the two squares); the damping is ``DAMPING``
  times the mean of
  its entries, so that coordinates with hardly any gradient, whose quotients are rounding noise, do
  not decide.

Every inner product counts a parameter once: shards are summed over tensor-parallel ranks (and over
data-parallel ones with the distributed optimizer), replicated parameters count on one
tensor-parallel rank, tied embeddings on the first stage. These are the rules of Megatron's gradient
norm (``get_main_grads_for_grad_norm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import optimizer_group, optimizer_parts, zero_gradients
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.weights.table import number_of_parameters

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.transformer.module import param_is_not_shared

DAMPING = 1e-2
LAYER_GROUPS = 4  # the layers are reported in that many groups, first to last
ALL = "all"
PIECE = 2**22  # elements compared at a time


@dataclass(frozen=True)
class GradientPair:
    """Two gradients a and b under one metric: their norms and the cosine between them (0 where one
    vanishes).
    """

    norm_a: float
    norm_b: float
    cosine: float

    @classmethod
    def of(cls, aa: float, bb: float, ab: float) -> GradientPair:
        """Return the pair with these three inner products."""
        return cls(
            norm_a=aa**0.5,
            norm_b=bb**0.5,
            cosine=ab / (aa * bb) ** 0.5 if aa > 0 and bb > 0 else 0.0,
        )


@dataclass(frozen=True)
class PairComparison:
    """``plain`` and ``fisher``: {group of layers, or ``all``: the comparison}."""

    plain: dict[str, GradientPair]
    fisher: dict[str, GradientPair]

    def swapped(self) -> PairComparison:
        """Exchange a and b."""
        return PairComparison(
            *(
                {
                    name: GradientPair(
                        norm_a=p.norm_b,
                        norm_b=p.norm_a,
                        cosine=p.cosine,
                    )
                    for name, p in x.items()
                }
                for x in (self.plain, self.fisher)
            )
        )

    def metrics(self) -> dict[str, float]:
        """Return the comparison of reasoning (a) and confidence (b) under the names of
        ``metrics.jsonl``; the whole model, then each group of layers' cosine.
        """
        whole = self.plain[ALL]
        natural = self.fisher[ALL]
        return {
            "grad_norm/reasoning": whole.norm_a,
            "grad_norm/confidence": whole.norm_b,
            "grad_cosine/reasoning_confidence": whole.cosine,
            "grad_cosine_fisher/reasoning_confidence": natural.cosine,
            **{
                f"grad_cosine/{name}": pair.cosine
                for name, pair in self.plain.items()
                if name != ALL
            },
        }


def probe_block_gradients(
    policy: Policy, optimizer: Any, part: Callable[[], Any], whole: Callable[[], Any]
) -> tuple[Any, PairComparison]:
    """Run the backward passes ``part``, of a term of the loss, and ``whole``, of the loss, and
    compare the gradient of the term (a) with that of the rest (b), their difference. Collective.

    The gradient of the step is left in the buffers, as without a probe. The rest is exact to the
    rounding of the two passes: where ``part`` is a hundred times larger, bfloat16 leaves the rest
    hardly a digit. Returns what ``whole`` does and the measurement.
    """
    _, term = part_gradient(policy, optimizer, part)
    result, total = part_gradient(
        policy=policy,
        optimizer=optimizer,
        backward=whole,
        copy=False,
    )
    return result, compare(
        policy=policy,
        optimizer=optimizer,
        a=term,
        b=total,
        is_sum=True,
    )


def part_gradient(
    policy: Policy, optimizer: Any, backward: Callable[[], Any], copy: bool = True
) -> tuple[Any, list[OwnedGradient]]:
    """Return result and gradient of one part of the loss, taken by a ``backward`` pass of its own
    over zeroed buffers. Collective.

    A ``copy`` is on the host; without one the gradient may share memory with the buffers, which the
    next pass overwrites.
    """
    zero_gradients(policy, optimizer)
    result = backward()
    return result, owned_gradients(policy, optimizer, copy)


@dataclass(frozen=True)
class OwnedGradient:
    """One parameter's (or shard's) gradient that counts on this rank, and its group of layers.

    ``square / correction`` is the mean square of its gradient over past steps; None before the
    first.
    """

    group: str
    gradient: Tensor
    square: Tensor | None
    correction: float = 1.0

    def pieces(self, other: OwnedGradient, is_sum: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield float64 pieces of this gradient, of ``other``'s (less this one, where that
        ``is_sum`` of both), and of the diagonal Fisher matrix: no large temporaries.
        """
        x = self.gradient.reshape(-1)
        y = other.gradient.reshape(-1)
        square = self.square.reshape(-1) if self.square is not None else None
        for start in range(0, len(x), PIECE):
            a, b = (z[start : start + PIECE].to(current_device()).double() for z in (x, y))
            b = b - a if is_sum else b
            if square is None:
                yield a, b, a.square() + b.square()
            else:
                yield a, b, square[start : start + PIECE].double() / self.correction


def compare(
    policy: Policy,
    optimizer: Any,
    a: list[OwnedGradient],
    b: list[OwnedGradient],
    is_sum: bool = False,
) -> PairComparison:
    """Return norms and cosines of gradients ``a`` and ``b`` (``owned_gradients`` of every rank), by
    groups of layers and in all; ``is_sum``: of ``a`` and ``b - a``.

    Two all-reduces of a few numbers, in float64. The Fisher matrix is that of ``a``'s members.
    """
    device = current_device()  # a rank may hold nothing that counts
    group = optimizer_group(optimizer)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first, second in zip(a, b, strict=True):
        for _, _, fisher in first.pieces(second, is_sum):
            total += fisher.sum()
    dist.all_reduce(total, group=group)
    # the checkpoint's number of parameters: how many rows pad the vocabulary depends on the layout
    parameters = number_of_parameters(policy.arch)
    damping = max(DAMPING * float(total) / parameters, 1e-30)
    groups = layer_groups(policy)
    products = torch.zeros(len(groups), 2, 3, dtype=torch.float64, device=device)
    for first, second in zip(a, b, strict=True):
        row = products[groups.index(first.group)]
        for x, y, fisher in first.pieces(second, is_sum):
            three = torch.stack([x * x, y * y, x * y])
            row[0] += three.sum(1)
            row[1] += (three / (fisher + damping)).sum(1)
    dist.all_reduce(products, group=group)
    named = [*zip(groups, products, strict=True), (ALL, products.sum(0))]
    plain, natural = (
        {name: GradientPair.of(*row[i].tolist()) for name, row in named} for i in (0, 1)
    )
    return PairComparison(plain, natural)


def owned_gradients(policy: Policy, optimizer: Any, copy: bool = True) -> list[OwnedGradient]:
    """Return this rank's share of the gradient in the buffers, each parameter of the model on
    exactly one rank of the group.

    A ``copy`` is on the host; without one it may share memory with the buffers.
    """
    optimizer.prepare_grads()
    names = _group_of_parameters(policy)
    gradients = []
    for part in optimizer_parts(optimizer):
        settings = {id(p): group for group in part.optimizer.param_groups for p in group["params"]}
        for model, main in _parameter_pairs(part):
            if main.grad is None or not param_is_not_shared(main):
                continue
            if not tensor_parallel.param_is_not_tensor_parallel_duplicate(
                main, getattr(part, "tp_group", None)
            ):
                continue
            gradient = main.grad.detach().float()
            if copy:
                gradient = gradient.to("cpu", copy=True)
            square = part.optimizer.state.get(main, {}).get("exp_avg_sq")
            options = settings[id(main)]
            correction = 1 - options["betas"][1] ** max(int(options.get("step", 1)), 1)
            gradients.append(
                OwnedGradient(
                    group=names[id(model)],
                    gradient=gradient,
                    square=square,
                    correction=correction,
                )
            )
    return gradients


def layer_groups(policy: Policy) -> list[str]:
    """Return the names of the groups, equal on all ranks: ``embedding``, ranges of layers (counted
    from 0), ``output``.
    """
    layers = policy.arch.num_layers
    return ["embedding", *dict.fromkeys(_layer_group(i, layers) for i in range(layers)), "output"]


def _layer_group(layer: int, num_layers: int) -> str:
    count = min(LAYER_GROUPS, num_layers)
    number = layer * count // num_layers
    members = [i for i in range(num_layers) if i * count // num_layers == number]
    if len(members) == 1:
        return f"layers_{members[0]}"
    return f"layers_{members[0]}_{members[-1]}"


def _group_of_parameters(policy: Policy) -> dict[int, str]:
    """Return the id of every parameter of this rank -> its group. Tied embeddings belong to
    ``embedding``.
    """
    groups = {}
    for gpt in policy.gpt:
        numbers = {index: layer.layer_number - 1 for index, layer in enumerate(gpt.decoder.layers)}
        for name, parameter in gpt.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                groups[id(parameter)] = _layer_group(numbers[int(parts[2])], policy.arch.num_layers)
            # a last stage's copy of tied embeddings is not counted, so its name does not matter
            else:
                if parts[0] == "embedding":
                    groups[id(parameter)] = "embedding"
                else:
                    groups[id(parameter)] = "output"
    return groups


def _parameter_pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter of the model, fp32 parameter or shard that the optimizer steps) of one of
    Megatron's optimizers.
    """
    if hasattr(part, "shard_fp32_groups"):  # DistributedOptimizer
        pairs = [
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ]
    elif hasattr(part, "float16_groups"):  # Float16OptimizerWithFloat16Params
        pairs = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:  # FP32Optimizer
        own = [group["params"] for group in part.optimizer.param_groups]
        pairs = [(own, own)]
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)
