"""The confidences that can be stated behind an answer, as sequences of tokens whose log-probs say
how probable each is.

How a tokenizer cuts the numbers is its own affair. Those whose tokens are equal but
for the last one are one :class:`Branch`: with a token for each digit these are ``0.0`` to ``0.9``
and ``1.0``, of which the first has the ten last tokens ``0`` to ``9``. A branch is one sequence, in
which one position scores all its last tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_dcpo.evaluation.before_number import tokens_of_numbers
from megatron_dcpo.objectives.expected_brier import score
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_REASONING,
    Judgement,
    Prompt,
    Response,
    TrainingSample,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Branch:
    """Confidences whose tokens differ in the last one only: the tokens before it, the last tokens,
    and the places of the confidences in ``Candidates.confidences``.
    """

    before: tuple[int, ...]
    last: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Candidates:
    """The ``confidences`` that can be stated, float64 [C], the tokens that all of them begin with
    (the tag, and what is before the number), and the branches behind these.
    """

    confidences: np.ndarray
    opening: tuple[int, ...]
    branches: tuple[Branch, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, marker: str, decimals: int = 2) -> Candidates:
        """Return the numbers from 0 to 1 with so many ``decimals``, as ``tokenizer`` cuts them."""
        confidences = np.arange(10**decimals + 1) / 10**decimals
        opening, numbers = tokens_of_numbers(tokenizer, marker, decimals)
        members: dict[tuple[int, ...], list[int]] = {}
        for place, tokens in enumerate(numbers):
            members.setdefault(tokens[:-1], []).append(place)
        branches = tuple(
            Branch(
                before=before,
                last=tuple(numbers[place][-1] for place in places),
                places=tuple(places),
            )
            for before, places in members.items()
        )
        return cls(confidences=confidences, opening=opening, branches=branches)

    def path_of(self, target: float) -> tuple[int, ...]:
        """Return the tokens of the confidence that is nearest to ``target``, behind ``opening``."""
        nearest = int(np.abs(self.confidences - target).argmin())
        for branch in self.branches:
            if nearest in branch.places:
                return (*branch.before, branch.last[branch.places.index(nearest)])
        raise AssertionError("every confidence is in a branch")


@dataclass(frozen=True)
class CandidateSample(TrainingSample):
    """A branch behind an answer. The prompt ends where the number begins, the input goes on with
    ``before``, and the response tokens are what is scored: those of ``before``, each at its place,
    and all last tokens at the place behind them.
    """

    before: tuple[int, ...] = ()
    confidences: int = 1  # of the answer, over all its branches

    @property
    def input_ids(self) -> np.ndarray:
        """Return the tokens of the forward pass, int64."""
        return np.array([*self.prompt.token_ids, *self.before], np.int64)

    @property
    def length(self) -> int:
        """Return the number of tokens of the forward pass."""
        return len(self.prompt.token_ids) + len(self.before)

    @property
    def places(self) -> np.ndarray:
        """Return the position whose logits score each response token, int64."""
        first = len(self.prompt.token_ids) - 1
        at_before = np.arange(first, first + len(self.before))
        last_tokens = len(self.response_ids) - len(self.before)
        return np.append(at_before, np.full(last_tokens, first + len(self.before)))


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer whose confidence is learned or read: the tokens of prompt and response up to the
    number, and the ``target`` of its confidence in [0, 1].
    """

    name: str
    token_ids: tuple[int, ...]
    target: float
    candidates: Candidates

    @property
    def weight(self) -> float:
        """Return what the answer counts in the mean over a step."""
        return 1.0

    @property
    def length(self) -> int:
        """Return the number of tokens of its longest sequence."""
        branches = self.candidates.branches
        return len(self.token_ids) + max(len(branch.before) for branch in branches)

    def samples(self) -> list[TrainingSample]:
        """Return a sample for each branch."""
        prompt = Prompt(
            prompt_id=self.name, messages=(), token_ids=self.token_ids, ground_truth="", task=""
        )
        scores = score(self.candidates.confidences, self.target)
        found: list[TrainingSample] = []
        for index, branch in enumerate(self.candidates.branches):
            ids = np.array([*branch.before, *branch.last], np.int64)
            is_last = np.arange(len(ids)) >= len(branch.before)
            last_scores = np.zeros(len(ids))
            last_scores[is_last] = scores[list(branch.places)]
            found.append(
                CandidateSample(
                    prompt=prompt,
                    response=_unsampled(self.name, index, ids),
                    judgement=_unstated(self.name, self.target, len(ids)),
                    R=self.target,
                    block_ids=np.where(is_last, BLOCK_CONFIDENCE, BLOCK_REASONING).astype(np.int8),
                    advantages=last_scores,
                    weights=is_last.astype(np.float64),
                    before=branch.before,
                    confidences=len(self.candidates.confidences),
                )
            )
        return found

    def digest(self) -> bytes:
        """Return a digest of its tokens and its target."""
        whole = hashlib.sha256(np.array(self.token_ids, np.int64).tobytes())
        whole.update(np.float64(self.target).tobytes())
        return whole.digest()

    def loss(self, logprobs: Sequence[np.ndarray]) -> float:
        """Return the expected Brier score, at the log-probs of :meth:`samples`."""
        probabilities = self.probabilities(logprobs)
        scores = score(self.candidates.confidences, self.target)
        return float(1.0 - probabilities @ scores)

    def probabilities(self, logprobs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probability of every confidence, float64 [C], at the log-probs of
        :meth:`samples`; they add up to less than 1 if other text is probable too.
        """
        found = np.zeros(len(self.candidates.confidences))
        for branch, row in zip(self.candidates.branches, logprobs, strict=True):
            values = row.astype(np.float64)
            count = len(branch.before)
            path = values[:count].sum() + values[count:]
            found[list(branch.places)] = np.exp(path)
        return found


@dataclass(frozen=True)
class TextAnswer:
    """An answer whose confidence is learned as text, by the cross-entropy of one number: the one
    nearest to the ``target`` of ``answer``. One sequence, where :class:`JudgedAnswer` has one for
    each branch.
    """

    answer: JudgedAnswer

    @property
    def weight(self) -> float:
        """Return what the answer counts in the mean over a step."""
        return self.answer.weight

    def samples(self) -> list[TrainingSample]:
        """Return one sample, whose response is the number."""
        answer = self.answer
        ids = np.array(answer.candidates.path_of(answer.target), np.int64)
        return [
            CandidateSample(
                prompt=Prompt(
                    prompt_id=answer.name,
                    messages=(),
                    token_ids=answer.token_ids,
                    ground_truth="",
                    task="",
                ),
                response=_unsampled(answer.name, 0, ids),
                judgement=_unstated(answer.name, answer.target, len(ids)),
                R=answer.target,
                block_ids=np.full(len(ids), BLOCK_CONFIDENCE, np.int8),
                advantages=np.zeros(len(ids)),
                weights=np.ones(len(ids)),
                before=tuple(ids[:-1].tolist()),
            )
        ]

    def digest(self) -> bytes:
        """Return a digest of its tokens and its number."""
        number = np.array(self.answer.candidates.path_of(self.answer.target), np.int64)
        return hashlib.sha256(self.answer.digest() + number.tobytes()).digest()

    def loss(self, logprobs: Sequence[np.ndarray]) -> float:
        """Return the cross-entropy of the number in nats, at the log-probs of :meth:`samples`."""
        return -float(logprobs[0].astype(np.float64).sum())


def _unsampled(name: str, index: int, ids: np.ndarray) -> Response:
    """Return tokens that nobody sampled as a response."""
    return Response(
        prompt_id=name,
        sample_index=index,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        weights_version=0,
    )


def _unstated(name: str, target: float, length: int) -> Judgement:
    """Return the judgement of tokens that nobody sampled."""
    return Judgement(
        prompt_id=name,
        correct=target,
        confidence=None,
        status="missing",
        boundary=0,
        length=length,
    )
