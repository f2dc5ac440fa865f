"""Routing replay: a forward pass whose routers choose the experts that the engine chose for the
same tokens.

Megatron's router asks an object of its own for its choices where it has one (``router_replay`` in
``megatron/core/transformer/moe/router.py``); the one here knows which tokens have none, and what is
computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_dcpo.types import TrainingSample


def collate_experts(
    samples: Sequence[TrainingSample], offsets: Sequence[int], shape: tuple[int, int]
) -> Any:
    """Return the choices of a micro-batch's samples, int16 [*shape, layers, k], sample i from place
    ``offsets[i]`` of the flattened tokens on; -1 where there are none: filling, and the last token
    of a response, behind which the engine stops. None where the rollout recorded none.
    """
    recorded = [sample.response.experts for sample in samples]
    known = [each for each in recorded if each is not None]
    if not known:
        return None
    experts = np.full((shape[0] * shape[1], *known[0].shape[1:]), -1, np.int16)
    for each, offset in zip(known, offsets, strict=True):
        experts[offset : offset + len(each)] = each
    return experts.reshape(*shape, *experts.shape[1:])


class _Replay:
    """What a router takes its choices from. ``target``: int16 [tokens, k]; None while nothing is
    run forward: then it is a recomputation, of the forward passes in their order.
    """

    def __init__(self) -> None:
        self.target: Tensor | None = None
        self.again: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Any,
        group_topk: Any,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [tokens, k] of the experts to take, and their numbers."""
        target = self.target
        if target is None:
            if not self.again:
                return default(scores, topk, num_groups, group_topk)
            target = self.again.popleft()
        elif not torch.is_grad_enabled():  # activations are dropped
            self.again.append(target)
        _, own = default(scores, topk, num_groups, group_topk)
        chosen = torch.where(target < 0, own, target.to(own.dtype))
        return scores.gather(1, chosen), chosen


@contextmanager
def replayed(model: Any, experts: Tensor | None) -> Iterator[None]:
    """Let the routers of ``model`` take ``experts`` [b, s, layers, k] of this rank's tokens in the
    forward pass inside.
    """
    if experts is None:
        yield
        return
    routers = list(_routers([model]))
    tokens = experts.transpose(0, 1)  # Megatron's order
    if routers and routers[0].config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        tokens = tokens.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    tokens = tokens.flatten(0, 1)
    for router in routers:
        router.router_replay = router.router_replay or _Replay()
        router.router_replay.target = tokens[:, router.layer_number - 1]
    try:
        yield
    finally:
        for router in routers:
            router.router_replay.target = None


def end_replay(models: Iterable[Any]) -> None:
    """Leave the routers to themselves. What is only run forward leaves choices that nothing
    computes again.
    """
    for router in _routers(models):
        router.router_replay = None


def _routers(models: Iterable[Any]) -> Iterator[TopKRouter]:
    return (
        module for model in models for module in model.modules() if isinstance(module, TopKRouter)
    )
