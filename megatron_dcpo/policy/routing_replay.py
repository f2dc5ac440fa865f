"""Routing replay: a forward pass whose routers choose the experts that the engine chose for the
same tokens.

If Megatron's router has an object ``router_replay``, it asks that object for its choices
(``megatron/core/transformer/moe/router.py``). The object here knows which tokens have no recorded
choices, and which forward passes are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from megatron_dcpo.types import TrainingSample


def collate_experts(
    samples: Sequence[TrainingSample], offsets: Sequence[int], shape: tuple[int, int]
) -> np.ndarray | None:
    """Return the choices of a micro-batch's samples, int16 [*shape, layers, k]; None if the rollout
    recorded none.

    Sequence i of the samples begins at index ``offsets[i]`` of the flattened tokens. Tokens without
    choices have -1: padding, and the last token of a sequence, which the engine never runs.
    """
    choices = [sample.response.experts for sample in samples]
    recorded = next((one for one in choices if one is not None), None)
    if recorded is None:
        return None
    rows, width = shape
    experts = np.full((rows * width, *recorded.shape[1:]), -1, np.int16)
    places = iter(offsets)
    for sample, of_sample in zip(samples, choices, strict=True):
        begin = 0
        for length in sample.sequence_lengths:
            offset = next(places)
            if of_sample is not None:
                of_sequence = of_sample[begin : begin + length - 1]
                experts[offset : offset + len(of_sequence)] = of_sequence
            begin += length - 1
    return experts.reshape(rows, width, *experts.shape[1:])


class _Replay:
    """Gives a router its choices. ``target`` holds those of the running forward pass, int16
    [tokens, k]. While it is None, a pass is a recomputation; recomputations follow the order of the
    forward passes, whose choices wait in ``again``.
    """

    def __init__(self) -> None:
        self.target: Tensor | None = None
        self.again: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [tokens, k] of the experts to take, and their numbers."""
        target = self.target
        if target is None:
            if not self.again:
                return default(scores, topk, num_groups, group_topk)
            target = self.again.popleft()
        elif not torch.is_grad_enabled():  # activations are dropped, and computed again later
            self.again.append(target)
        _, default_choice = default(scores, topk, num_groups, group_topk)
        chosen = torch.where(target < 0, default_choice, target.to(default_choice.dtype))
        return scores.gather(1, chosen), chosen


@contextmanager
def replayed(model: Module, experts: Tensor | None) -> Iterator[None]:
    """Let the routers of ``model`` choose ``experts`` [b, s, layers, k] for this rank's tokens, in
    a forward pass inside the context.
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


def end_replay(models: Iterable[Module]) -> None:
    """Let the routers choose for themselves again. This also drops the choices that a forward pass
    without a backward pass left for a recomputation.
    """
    for router in _routers(models):
        router.router_replay = None


def _routers(models: Iterable[Module]) -> Iterator[TopKRouter]:
    for model in models:
        for module in model.modules():
            if isinstance(module, TopKRouter):
                yield module
