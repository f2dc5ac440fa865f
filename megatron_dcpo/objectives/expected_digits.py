"""``confidence_gradient: digits`` (``dcpo``): the gradient over all digits of a stated confidence.

At a token that is decimals of a valid confidence and nothing else, the loss term of the sampled token is replaced by one
over all tokens of as many digits, and at the token ``0`` or ``1`` before the point by one over these two. ``0.83`` is
``0`` ``.`` ``8`` ``3`` to Qwen's tokenizer and ``0`` ``.`` ``83`` to Llama-3's. A token that mixes digits with anything
else (``.8``) keeps its sampled term, and so do the decimals of 1: ``1.00`` with another of them would not be a
confidence. The formula: docs/algorithms.md#4-advantages. ConfTuner has an expected score over confidence tokens for
supervised training (docs/references.md).

    response -> :class:`DecimalToken` -> :class:`DigitScores` -> (candidate log-probs) -> :class:`DigitBatch` -> loss
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_dcpo.objectives.advantages import MIN_BATCH_RMS, SCORES
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.types import Judgement

if TYPE_CHECKING:
    from torch import Tensor

MAX_WIDTH = 3  # digits of one token; every tokenizer we know stops there
_NUMBER = re.compile(rb"(?<![0-9.])([0-9]*)(?:\.([0-9]*))?[ \t\r\n\f\v]*$")
JUST_BELOW_ONE = 0.99  # what a stated 1 is compared with: the nearest that two decimals can say


@dataclass(frozen=True)
class DecimalToken:
    """A token that is ``width`` decimals of the stated confidence and nothing else: in 0.83 as three tokens ``0`` ``.``
    ``83`` the last one, with ``value`` 83, ``width`` 2 and ``place`` 2, the place of its last digit behind the point.

    ``position`` is its index in the response. Any other ``width`` digits would do in its place; at ``place`` 0, which is
    ``0`` or ``1`` before the point, the other one of the two.
    """

    position: int
    value: int
    width: int
    place: int


@dataclass(frozen=True)
class DigitScores:
    """The worth of each choice of digits at one position of the confidence: float64 [10 ** width], by their value; [2]
    before the point."""

    position: int
    width: int
    scores: np.ndarray


@dataclass(frozen=True)
class DigitBatch:
    """The m tokens of a micro-batch that are trained on all digits at once.

    ``rows`` int64 [m] into the tokens; ``logprobs`` [m, K] of every choice of digits, with gradient, -inf where there is
    none; ``scores`` [m, K].
    """

    rows: Tensor
    logprobs: Tensor
    scores: Tensor


@dataclass(frozen=True)
class DigitVocabulary:
    """The digits of a tokenizer: ``token_ids`` is width -> int64 [10 ** width], the token of each value (``07`` at 7), -1
    where the vocabulary has none; ``piece(id)`` are the bytes of a token."""

    token_ids: Mapping[int, np.ndarray]
    piece: Callable[[int], bytes]
    eos_ids: Collection[int]

    @classmethod
    def of(cls, table: Sequence[bytes], eos_ids: Collection[int]) -> DigitVocabulary:
        """``table[id]`` are the bytes of token ``id``."""
        token_ids = {width: np.full(10**width, -1, np.int64) for width in range(1, MAX_WIDTH + 1)}
        for token_id, piece in enumerate(table):
            width = len(piece)
            if width in token_ids and re.fullmatch(rb"[0-9]+", piece) and token_ids[width][int(piece)] < 0:
                token_ids[width][int(piece)] = token_id
        return cls(token_ids, lambda token_id: table[token_id] if 0 <= token_id < len(table) else b"", eos_ids)

    def decimals(self, token_ids: Sequence[int] | np.ndarray, judgement: Judgement) -> tuple[DecimalToken, ...]:
        """The exchangeable tokens of a response; none where its confidence is malformed."""
        if judgement.status != "ok" or judgement.boundary is None:
            return ()
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self.eos_ids
        positions = range(judgement.boundary, len(token_ids) - ended)
        pieces = [self.piece(int(token_ids[position])) for position in positions]
        text = b"".join(pieces)
        number = _NUMBER.search(text[-64:])
        if number is None:
            return ()
        offset = max(0, len(text) - 64)
        integer, (begin, end) = number.span(1), number.span(2)
        decimals, stop = [], len(text) - offset
        for position, piece in zip(reversed(positions), reversed(pieces), strict=True):
            start = stop - len(piece)
            if start < integer[0]:
                break
            if piece and begin <= start and stop <= end and len(piece) <= MAX_WIDTH and int(number[1] or 0) == 0:
                decimals.append(DecimalToken(position, int(piece), len(piece), stop - begin))
            elif (start, stop) == integer and piece in (b"0", b"1"):
                decimals.append(DecimalToken(position, int(piece), 1, 0))
            stop = start
        return tuple(reversed(decimals))

    def candidates(self, digits: Sequence[tuple[int, DigitScores]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``digits``, each with the index of its response's first token in the micro-batch -> rows int64 [m], token ids
        int64 [m, K] (-1 where there is none), scores float32 [m, K]; K is the number of choices of the widest token."""
        shape = (len(digits), 10 ** max((d.width for _, d in digits), default=0))
        ids, scores = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        for row, (_, d) in enumerate(digits):
            ids[row, : len(d.scores)] = self.token_ids[d.width][: len(d.scores)]
            scores[row, : len(d.scores)] = d.scores
        return np.array([start + d.position for start, d in digits], np.int64), ids, scores


