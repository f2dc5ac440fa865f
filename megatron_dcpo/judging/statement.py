"""The confidence as a continuation: a fixed lead (``<conf> Confidence: 0.``) behind the reasoning, then two decimals.

The form in which an adapter states the confidence (``objective.confidence_parameters: adapter``): only the decimals are
chosen, among the digits alone, so that no statement is malformed. Where the tokenizer has a token for every two digits
(Llama-3) one position chooses; otherwise (Qwen) one for the tenth and, behind each of the ten, one for the hundredth. With
``judging.confidence_tokens`` one position chooses among tokens that belong to the adapter: 0.00 to 1.00, 1.00 included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_dcpo.errors import UserError


@dataclass(frozen=True)
class StatementForm:
    """``lead``: its token ids. ``digits``: int64 [K], the tokens of the choices: K = 100 (``00`` to ``99``), 10, or 101 that
    are numbers of the adapter's own tokens. ``activated``: the adapter acts from the lead on; else on the whole text."""

    text: str
    lead: tuple[int, ...]
    digits: np.ndarray
    activated: bool = True

    @classmethod
    def of(
        cls, tokenizer: Any, digits: Mapping[int, np.ndarray], marker: str, activated: bool = True, own_tokens: int = 0
    ) -> StatementForm:
        """``digits``: width -> token of each value (``DigitVocabulary``).

        Raises :class:`UserError` where some are missing."""
        text = f"\n{marker} Confidence:{' ' if own_tokens else ' 0.'}"
        lead = tuple(tokenizer.encode(text.rstrip(), add_special_tokens=False))
        if own_tokens:
            return cls(text, lead, np.arange(own_tokens), activated)
        for width in (2, 1):
            if (digits[width] >= 0).all():
                return cls(text, lead, digits[width], activated)
        raise UserError(
            "the tokenizer has no token for every digit, which objective.confidence_parameters=adapter needs"
        )

    @property
    def own_tokens(self) -> bool:
        """Whether the choices are the adapter's own tokens."""
        return len(self.digits) == 101

    @property
    def values(self) -> int:
        """How many values can be stated: 0.00, 0.01, ..."""
        return 101 if self.own_tokens else 100

    def written(self, c: float) -> str:
        """The statement of ``c``."""
        return self.text + (f"{c:.2f}" if self.own_tokens else f"{round(100 * c):02d}")

    @property
    def branches(self) -> int:
        """Digits behind the lead whose successors are chosen as well."""
        return len(self.digits) if len(self.digits) == 10 else 0

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [n]: the lead, and each branch's first digit."""
        return np.array([*self.lead, *self.digits[: self.branches]], np.int64)

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [n]: how far behind the reasoning each of ``tokens`` stands. All branches stand at the same place."""
        return np.array([*range(len(self.lead)), *[len(self.lead)] * self.branches], np.int64)

    @cached_property
    def sees(self) -> np.ndarray:
        """bool [n, n]: which of ``tokens`` each attends to: those of the lead up to itself, and itself."""
        n, lead = len(self.tokens), len(self.lead)
        return np.tril(np.ones((n, n), bool)) & ((np.arange(n) < lead)[None] | np.eye(n, dtype=bool))

    @property
    def seeing(self) -> int:
        """How many of ``tokens``, from the first, carry what the confidence sees beside the text."""
        return len(self.tokens) if self.own_tokens else 1

    @property
    def choosing(self) -> slice:
        """Those of ``tokens`` behind which digits are chosen: the last of the lead, and the branches."""
        return slice(len(self.lead) - 1, len(self.tokens))


def reasoning_length(
    token_ids: np.ndarray, boundary: int, piece: Callable[[int], bytes], eos_ids: Collection[int]
) -> int:
    """How many tokens of a response a statement follows: those before its own marker, if any, without an end token and
    without white space at the end. ``piece(id)``: the bytes of a token."""
    while boundary and (int(token_ids[boundary - 1]) in eos_ids or not piece(int(token_ids[boundary - 1])).strip()):
        boundary -= 1
    return boundary


def reasoning_features(logprobs: np.ndarray) -> np.ndarray:
    """What ``objective.confidence_sees: logprobs`` tells of the reasoning's log-probs [T]: float32 [4], the probability and
    the surprise (log of 1 - log p) of all of it and of its least likely token."""
    total, least = min(0.0, float(logprobs.sum())), float(logprobs.min(initial=0.0))
    return np.array([math.exp(total), math.exp(least), math.log1p(-total), math.log1p(-least)], np.float32)


NUM_FEATURES = 4
STATEMENT_TOKENS = 32  # at most, by any tokenizer
