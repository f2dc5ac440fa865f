"""Comparison of the gradients of two parts of a loss, for groups of layers, under any parallel
layout: norms and cosine, under two metrics.

``training.callback: lab/gradient_probe.py:every_step`` (or ``:every_50_steps``) measures the
gradients of the reasoning and of the confidence tokens while a run trains, each by a backward pass;
``lab/probe.py`` compares more on a policy that is not trained.

* plain: <a, b> = sum_i a_i b_i;
* fisher: <a, b> = sum_i a_i b_i / (F_i + damping), the direction in which a natural-gradient step
  would trade one part for the other. F is the empirical diagonal Fisher matrix as Adam keeps it:
  the bias-corrected running mean of the squared gradients of the step's loss (before the first
  step, the sum of the two squares). The damping is ``DAMPING`` times the mean of F, so that
  coordinates with hardly any gradient, whose quotients are rounding noise, do not decide.

Every inner product counts a parameter once: shards are summed over tensor-parallel ranks (and over
data-parallel ranks with the distributed optimizer), replicated parameters count on one
tensor-parallel rank, tied embeddings on the first stage. These are the rules of Megatron's gradient
norm (``get_main_grads_for_grad_norm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import (
    PolicyOptimizer,
    optimizer_group,
    optimizer_parts,
    zero_gradients,
)
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.training.updater import Updater
from megatron_dcpo.types import BLOCKS, TrainingSample, replaced
from megatron_dcpo.weights.table import number_of_parameters

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.transformer.module import param_is_not_shared

DAMPING = 1e-2
LAYER_GROUPS = 4  # the number of groups in which layers are reported, first to last
ALL = "all"
PIECE = 2**22  # elements compared at a time

Result = TypeVar("Result")


@dataclass(frozen=True)
class GradientPair:
    """Two gradients a and b under one metric: their norms and the cosine between them, which is 0
    if one of them vanishes.
    """

    norm_a: float
    norm_b: float
    cosine: float

    @classmethod
    def of(cls, aa: float, bb: float, ab: float) -> GradientPair:
        """Return the pair with the inner products <a, a>, <b, b> and <a, b>."""
        cosine = 0.0
        if aa > 0 and bb > 0:
            cosine = ab / (aa * bb) ** 0.5
        return cls(norm_a=aa**0.5, norm_b=bb**0.5, cosine=cosine)


@dataclass(frozen=True)
class PairComparison:
    """The comparison of two gradients under both metrics. Keys are groups of layers, and ``all``
    for the whole model.
    """

    plain: dict[str, GradientPair]
    fisher: dict[str, GradientPair]

    def metrics(self) -> dict[str, float]:
        """Return the comparison of reasoning (a) and confidence (b) under the names of
        ``metrics.jsonl``: first the whole model, then the cosine of each group of layers.
        """
        whole = self.plain[ALL]
        metrics = {
            "grad_norm/reasoning": whole.norm_a,
            "grad_norm/confidence": whole.norm_b,
            "grad_cosine/reasoning_confidence": whole.cosine,
            "grad_cosine_fisher/reasoning_confidence": self.fisher[ALL].cosine,
        }
        for name, pair in self.plain.items():
            if name != ALL:
                metrics[f"grad_cosine/{name}"] = pair.cosine
        return metrics


def every_step(updater: Updater, samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
    """Return what the gradients of reasoning and confidence tokens are worth in this update.
    Collective.
    """
    optimizer = updater.trainer.optimizer
    if not isinstance(optimizer, PolicyOptimizer):
        raise UserError(
            "training.callback: the probe compares gradients of the policy's own parameters; leave "
            "out model.adapter"
        )
    policy = updater.trainer.policy
    reasoning, confidence = (
        part_gradient(
            policy, optimizer.megatron, partial(updater.accumulate, of_block(samples, block))
        )[1]
        for block in BLOCKS
    )
    return compare(policy, optimizer.megatron, a=reasoning, b=confidence).metrics()


def every_50_steps(
    updater: Updater, samples: Sequence[TrainingSample], step: int
) -> dict[str, float]:
    """Return what :func:`every_step` does, in the first step and in every fiftieth. Collective."""
    if step != 1 and step % 50:
        return {}
    return every_step(updater, samples, step)


def of_block(samples: Sequence[TrainingSample], block: str) -> list[TrainingSample]:
    """Return scored samples with no weight on tokens outside ``block``."""
    weighted = []
    for sample in samples:
        assert sample.weights is not None
        weights = np.where(sample.block_ids == BLOCKS[block], sample.weights, 0.0)
        weighted.append(replaced(sample, weights=weights))
    return weighted


def part_gradient(
    policy: Policy, optimizer: MegatronOptimizer, backward: Callable[[], Result], copy: bool = True
) -> tuple[Result, list[OwnedGradient]]:
    """Return the result of the pass ``backward``, run over zeroed buffers, and the gradient that it
    leaves there. Collective.

    A ``copy`` is on the host. Without it the gradient may share memory with the buffers, which the
    next pass overwrites.
    """
    zero_gradients(policy, optimizer)
    result = backward()
    return result, owned_gradients(policy, optimizer, copy)


@dataclass(frozen=True)
class OwnedGradient:
    """The gradient of one parameter (or shard) that counts on this rank, and its group of layers.

    ``square / correction`` is the mean square of its gradient over past steps; ``square`` is None
    before the first step.
    """

    group: str
    gradient: Tensor
    square: Tensor | None
    correction: float = 1.0

    def pieces(self, other: OwnedGradient) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield this gradient, the ``other`` one and the diagonal Fisher matrix in float64, a piece
        at a time to avoid large temporaries.
        """
        a_whole = self.gradient.reshape(-1)
        b_whole = other.gradient.reshape(-1)
        for start in range(0, len(a_whole), PIECE):
            piece = slice(start, start + PIECE)
            a = a_whole[piece].to(current_device()).double()
            b = b_whole[piece].to(current_device()).double()
            if self.square is None:
                fisher = a.square() + b.square()
            else:
                fisher = self.square.reshape(-1)[piece].double() / self.correction
            yield a, b, fisher


