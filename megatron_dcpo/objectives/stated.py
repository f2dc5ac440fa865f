"""``confidence_parameters: adapter`` (``dcpo``): the expected score of a confidence that an adapter states.

The confidence is two decimals behind a fixed lead, chosen among the digits alone, so its distribution is known and nothing
has to be sampled: each choice of digits is scored at once, the tenth by what the hundredth behind it is expected to be. The
gradient is that of :func:`digit_losses` (docs/adapters.md#the-loss; ConfTuner's tokenised Brier score, arXiv 2508.18847).
Among tokens of the adapter's own, equally likely at first, what is scored is the value that is stated: their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_dcpo.objectives.advantages import SCORES
from megatron_dcpo.objectives.expected_digits import DigitBatch, digit_losses
from megatron_dcpo.objectives.options import ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor

VALUES = np.arange(101) / 100  # what can be stated; 1.00 not in every form (judging/statement.py)


@dataclass(frozen=True)
class StatementTarget:
    """Of one response: the tokens of prompt and response that its statement follows (``after``), the score of each value,
    float64 [V], their weight in the loss, and what the confidence ``seen`` beside the text, float32 [features] or None."""

    after: int
    scores: np.ndarray
    weight: float
    seen: np.ndarray | None


def score_values(targets: np.ndarray, options: ObjectiveConfig, count: int = 100) -> np.ndarray:
    """The score of the ``count`` values that can be stated against each of the ``targets`` [N], float64 [N, count]."""
    values, t = np.broadcast_arrays(VALUES[None, :count], targets[:, None])
    return SCORES[options.calibration_loss](values, t, options.score_clamp)


def statement_losses(logits: Tensor, scores: Tensor, options: ObjectiveConfig) -> Tensor:
    """The loss of each statement, [B]. ``logits`` [B, 1, 100 or 101], or [B, 11, 10]: of the tenth, and behind each tenth
    of the hundredth, whose scores differ by a tenth as much and are brought to the same scale."""
    import torch

    def loss(logprobs: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(logprobs), device=logprobs.device)
        return digit_losses(DigitBatch(rows, logprobs, scores), options)

    if logits.shape[-1] == len(VALUES):
        return -_interpolated(scores, _mean(logits))
    first, behind = logits[:, 0].log_softmax(-1), logits[:, 1:].log_softmax(-1)
    if not behind.shape[1]:
        return loss(first, scores)
    scores = scores.view_as(behind)
    expected = (behind.detach().exp() * scores).sum(-1)
    hundredths = loss(behind.flatten(0, 1), 10 * scores.flatten(0, 1)).view(first.shape)
    return loss(first, expected) + (first.detach().exp() * hundredths).sum(-1)


def _interpolated(scores: Tensor, c: Tensor) -> Tensor:
    """The scores [B, V] of the values at ``c`` [B], linear between two of them."""
    position = 100 * c
    below = position.detach().long().clamp(0, scores.shape[1] - 2)[:, None]
    left, right = scores.gather(1, below)[:, 0], scores.gather(1, below + 1)[:, 0]
    return left + (right - left) * (position - below[:, 0])


def _mean(logits: Tensor) -> Tensor:
    """Of the distribution over the values, [B]."""
    import torch

    first, behind = logits[:, 0].softmax(-1), logits[:, 1:].softmax(-1)
    p = (first[..., None] * behind).flatten(1) if behind.shape[1] else first
    return p @ torch.as_tensor(VALUES[: p.shape[1]], dtype=logits.dtype, device=logits.device)


def stated(logits: Tensor) -> Tensor:
    """The value that is stated, [B]: the mean of the distribution over the values, in hundredths."""
    return (_mean(logits) * 100).round() / 100
