"""The records that travel between rooms: one small frozen dataclass per arrow of the data flow.

Correctness ``R``, confidence ``c`` and the block boundary are separate fields all the way. They are never folded into
one reward tensor: that is how the public reference code came to train each block with the other's advantage.
Grouping is by ``prompt_id``, never by position in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    import numpy as np

Copied = TypeVar("Copied")

BLOCK_NONE, BLOCK_REASONING, BLOCK_CONFIDENCE = 0, 1, 2
BLOCKS = {"reasoning": BLOCK_REASONING, "confidence": BLOCK_CONFIDENCE}
CONFIDENCE_TAG = "<conf>"  # opens the confidence block; configuration key judging.marker

ConfidenceStatus = Literal[
    "ok",  # exactly one marker, after the last box, one number in [0, 1], nothing behind it
    "missing",  # no marker, but the response ended by itself
    "multiple",  # more than one marker
    "unparsable",  # a marker without one decimal number behind it
    "out_of_range",  # a number outside [0, 1]
    "trailing_text",  # text behind the number
    "before_box",  # the answer is boxed after the confidence
    "truncated",  # the response hit the length limit before its confidence was complete
]
MALFORMED: tuple[ConfidenceStatus, ...] = tuple(status for status in get_args(ConfidenceStatus) if status != "ok")


@dataclass(frozen=True)
class Prompt:
    """One problem, rendered and tokenised. ``prompt_id`` is unique within a rollout and names the group.

    A programming problem has packed ``tests`` (``data/code_problems.py``); its ``ground_truth`` is their key.
    """

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]
    ground_truth: str
    task: str
    tests: bytes | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        """``token_ids``, int64 [P]."""
        import numpy as np

        return np.asarray(self.token_ids, np.int64)


@dataclass(frozen=True)
class Response:
    """One sampled response: exactly the ids the engine sampled (EOS included) and its log-probs of them.

    ``token_ids``: int64 [T]; ``logprobs``: float32 [T], natural log, at the sampling temperature (or of the raw logits
    where the sampling asked for it), by the weights ``weights_version``. ``finish_reason`` is ``length`` when the
    response was cut off before EOS, ``abort`` when its rollout ended before it did; one that was continued has
    ``segments``: the weights version and the number of tokens of each part, oldest first. ``step``: whose random numbers
    it has. ``top_logprobs``: float32 [T, K], falling, of the raw logits, where asked for.
    ``text``: the response without its end token, where it is judged by its text; a server gives no ``token_ids``.
    ``token_ends``: int64 [T], the byte of the text behind each token, where that is known.
    """

    prompt_id: str
    sample_index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length", "abort"]
    weights_version: int
    top_logprobs: np.ndarray | None = None
    text: str | None = None
    token_ends: np.ndarray | None = None
    step: int = 0
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled any of its tokens."""
        return self.segments[0][0] if self.segments else self.weights_version


@dataclass(frozen=True)
class Judgement:
    """What a response is worth: correctness R in {0, 1}, the stated confidence or why there is none, the boundary.

    Tokens ``[0, boundary)`` of the response are the reasoning block, ``[boundary, length)`` the confidence block;
    ``boundary`` is None where text was judged whose tokens are not known.
    ``confidence`` is ``None`` exactly when ``status`` is not ``ok``. ``stated`` is the number as written when it is no
    valid confidence (``1.2``): the released code of the paper used it raw, so the preset ``verl_compat`` asks for it.
    ``answered``: an answer begins in the reasoning block. ``marker_end`` is the first token that begins behind the
    marker; None where that is not known.
    ``answer`` is what was judged: the content of the box, or the program; ``category``: how the program ended.
    """

    prompt_id: str
    correct: float
    confidence: float | None
    status: ConfidenceStatus
    boundary: int | None
    length: int
    stated: float | None = None
    answered: bool = True
    marker_end: int | None = None
    answer: str | None = field(default=None, compare=False)
    category: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TokenAdvantages:
    """Per response token: its advantage (float64 [T]) and the block it belongs to (int8 [T], ``BLOCK_*``)."""

    prompt_id: str
    advantages: np.ndarray
    block_ids: np.ndarray


def replaced(value: Copied, **fields: Any) -> Copied:
    """``dataclasses.replace`` without a look at each field, of which a step would take thousands; for what has no
    ``__post_init__``."""
    copied = object.__new__(type(value))
    vars(copied).update(vars(value), **fields)
    return copied
