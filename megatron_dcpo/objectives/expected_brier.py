"""The expected Brier score of a stated confidence, exact over all numbers that can be stated.

    L = sum over c of pi(c | q, o) (c - T)^2  +  1 - sum over c of pi(c | q, o)

with the confidences c = 0.00 ... 1.00 (or 0.0 ... 1.0), their probability pi as the text behind the
answer, and a target T whose expectation is that of the correctness, the correctness itself for
instance. The probability of any other text counts as the worst score, 1, so that the model keeps to
the form. Nothing is sampled, so the gradient has no variance but that of the answers, and only the
tokens of the confidence have one.

Each c is a path of tokens. The paths share their beginnings, so an answer is a few sequences
(``training/candidates.py``), one for each beginning that all but the last token of some paths have
in common. Its score tokens are that beginning's, and one for each last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_dcpo.objectives.policy_loss import Stats, by_block, sequence_sums
from megatron_dcpo.objectives.supervised import SupervisedLoss
from megatron_dcpo.types import BLOCK_REASONING, MicroBatch, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor


class OfAnswer(Protocol):
    """What the loss reads of a sample: how many confidences its answer has, over all sequences."""

    @property
    def confidences(self) -> int: ...


def score(confidences: np.ndarray, target: float) -> np.ndarray:
    """Return 1 - (c - target)^2 of every confidence, float64."""
    return 1.0 - (confidences - target) ** 2


def expected_brier(batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
    """Return the contributions [n] of a micro-batch's tokens. Those of an answer's last tokens add
    up to its weight times L; the tokens before them have none of their own.

    The column ``block_ids`` says which are before the last (reasoning) and which are last tokens
    (confidence), ``advantages`` is :func:`score` of a last token's confidence, and ``weights`` the
    answer's weight, 0 on the tokens before.
    """
    logprobs = outputs.logprobs
    is_before = batch.columns["block_ids"] == BLOCK_REASONING
    before = logprobs.where(is_before, logprobs.new_zeros(()))
    logprob_of_path = sequence_sums(before, batch)[batch.sequence_ids] + logprobs
    expected = logprob_of_path.exp() * batch.columns["advantages"].to(logprobs)
    # each last token has its share of the worst score, 1
    samples: tuple[OfAnswer, ...] = batch.samples  # type: ignore[assignment]
    shares = logprobs.new_tensor([1.0 / sample.confidences for sample in samples])
    share = shares[batch.sequence_ids]
    contributions = batch.columns["weights"].to(logprobs) * (share - expected)
    return contributions, by_block("score", expected, batch)


EXPECTED_BRIER = SupervisedLoss(expected_brier, separable=False, name="expected_brier")
