"""AdamW for Megatron's optimizers on the CPU, with the interface and the state of Apex's ``FusedAdam``.

torch's own ``AdamW`` counts ``step`` per parameter, Apex and Transformer Engine count it per parameter group. Megatron's
checkpoints follow the latter; with torch's optimizer they either fail to load (``fully_reshardable``) or load without
the step count, so that the bias correction of a resumed run silently starts anew. Counting per group removes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2); ``step`` lives in the group.

    ``adam_w_mode=False`` adds the decay to the gradient instead (L2 regularisation), as Apex does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. ``closure`` is not supported (Megatron passes none)."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        bias1, bias2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        grads = [p.grad for p in params if p.grad is not None]
        exp_avg = [self.state[p]["exp_avg"] for p in params]
        exp_avg_sq = [self.state[p]["exp_avg_sq"] for p in params]
        if group["weight_decay"]:
            if self.adam_w_mode:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            else:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, bias2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, exp_avg, denominator, -group["lr"] / bias1)
