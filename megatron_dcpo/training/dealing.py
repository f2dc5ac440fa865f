"""Dealing a batch: which responses are computed, and on which ranks their tokens are.

Every rank knows of every response what is small: its length, its judgement, its weights version.
Tokens, log-probs and expert choices stay on the rank that sampled them until the updater knows
which rank computes which response; then they travel once, to that rank alone (:func:`fetch`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_dcpo.objectives.method import Method
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.types import Response, TrainingSample, replaced

SAMPLED = 16  # every 16th response without a gradient is computed
# options of Megatron with which every token of a batch moves the routers
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")


def samples_to_train(
    samples: Sequence[TrainingSample], method: Method, megatron: Mapping[str, object]
) -> list[TrainingSample]:
    """Return the scored samples that take part in forward and backward, in their order: all that
    can have a gradient, and the first and every sixteenth of the others, whose difference between
    engine and trainer stands for that of all.

    The denominators in the weights count all samples, so loss and gradient are those of all.
    ``megatron`` are Megatron's options: some give every token a gradient.
    """
    if any(megatron.get(option) for option in ROUTER_LOSSES):
        return list(samples)
    without_gradient = [
        index for index, sample in enumerate(samples) if not method.has_gradient(sample)
    ]
    left_out = set(without_gradient) - set(without_gradient[::SAMPLED])
    return [sample for index, sample in enumerate(samples) if index not in left_out]


class Payload(NamedTuple):
    """The per-token arrays of a response, as they travel between ranks."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray | None
    context_ids: np.ndarray | None


class Summary(NamedTuple):
    """A response on its way to the ranks that need none of its tokens."""

    response: Response  # its per-token arrays are empty
    length: int

    @classmethod
    def of(cls, response: Response) -> Summary:
        """Return what every rank knows of ``response``."""
        emptied = replaced(
            response,
            token_ids=np.zeros(0, np.int64),
            logprobs=np.zeros(0, np.float32),
            experts=None,
            text=None,
            token_ends=None,
            top_logprobs=None,
            context_ids=None,
        )
        return cls(response=emptied, length=len(response.token_ids))

    def restored(self, holder: int) -> Response:
        """Return the response as ranks other than ``holder`` know it: of the right length, without
        its tokens.

        ``token_ids`` are -1 and ``logprobs`` NaN, each a broadcast view of one element. Code that
        uses them by mistake gets an index error or NaN, never a plausible number.
        """
        return replaced(
            self.response,
            token_ids=np.broadcast_to(np.int64(-1), (self.length,)),
            logprobs=np.broadcast_to(np.float32("nan"), (self.length,)),
            holder=holder,
        )


def fetch(
    samples: Sequence[TrainingSample], wanted: Collection[int], collectives: Collectives
) -> list[TrainingSample]:
    """Return ``samples``, equal on all ranks but for tokens, with the tokens of those at the
    indices ``wanted`` on this rank. Collective.

    Each rank says which responses it lacks, and their holders send them. A response that is here
    already, or that no rank computes, does not travel.
    """
    missing: list[list[int]] = [[] for _ in collectives.ranks]
    for index in sorted(wanted):
        holder = samples[index].response.holder
        if holder is not None:
            missing[holder].append(index)
    requested = collectives.exchange(missing)
    sent = collectives.exchange(
        [[_payload(samples[index].response) for index in indices] for indices in requested]
    )
    complete = list(samples)
    for indices, payloads in zip(missing, sent, strict=True):
        for index, payload in zip(indices, payloads, strict=True):
            sample = samples[index]
            response = replaced(
                sample.response,
                token_ids=payload.token_ids,
                logprobs=payload.logprobs,
                experts=payload.experts,
                context_ids=payload.context_ids,
                holder=None,
            )
            complete[index] = replaced(sample, response=response)
    return complete


def _payload(response: Response) -> Payload:
    assert response.holder is None, "a rank was asked for tokens that it does not have"
    return Payload(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        experts=response.experts,
        context_ids=response.context_ids,
    )
