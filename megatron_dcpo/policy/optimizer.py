"""Megatron's optimizer and learning-rate schedule, and the norms of one block's gradient against the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.config import Config
from megatron_dcpo.policy.model import DTYPES, Policy

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def build_optimizer(config: Config, policy: Policy) -> tuple[Any, OptimizerParamScheduler]:
    """AdamW on this rank's parameters (sharded over data-parallel ranks with the distributed optimizer)."""
    options = config.optimizer
    dtype = DTYPES[config.model.params_dtype]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        ),
        list(policy.chunks),
    )
    policy.config.grad_scale_func = optimizer.scale_loss
    updates = config.training.updates_per_rollout
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters * updates,
        lr_decay_steps=max(config.training.steps * updates, options.lr_warmup_iters * updates + 1),
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run takes the count of steps from its checkpoint and everything else from its configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def zero_gradients(policy: Policy, optimizer: Any) -> None:
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@dataclass(frozen=True)
class BlockGradients:
    """Norms of the reasoning and confidence gradients and the cosine between them (dimensionless)."""

    reasoning: float
    confidence: float
    cosine: float


def probe_block_gradients(policy: Policy, optimizer: Any, backward: Callable[[str], Any]) -> tuple[Any, BlockGradients]:
    """Run ``backward("reasoning")`` and ``backward("confidence")`` apart and measure both gradients.

    The loss is a sum over blocks, so the sum of the two gradients is the gradient of the step; it is left in the
    buffers, and the probe costs one extra backward pass. Inner products count sharded parameters on every rank and
    replicated or tied ones once, exactly as Megatron's own gradient norm does. Returns the two results of
    ``backward`` and the measurement.
    """
    first = backward("reasoning")
    g_r = _gradients_for_norm(optimizer)
    kept = [buffer.grad_data.clone() for buffer in _buffers(policy)]
    zero_gradients(policy, optimizer)
    second = backward("confidence")
    g_c = _gradients_for_norm(optimizer)
    products = torch.zeros(3, dtype=torch.float64, device=g_r[0].device if g_r else None)
    for r, c in zip(g_r, g_c, strict=True):
        r, c = r.double(), c.double()
        products += torch.stack([(r * r).sum(), (c * c).sum(), (r * c).sum()])
    dist.all_reduce(products, group=optimizer_group(optimizer))
    for buffer, gradient in zip(_buffers(policy), kept, strict=True):
        buffer.grad_data += gradient
    rr, cc, rc = products.tolist()
    cosine = rc / (rr * cc) ** 0.5 if rr > 0 and cc > 0 else 0.0
    return (first, second), BlockGradients(rr**0.5, cc**0.5, cosine)


def optimizer_group(optimizer: Any) -> dist.ProcessGroup:
    """The ranks over which gradient statistics are summed: model parallel, or all with the distributed optimizer."""
    return _inner(optimizer)[0].get_grad_stats_parallel_group()


def _inner(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def _gradients_for_norm(optimizer: Any) -> list[Tensor]:
    optimizer.prepare_grads()
    return [gradient.clone() for part in _inner(optimizer) for gradient in part.get_main_grads_for_grad_norm()]


def _buffers(policy: Policy) -> Iterator[Any]:
    for chunk in policy.chunks:
        yield from chunk.buffers
