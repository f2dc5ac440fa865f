"""The schedule of the learning rate, in optimizer steps (``build_scheduler``)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_dcpo.config import load_config
from megatron_dcpo.policy.optimizer import build_scheduler
from tests.helpers.paths import QUICKSTART

LR, MIN_LR, WARMUP, STEPS = 1e-3, 1e-4, 4, 12


def rates(style: str, updates: int = 1) -> list[float]:
    """Return the learning rate of every update of a run."""
    config = load_config(
        QUICKSTART / "grpo.yaml",
        [
            f"optimizer.lr={LR}",
            f"optimizer.min_lr={0 if style == 'constant' else MIN_LR}",
            f"optimizer.lr_warmup_iters={WARMUP}",
            f"optimizer.lr_decay_style={style}",
            f"training.steps={STEPS}",
            f"training.updates_per_rollout={updates}",
        ],
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    group: dict[str, Any] = optimizer.param_groups[0]
    group.update(max_lr=LR, min_lr=MIN_LR)
    scheduler = build_scheduler(optimizer, config)
    taken = []
    for _ in range(STEPS * updates):
        taken.append(group["lr"])
        scheduler.step(increment=1)
    return taken


@pytest.mark.parametrize("updates", [1, 3])
def test_the_rate_rises_linearly_over_the_warmup(updates: int) -> None:
    """lr_n = lr n / n_warmup, n counted in updates (Megatron's ``OptimizerParamScheduler``)."""
    count = WARMUP * updates
    expected = [LR * update / count for update in range(count)]
    assert rates("linear", updates)[:count] == pytest.approx(expected)


def test_a_linear_decay_ends_at_the_least_rate() -> None:
    """lr_n = min + (lr - min)(1 - (n - n_warmup) / (n_all - n_warmup))."""
    for update, rate in enumerate(rates("linear")[WARMUP:]):
        left = 1 - update / (STEPS - WARMUP)
        assert rate == pytest.approx(MIN_LR + (LR - MIN_LR) * left)


def test_a_cosine_decay_is_half_way_down_in_the_middle() -> None:
    """lr_n = min + (lr - min)(1 + cos(π (n - n_warmup) / (n_all - n_warmup))) / 2."""
    for update, rate in enumerate(rates("cosine")[WARMUP:]):
        share = (1 + math.cos(math.pi * update / (STEPS - WARMUP))) / 2
        assert rate == pytest.approx(MIN_LR + (LR - MIN_LR) * share)


def test_a_constant_rate_stays_after_the_warmup() -> None:
    assert rates("constant")[WARMUP:] == [LR] * (STEPS - WARMUP)
