"""Losses of supervised training: what a token of a demonstration contributes.

As in RL, a token's weight already carries the denominator of the whole step, so the plain sum of
all contributions is the loss (``training/supervised.py`` sets the weights).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.objectives.policy_loss import Stats, by_block, masked
from megatron_dcpo.runtime.plugins import check_signature, is_import_path, load_object, raised
from megatron_dcpo.types import MicroBatch, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

TokenLoss = Callable[[MicroBatch, TokenOutputs], "tuple[Tensor, Stats]"]


@dataclass(frozen=True)
class SupervisedLoss:
    """What a file of the user's may declare, or only its ``token_loss``.

    token_loss: returns the contributions [n] of a micro-batch's tokens, and sums over them.
    separable: whether a token's loss depends on the policy's outputs at that token alone; the
        output layer is then passed once, not twice.
    name: for messages.
    """

    token_loss: TokenLoss
    separable: bool = False
    name: str = ""

    def __call__(self, batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
        """Return :attr:`token_loss` of a micro-batch. Raises :class:`UserError` if a user's
        fails.
        """
        try:
            return self.token_loss(batch, outputs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            if not is_import_path(self.name):
                raise
            raise UserError(f"objective.name={self.name} failed: {raised(error)}") from error


def cross_entropy(batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
    """Return -w_t log p(token t), [n], and the sum of -log p over the tokens that count."""
    nll = -masked(outputs.logprobs, batch)
    weights = batch.columns["weights"].to(nll)
    counts = (weights != 0).to(nll)
    statistics = by_block("nll", nll * counts, batch)
    statistics |= by_block("tokens", counts, batch)
    return nll * weights, statistics


LOSSES = {"cross_entropy": SupervisedLoss(cross_entropy, separable=True)}


def find_loss(name: str) -> SupervisedLoss:
    """Return the loss of ``objective.name``: one of :data:`LOSSES`, or the import path of a
    function (batch, outputs) or of a :class:`SupervisedLoss`. Raises :class:`UserError`.
    """
    if name in LOSSES:
        return LOSSES[name]
    if not is_import_path(name):
        raise UserError(
            f"objective.name={name}: unknown loss of supervised training"
            f"{did_you_mean(name, LOSSES)}; known: {', '.join(LOSSES)}, or file.py:function of "
            "your own"
        )
    loss = load_object(name, "objective.name")
    if isinstance(loss, SupervisedLoss):
        return SupervisedLoss(loss.token_loss, loss.separable, name)
    check_signature(loss, name, "objective.name", "batch", "outputs")
    return SupervisedLoss(loss, name=name)