def score_digits(
    judgements: Sequence[Judgement],
    decimals: Sequence[Sequence[DecimalToken]],
    targets: np.ndarray,
    options: ObjectiveConfig,
) -> list[tuple[DigitScores, ...]]:
    """S(c with other digits here, t_i) for every choice, on one scale per place; the other digits stay as sampled."""
    scored = [
        [(token, score_choices(judgement.confidence, token, target, options)) for token in tokens]
        for judgement, tokens, target in zip(judgements, decimals, targets, strict=True)
    ]
    scale = place_scales(scored, options)
    return [
        tuple(
            DigitScores(token.position, token.width, scores / scale[token.place, token.width]) for token, scores in row
        )
        for row in scored
    ]


def score_choices(confidence: float | None, token: DecimalToken, target: float, options: ObjectiveConfig) -> np.ndarray:
    """The score of ``confidence`` with each of the choices in the place of ``token``, float64 [10 ** width], [2] before the
    point: ``1`` is the confidence 1, ``0`` the one stated, or the nearest below where 1 was stated."""
    assert confidence is not None  # only a valid confidence has decimals
    if token.place == 0:
        c = np.array([confidence if token.value == 0 else JUST_BELOW_ONE, 1.0])
    else:
        c = np.clip(confidence + (np.arange(10**token.width) - token.value) / 10.0**token.place, 0, 1)
    return SCORES[options.calibration_loss](c, np.full_like(c, target), options.score_clamp)


def place_scales(
    scored: Sequence[Sequence[tuple[DecimalToken, np.ndarray]]], options: ObjectiveConfig
) -> dict[tuple[int, int], float]:
    """The divisor of the scores of each (place, width), with ``batch_std``; 1 otherwise.

    The root mean square of the centred scores over the mini-batch and all choices, at least ``MIN_BATCH_RMS``. Hundredths
    are worth a tenth of what tenths are and less: on one scale hardly anything would be left to train them.
    """
    variances: dict[tuple[int, int], list[float]] = {}
    for token, scores in itertools.chain.from_iterable(scored):
        variances.setdefault((token.place, token.width), []).append(float(scores.var()))
    if options.advantage_normalization_confidence != "batch_std":
        return dict.fromkeys(variances, 1.0)
    return {place: max(math.sqrt(np.mean(values)), MIN_BATCH_RMS) for place, values in variances.items()}


def digit_losses(digits: DigitBatch, options: ObjectiveConfig) -> Tensor:
    """-sum_d w_d A_d log pi_d, [m]: every digit d of a position at once; A_d = S_d - sum w S, no gradient through w.

    w_d is proportional to pi_d / (pi_d + damping): the gradient of the expected score under the damped inverse Fisher
    metric of the softmax, divided by W = sum_d pi_d / (pi_d + damping). Undamped it is the natural gradient, A_d on each
    logit, however rarely d is sampled; a large damping leaves the plain one, pi_d A_d, which gives up what is hardly ever
    sampled, and any damping what has much less probability than it. An expectation under the policy as it is, it needs no
    importance ratio.
    """
    import torch

    zero = digits.logprobs.new_zeros(())
    known = digits.logprobs > -torch.inf
    logprobs = torch.where(known, digits.logprobs, zero)
    pi = torch.where(known, logprobs.detach().exp().clamp(min=torch.finfo(logprobs.dtype).tiny), zero)
    w = torch.where(known, pi / (pi + options.digit_damping / known.sum(-1, keepdim=True)), zero)
    w = w / w.sum(-1, keepdim=True)
    scores = digits.scores.to(w)
    A = scores - (w * scores).sum(-1, keepdim=True)
    return -(w * A * logprobs).sum(-1)
