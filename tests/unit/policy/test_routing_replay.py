"""Replayed choices of experts: where they stand in a micro-batch, and which forward pass gets
them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.policy.routing_replay import _Replay, collate_experts
from megatron_dcpo.types import TrainingSample, replaced
from tests.helpers.samples import bare

LAYERS, K = 2, 2


def recorded(prompt: int, response: int, first: int) -> TrainingSample:
    """A sample whose engine chose experts for every token that it ran: all but the last."""
    sample = bare(range(prompt), range(response))
    tokens = prompt + response - 1
    experts = np.arange(first, first + tokens * LAYERS * K, dtype=np.int16)
    experts = experts.reshape(tokens, LAYERS, K)
    return replaced(sample, response=replaced(sample.response, experts=experts))


def test_choices_stand_at_their_tokens() -> None:
    """int16 [rows, width, layers, k]; padding and the last token of a response have -1."""
    samples = [recorded(2, 3, first=0), recorded(1, 2, first=100)]
    experts = collate_experts(samples, offsets=[0, 6], shape=(2, 6))
    assert experts is not None
    assert experts.shape == (2, 6, LAYERS, K)
    np.testing.assert_array_equal(experts[0, :4].ravel(), np.arange(16))
    np.testing.assert_array_equal(experts[1, :2].ravel(), np.arange(100, 108))
    assert (experts[0, 4:] == -1).all()
    assert (experts[1, 2:] == -1).all()


def test_samples_without_choices_leave_the_router_alone() -> None:
    assert collate_experts([bare([1], [2])], offsets=[0], shape=(1, 2)) is None


def first_experts(
    scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None
) -> tuple[Tensor, Tensor]:
    """The router's own choice: the experts 0 to k - 1."""
    chosen = torch.arange(topk).expand(len(scores), topk)
    return scores.gather(1, chosen), chosen


def choose(replay: _Replay, scores: Tensor) -> tuple[Tensor, Tensor]:
    return replay.get_replay_topk(scores, K, None, None, first_experts)


def test_recorded_experts_are_taken_with_the_scores_of_now() -> None:
    """The gradient flows through today's scores of yesterday's experts; -1 leaves the choice."""
    replay = _Replay()
    replay.target = torch.tensor([[3, 1], [-1, -1]], dtype=torch.int16)
    scores = torch.arange(8.0).view(2, 4).requires_grad_()
    weights, chosen = choose(replay, scores)
    assert chosen.tolist() == [[3, 1], [0, 1]]
    assert weights.tolist() == [[3.0, 1.0], [4.0, 5.0]]
    weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]


def test_recomputations_get_the_choices_of_their_forward_passes_in_order() -> None:
    replay = _Replay()
    scores = torch.rand(1, 4)
    targets = [torch.tensor([[2, 3]]), torch.tensor([[1, 0]])]
    with torch.no_grad():  # activations are dropped
        for target in targets:
            replay.target = target
            choose(replay, scores)
    replay.target = None
    again = [choose(replay, scores)[1].tolist() for _ in targets]
    assert again == [[[2, 3]], [[1, 0]]]
    assert choose(replay, scores)[1].tolist() == [[0, 1]], "nothing is left: the router's own"
