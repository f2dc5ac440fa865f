"""Split the sampled token ids of a response into reasoning and confidence block, by cumulative byte
offsets.

The confidence block is every token whose first byte lies at or after the first byte of the marker,
EOS included. A token that straddles the marker (``}<`` in ``\boxed{5}<conf>``) stays with the
reasoning, because it carries answer text. The two blocks always partition the response
(docs/algorithms.md#1-judging-from-sampled-ids-to-r-c-boundary).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.judging.answers import BOXED, AnswerForm
from megatron_dcpo.judging.token_bytes import TokenBytes

# returns the byte at which the answer begins (``thinking.answer_start``)
FindStart = Callable[[bytes], int | None]


@dataclass(frozen=True)
class Split:
    """A response split in two: tokens ``[0, boundary)`` reason and ``[boundary, T)`` state the
    confidence. ``boundary`` and ``marker_end`` are None if the tokens of a text are not known.

    ``content`` holds the bytes of the response without its final EOS, and ``marker`` the byte
    offset of the marker in it, None if there is none. ``ended`` says whether the response closes
    with an EOS. ``marker_end`` is the first token that begins after the marker. ``start`` is the
    byte at which the answer begins, after the thinking, None if there is no answer; ``thinking`` is
    the number of tokens before it.
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
        """Return the bytes after the thinking."""
        if self.start is None:
            return b""
        return self.content[self.start :]

    @property
    def reasoning(self) -> bytes:
        """Return the bytes of the answer before the marker, all of them if there is no marker."""
        if self.marker is None:
            return self.answer
        return self.content[self.start : self.marker]


def split_blocks(
    token_ids: Sequence[int] | np.ndarray,
    tokens: TokenBytes,
    eos_ids: Collection[int],
    marker: str,
    form: AnswerForm = BOXED,
    find_start: FindStart = lambda content: 0,
) -> Split:
    """Split a response of T tokens; ``find_start`` tells at which byte its answer begins.

    Without a marker the confidence block is the EOS alone: ending there was the wrong decision, so
    the EOS carries the penalty. A truncated response without a marker has an empty confidence
    block.
    """
    ended = len(token_ids) > 0 and int(token_ids[-1]) in eos_ids
    pieces = tokens.pieces(token_ids[: len(token_ids) - ended])
    content = b"".join(pieces)
    tag = marker.encode()
    start, at = _start_and_marker(content, tag, form, find_start)
    ends = None
    if at is not None or start:
        ends = np.cumsum([len(piece) for piece in pieces])
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
    """Split a response by its text, which lacks the end token, so that whether the response ended
    is not known here. ``token_ends`` is that of ``Response``.
    """
    content = text.encode(errors="surrogatepass")
    tag = marker.encode()
    start, at = _start_and_marker(content, tag, form, find_start)
    if token_ends is None:
        tokens_before = 0 if start == 0 else None
        return Split(None, None, content, at, False, start, tokens_before)
    # all but an end token, which ends after the text
    boundary = int(np.searchsorted(token_ends, len(content), side="right"))
    thinking = _thinking(token_ends, start, boundary)
    if at is None:
        return Split(boundary, boundary, content, None, False, start, thinking)
    boundary, marker_end = _tokens_before(token_ends, at, at + len(tag))
    return Split(boundary, marker_end, content, at, False, start, thinking)


def _start_and_marker(
    content: bytes, tag: bytes, form: AnswerForm, find_start: FindStart
) -> tuple[int | None, int | None]:
    """Return the offset of the answer, and the offset of the marker in or after it."""
    start = find_start(content)
    if start is None:
        return None, None
    at = form.find_marker(content[start:], tag)
    if at is None:
        return start, None
    return start, start + at


def _thinking(ends: np.ndarray | None, start: int | None, everything: int) -> int:
    """Return how many tokens begin before the answer."""
    if start is None:
        return everything
    if not start or ends is None:
        return 0
    return _tokens_before(ends, start)[0]


def _tokens_before(ends: np.ndarray, *offsets: int) -> list[int]:
    """Return, for each byte offset, how many tokens begin before it."""
    starts = np.concatenate([[0], ends])[:-1]
    return [int(count) for count in np.searchsorted(starts, offsets)]


def ends_of_tokens(lengths: Sequence[int], text: str) -> np.ndarray | None:
    """Return the offset of the byte after each token, from their ``lengths`` in bytes.

    None if the tokens do not make up ``text``, or if characters were replaced in it. One end token
    may follow the text.
    """
    ends = np.cumsum([0, *lengths])
    size = len(text.encode(errors="surrogatepass"))
    if size not in ends[-2:] or "\ufffd" in text:
        return None
    return ends[1:]
