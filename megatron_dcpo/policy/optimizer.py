"""Megatron's optimizer and learning-rate schedule.

The optimizer may leave the device for a rollout, when the engine needs the room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.config import RunConfig
from megatron_dcpo.policy.megatron_options import options_of
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import capabilities, expandable_segments
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.host_memory import Movable, ledger

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

logger = logging.getLogger(__name__)


class Optimizer(Protocol):
    """What trains a policy: :class:`PolicyOptimizer` its own parameters, ``policy/adapter.py`` an
    adapter's.

    Checkpoints hold the state of ``megatron``, if it is there, of ``scheduler`` and of the
    adapter. Engines and exports get the weights of ``exported``.
    """

    megatron: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler
    exported: Policy

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, as torch's optimizers have them."""
        ...

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        ...

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        ...

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient. Collective."""
        ...

    def step(self) -> None:
        """Clip, update the parameters and advance the schedule. Collective."""
        ...

    def gather_parameters(self) -> None:
        """Gather the parameters now if the next forward pass would do it. Collective."""
        ...

    def not_finite(self) -> list[str]:
        """Return the names of an adapter's parameters that are not finite."""
        ...

    def trained(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors that a step changes, by the names that
        ``checkpoints/staleness.py`` gives their groups.
        """
        ...

    @property
    def adapter_options(self) -> dict[str, Any] | None:
        """Return the options of the adapter with their defaults; None if there is no adapter."""
        ...

    def adapter_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the adapter."""
        ...

    def restore_adapter(self, loaded: dict[str, Any]) -> None:
        """Continue from ``loaded``, which has the form of :meth:`adapter_state`."""
        ...

    def write_adapter(self, directory: Path, base: str) -> None:
        """Write the adapter of the model ``base`` in PEFT's format, if there is one. Collective."""
        ...

    @property
    def starting_policy(self) -> Callable[[], AbstractContextManager[Policy]] | None:
        """Return what opens the policy as it was before the training; None where the training
        overwrites it.
        """
        ...


class PolicyOptimizer:
    """Megatron's optimizer on a policy's own parameters, with its learning-rate schedule. The
    methods are those of :class:`Optimizer`.
    """

    adapter_options = None
    starting_policy = None

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.policy = policy
        self.megatron = build_optimizer(config, policy)
        self.scheduler = build_scheduler(self.megatron, config)
        self.exported: Policy = policy

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, as torch's optimizers have them."""
        return list(self.megatron.param_groups)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        zero_gradients(self.policy, self.megatron)

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient. Collective."""
        return gradient_norm(self.megatron)

    def step(self) -> None:
        """Update the parameters and advance the schedule. Collective."""
        self.megatron.step()
        self.scheduler.step(1)

    def gather_parameters(self) -> None:
        """Gather the parameters now if the next forward pass would do it. Collective."""
        gather_parameters(self.policy)

    def trained(self) -> dict[str, list[Tensor]]:
        """Return the parameters of the policy, and Megatron's moments by their names."""
        found: dict[str, list[Tensor]] = {"weights": []}
        for gpt in self.policy.gpt:
            found["weights"] += [value for value in gpt.parameters() if value.requires_grad]
        for part in optimizer_parts(self.megatron):
            for states in part.optimizer.state.values():
                for name, value in states.items():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        found.setdefault(name, []).append(value)
        return found

    def not_finite(self) -> list[str]:
        """Return an empty list: there is no adapter whose parameters could be not finite."""
        return []

    def adapter_state(self) -> dict[str, Any]:
        """Return nothing, as there is no adapter."""
        return {}

    def restore_adapter(self, loaded: dict[str, Any]) -> None:
        """Do nothing, as there is no adapter."""

    def write_adapter(self, directory: Path, base: str) -> None:
        """Do nothing, as there is no adapter."""


def build_optimizer(config: RunConfig, policy: Policy) -> MegatronOptimizer:
    """Return Megatron's AdamW on this rank's parameters, or on its shard of them with the
    distributed optimizer.
    """
    options = config.optimizer
    dtype = torch_dtype(config.model.params_dtype)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            **options_of(OptimizerConfig, config.parallel.megatron),
        ),
        list(policy.chunks),
    )
    policy.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(
    optimizer: MegatronOptimizer | torch.optim.Optimizer, config: RunConfig
) -> OptimizerParamScheduler:
    """Return Megatron's schedule of the learning rate, in optimizer steps."""
    options = config.optimizer
    updates = config.training.updates_per_step
    warmup_steps = options.lr_warmup_iters * updates
    decay_steps = max(config.training.steps * updates, warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run takes the number of steps from its checkpoint and everything else from its
        # configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def zero_gradients(policy: Policy, optimizer: MegatronOptimizer) -> None:
    """Set the gradients in Megatron's buffers to zero."""
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def gather_parameters(policy: Policy) -> None:
    """Gather the parameters for readers that come before the next forward pass. Collective.

    With ``parallel.megatron.overlap_param_gather`` the optimizer step leaves the gathering to that
    pass; without the option there is nothing to do.
    """
    for chunk in policy.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the whole gradient, equal on every rank. It is not finite if an element is
    not finite.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def optimizer_group(optimizer: MegatronOptimizer) -> dist.ProcessGroup:
    """Return the ranks over which gradient statistics are summed: the model-parallel ranks, or all
    ranks with the distributed optimizer. (Experts on several ranks need the latter, so the
    optimizers of a chain share one group.)
    """
    return optimizer.get_grad_stats_parallel_group()


def optimizer_parts(optimizer: MegatronOptimizer | None) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, or the single optimizer; nothing for None, the optimizer of
    a frozen policy.
    """
    if optimizer is None:
        return []
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


class Offload:
    """Takes what only an update needs off the device during rollouts, if that is ``wanted``:
    gradients (which start at zero anyway), moments, and fp32 main parameters. In fp32 the optimizer
    works on the policy's parameters themselves, which stay.
    """

    def __init__(self, policy: Policy, optimizer: MegatronOptimizer | None, wanted: bool) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.state = Movable("optimizer", self._state_tensors)
        has_device_memory = capabilities().separate_memory
        self.active = wanted and has_device_memory and not policy.frozen
        if wanted and not has_device_memory:
            logger.info(
                "training.offload_optimizer_during_rollout has no effect: there is no device to "
                "offload from"
            )
        self._record_gradients()

    def offload(self) -> None:
        """Offload before the engine starts or wakes up: it takes its memory from outside torch's
        allocator.
        """
        if self.active and not self.state.away:
            for chunk in self.policy.chunks:
                chunk.offload_grad_buffers()
            ledger.drop("gradients")
            self.state.offload()
        expandable_segments(False)

    def reload(self) -> None:
        """Reload before training, while the engine sleeps. Does no harm if nothing was
        offloaded.
        """
        expandable_segments(True)
        if self.state.away:
            self.state.reload()
            for chunk in self.policy.chunks:
                chunk.restore_grad_buffers()
            self._record_gradients()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the state on the device while a checkpoint is saved and the engine sleeps."""
        was_offloaded = self.state.away
        self.reload()
        yield
        if was_offloaded:
            self.offload()

    def _state_tensors(self) -> Iterator[Tensor]:
        for part in optimizer_parts(self.optimizer):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    if self.policy.config.bf16:
                        yield parameter
                    for value in part.optimizer.state.get(parameter, {}).values():
                        if value.numel() > 1:
                            yield value

    def _record_gradients(self) -> None:
        """Enter the gradient buffers in the ledger of what is on the device."""
        if self.policy.frozen:
            return
        nbytes = 0
        for chunk in self.policy.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                nbytes += buffer.grad_data.nbytes
        ledger.put("gradients", nbytes)


def on_host(frozen: Policy, name: str) -> Movable:
    """Move the parameters of a frozen policy to the host, where they stay between their uses;
    return the handle that brings them back. ``name`` is the policy's in the ledger.
    """

    def parameters() -> Iterator[Tensor]:
        for gpt in frozen.gpt:
            yield from gpt.parameters()

    movable = Movable(name, parameters, constant=True)
    movable.offload()
    return movable
