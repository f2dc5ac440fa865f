"""Reasoning block and confidence block of a response, on its sampled token ids by cumulative byte offsets.

The confidence block is every token whose first byte lies at or after the first byte of the marker, EOS included. A
token that straddles the marker (``}<`` of ``\boxed{5}<conf>``) stays with the reasoning: it carries answer text.
The two blocks always partition the response (docs/algorithms.md#1-judging-from-sampled-ids-to-r-c-boundary).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.judging.answers import BOXED, AnswerForm
from megatron_dcpo.judging.token_bytes import TokenBytes


@dataclass(frozen=True)
class Split:
    """Tokens ``[0, boundary)`` reason, ``[boundary, T)`` state the confidence; None of a text whose tokens are not known.

    ``content`` are the bytes of the response without its final EOS; ``marker`` is the byte offset of the marker in
    it, None when there is none. ``ended`` says whether the response closes with an EOS. ``marker_end`` is the first token
    that begins behind the marker.
    """

    boundary: int | None
    marker_end: int | None
    content: bytes
    marker: int | None
    ended: bool

    @property
    def reasoning(self) -> bytes:
        """Return the bytes before the marker, all of them when there is none."""
        return self.content if self.marker is None else self.content[: self.marker]


def split_blocks(
    token_ids: Sequence[int] | np.ndarray,
    tokens: TokenBytes,
    eos_ids: Collection[int],
    marker: str,
    form: AnswerForm = BOXED,
) -> Split:
    """Split a response of T tokens.

    Without a marker the block is the EOS alone: ending there was the wrong decision, and so it carries the penalty.
    A truncated response without a marker has an empty confidence block.
    """
    ended = len(token_ids) > 0 and int(token_ids[-1]) in eos_ids
    pieces = tokens.pieces(token_ids[: len(token_ids) - ended])
    content = b"".join(pieces)
    tag = marker.encode()
    at = form.find_marker(content, tag)
    if at is None:
        return Split(len(pieces), len(pieces), content, None, ended)
    return Split(*_tokens_before(np.cumsum([*map(len, pieces)]), at, at + len(tag)), content, at, ended)


def split_text(text: str, marker: str, form: AnswerForm = BOXED, token_ends: np.ndarray | None = None) -> Split:
    """Split a response by its text, without its end token; ``token_ends`` as in ``Response``. Whether it ended is not known
    here."""
    content, tag = text.encode(errors="surrogatepass"), marker.encode()
    at = form.find_marker(content, tag)
    if token_ends is None:
        return Split(None, None, content, at, ended=False)
    if at is None:  # all but an end token, which ends behind the text
        boundary = int(np.searchsorted(token_ends, len(content), side="right"))
        return Split(boundary, boundary, content, None, ended=False)
    return Split(*_tokens_before(token_ends, at, at + len(tag)), content, at, ended=False)


def _tokens_before(ends: np.ndarray, first: int, second: int) -> tuple[int, int]:
    """Return how many tokens begin before either byte."""
    starts = np.concatenate([[0], ends])[:-1]
    return int(np.searchsorted(starts, first)), int(np.searchsorted(starts, second))


def ends_of_tokens(lengths: Sequence[int], text: str) -> np.ndarray | None:
    """Return the byte behind each token, from their ``lengths`` in bytes; None where they do not make up ``text``, or
    characters were replaced in it. One end token may stand behind the text."""
    ends, size = np.cumsum([0, *lengths]), len(text.encode(errors="surrogatepass"))
    return ends[1:] if size in ends[-2:] and "\ufffd" not in text else None
