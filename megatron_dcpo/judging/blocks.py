"""Reasoning block and confidence block of a response, on its sampled token ids by cumulative byte
offsets.

The confidence block is every token whose first byte lies at or after the first byte of the marker,
EOS included. A token that straddles the marker (``}<`` of ``\boxed{5}<conf>``) stays with the
reasoning: it carries answer text. The two blocks always partition the response
(docs/algorithms.md#1-judging-from-sampled-ids-to-r-c-boundary).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.judging.answers import BOXED, AnswerForm
from megatron_dcpo.judging.token_bytes import TokenBytes

FindStart = Callable[
    [bytes], int | None
]  # where the answer begins (``thinking.answer_start``)


@dataclass(frozen=True)
class Split:
    """Tokens ``[0, boundary)`` reason, ``[boundary, T)`` state the confidence; None of a text whose
    tokens are not known.

    ``content`` are the bytes of the response without its final EOS; ``marker`` is the byte offset
    of the marker in it, None when there is none. ``ended`` says whether the response closes with an
    EOS. ``marker_end`` is the first token that begins behind the marker. ``start`` is the byte at
    which the answer begins, behind the thinking, None when there is no answer; ``thinking`` counts
    the tokens before it.
    """

    boundary: int | None
    marker_end: int | None
    content: bytes
    marker: int | None
    ended: bool
    start: int | None = 0
    thinking: int | None = 0

    @property
    def answer(self) -> bytes:
        """Return the bytes behind the thinking."""
        return b"" if self.start is None else self.content[self.start :]

    @property
    def reasoning(self) -> bytes:
        """Return those of them before the marker, all when there is none."""
        return (
            self.answer
            if self.marker is None
            else self.content[self.start : self.marker]
        )


def split_blocks(
    token_ids: Sequence[int] | np.ndarray,
    tokens: TokenBytes,
    eos_ids: Collection[int],
    marker: str,
    form: AnswerForm = BOXED,
    find_start: FindStart = lambda content: 0,
) -> Split:
    """Split a response of T tokens, whose answer begins where ``find_start`` says.

    Without a marker the block is the EOS alone: ending there was the wrong decision, and so it
    carries the penalty. A truncated response without a marker has an empty confidence block.
    """
    ended = len(token_ids) > 0 and int(token_ids[-1]) in eos_ids
    pieces = tokens.pieces(token_ids[: len(token_ids) - ended])
    content = b"".join(pieces)
    tag = marker.encode()
    start, at = _start_and_marker(content, tag, form, find_start)
    ends = np.cumsum([*map(len, pieces)]) if at is not None or start else None
    thinking = _thinking(ends, start, len(pieces))
    if at is None:
        return Split(len(pieces), len(pieces), content, None, ended, start, thinking)
    assert ends is not None
    boundary, marker_end = _tokens_before(ends, at, at + len(tag))
    return Split(boundary, marker_end, content, at, ended, start, thinking)


def split_text(
    text: str,
    marker: str,
    form: AnswerForm = BOXED,
    token_ends: np.ndarray | None = None,
    find_start: FindStart = lambda content: 0,
) -> Split:
    """Split a response by its text, without its end token; ``token_ends`` as in ``Response``.
    Whether it ended is not known here.
    """
    content, tag = text.encode(errors="surrogatepass"), marker.encode()
    start, at = _start_and_marker(content, tag, form, find_start)
    if token_ends is None:
        return Split(None, None, content, at, False, start, 0 if start == 0 else None)
    # all but an end token, which ends behind the text
    boundary = int(np.searchsorted(token_ends, len(content), side="right"))
    thinking = _thinking(token_ends, start, boundary)
    if at is None:
        return Split(boundary, boundary, content, None, False, start, thinking)
    boundary, marker_end = _tokens_before(token_ends, at, at + len(tag))
    return Split(boundary, marker_end, content, at, False, start, thinking)


def _start_and_marker(
    content: bytes, tag: bytes, form: AnswerForm, find_start: FindStart
) -> tuple[int | None, int | None]:
    """Return where the answer begins, and the marker that is found behind it."""
    start = find_start(content)
    at = (
        None
        if start is None
        else form.find_marker(content[start:] if start else content, tag)
    )
    return start, None if at is None or start is None else start + at


def _thinking(ends: np.ndarray | None, start: int | None, everything: int) -> int:
    """Return how many tokens begin before the answer."""
    if start is None:
        return everything
    return _tokens_before(ends, start)[0] if start and ends is not None else 0


def _tokens_before(ends: np.ndarray, *places: int) -> list[int]:
    """Return how many tokens begin before each byte."""
    starts = np.concatenate([[0], ends])[:-1]
    return [int(place) for place in np.searchsorted(starts, places)]


def ends_of_tokens(lengths: Sequence[int], text: str) -> np.ndarray | None:
    """Return the byte behind each token, from their ``lengths`` in bytes; None where they do not
    make up ``text``, or characters were replaced in it. One end token may stand behind the text.
    """
    ends, size = np.cumsum([0, *lengths]), len(text.encode(errors="surrogatepass"))
    return ends[1:] if size in ends[-2:] and "\ufffd" not in text else None