def compare(
    policy: Policy,
    optimizer: MegatronOptimizer,
    a: list[OwnedGradient],
    b: list[OwnedGradient],
) -> PairComparison:
    """Return norms and cosines of the gradients ``a`` and ``b``, each in the form that
    :func:`owned_gradients` returns on every rank, for groups of layers and for the whole model.
    Collective.

    It takes two all-reduces of a few float64 numbers. The Fisher matrix is taken from ``a``.
    """
    device = current_device()  # a rank may hold nothing that counts
    group = optimizer_group(optimizer)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first, second in zip(a, b, strict=True):
        for _, _, fisher in first.pieces(second):
            total += fisher.sum()
    dist.all_reduce(total, group=group)
    # The mean is over the parameters of the checkpoint, because the number of rows that pad the
    # vocabulary depends on the layout.
    damping = max(DAMPING * float(total) / number_of_parameters(policy.arch), 1e-30)
    groups = layer_groups(policy)
    # for each group and each metric: <a, a>, <b, b>, <a, b>
    products = torch.zeros(len(groups), 2, 3, dtype=torch.float64, device=device)
    for first, second in zip(a, b, strict=True):
        row = products[groups.index(first.group)]
        for x, y, fisher in first.pieces(second):
            three = torch.stack([x * x, y * y, x * y])
            row[0] += three.sum(1)
            row[1] += (three / (fisher + damping)).sum(1)
    dist.all_reduce(products, group=group)
    plain = {}
    natural = {}
    for name, row in [*zip(groups, products, strict=True), (ALL, products.sum(0))]:
        plain[name] = GradientPair.of(*row[0].tolist())
        natural[name] = GradientPair.of(*row[1].tolist())
    return PairComparison(plain=plain, fisher=natural)


def owned_gradients(
    policy: Policy, optimizer: MegatronOptimizer, copy: bool = True
) -> list[OwnedGradient]:
    """Return this rank's share of the gradient in the buffers. Each parameter of the model is on
    exactly one rank of the group.

    A ``copy`` is on the host. Without it the gradient may share memory with the buffers.
    """
    optimizer.prepare_grads()
    group_of = _group_of_parameters(policy)
    gradients = []
    for part in optimizer_parts(optimizer):
        settings = {}
        for param_group in part.optimizer.param_groups:
            for parameter in param_group["params"]:
                settings[id(parameter)] = param_group
        for model, main in _parameter_pairs(part):
            if main.grad is None or not _counts_here(main, part):
                continue
            gradient = main.grad.detach().float()
            if copy:
                gradient = gradient.to("cpu", copy=True)
            options = settings[id(main)]
            steps = max(int(options.get("step", 1)), 1)
            gradients.append(
                OwnedGradient(
                    group=group_of[id(model)],
                    gradient=gradient,
                    square=part.optimizer.state.get(main, {}).get("exp_avg_sq"),
                    correction=1 - options["betas"][1] ** steps,
                )
            )
    return gradients


def _counts_here(parameter: Tensor, part: MegatronOptimizer) -> bool:
    """Return whether Megatron's gradient norm counts a parameter on this rank."""
    if not param_is_not_shared(parameter):
        return False
    group = getattr(part, "tp_group", None)
    return tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter, group)


def layer_groups(policy: Policy) -> list[str]:
    """Return the names of the groups, equal on all ranks: ``embedding``, ranges of layers (counted
    from 0), ``output``.
    """
    num_layers = policy.arch.num_layers
    layers = dict.fromkeys(_layer_group(layer, num_layers) for layer in range(num_layers))
    return ["embedding", *layers, "output"]


def _layer_group(layer: int, num_layers: int) -> str:
    count = min(LAYER_GROUPS, num_layers)
    number = layer * count // num_layers
    members = [i for i in range(num_layers) if i * count // num_layers == number]
    if len(members) == 1:
        return f"layers_{members[0]}"
    return f"layers_{members[0]}_{members[-1]}"


def _group_of_parameters(policy: Policy) -> dict[int, str]:
    """Return the group of every parameter on this rank, by its id. Tied embeddings belong to
    ``embedding``.
    """
    groups = {}
    for gpt in policy.gpt:
        layers = list(gpt.decoder.layers)
        for name, parameter in gpt.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                number = layers[int(parts[2])].layer_number - 1
                group = _layer_group(number, policy.arch.num_layers)
            elif parts[0] == "embedding":
                group = "embedding"
            else:
                # The last stage's copy of tied embeddings is not counted, so its group is of no
                # importance.
                group = "output"
            groups[id(parameter)] = group
    return groups


def _parameter_pairs(
    part: DistributedOptimizer | Float16OptimizerWithFloat16Params | FP32Optimizer,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a parameter of the model and the fp32 parameter or shard that one of
    Megatron's optimizers steps for it.
    """
    if isinstance(part, DistributedOptimizer):
        pairs = [
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:
        parameters = [group["params"] for group in part.optimizer.param_groups]
        pairs = [(parameters, parameters)]
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)
