"""Reasoning block and confidence block of a response, on its sampled token ids by cumulative byte offsets.

The confidence block is every token whose first byte lies at or after the first byte of the marker, EOS included. A
token that straddles the marker (``}<`` of ``\boxed{5}<conf>``) stays with the reasoning: it carries answer text.
The two blocks always partition the response (algorithms 1.3, recommended).

Which tokens of a stated confidence are digits behind the decimal point, and which tokens could stand in their place.

``0.83`` is ``0`` ``.`` ``8`` ``3`` to Qwen's tokenizer and ``0`` ``.`` ``83`` to Llama-3's. A token that mixes digits with
anything else (``.8``) is left out, and so is a confidence of 1: ``1.00`` with another digit would be no confidence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.judging.answers import BOXED, AnswerForm
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import DecimalToken


@dataclass(frozen=True)
class Split:
    """Tokens ``[0, boundary)`` reason, ``[boundary, T)`` state the confidence; None where text was split.

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
        """The bytes before the marker, all of them when there is none."""
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
    wanted = marker.encode()
    at = form.find_marker(content, wanted)
    if at is None:
        return Split(len(pieces), len(pieces), content, None, ended)
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    boundary, marker_end = np.searchsorted(starts, [at, at + len(wanted)])
    return Split(int(boundary), int(marker_end), content, at, ended)


def split_text(text: str, marker: str, form: AnswerForm = BOXED) -> Split:
    """Split a response of which only the text is known, without its end token. Whether it ended is not known here."""
    content = text.encode(errors="surrogatepass")
    return Split(None, None, content, form.find_marker(content, marker.encode()), ended=False)


WIDEST = 3  # digits of one token; every tokenizer we know stops there

_BELOW_ONE = re.compile(rb"(?<![0-9])0*\.([0-9]+)[ \t\r\n\f\v]*$")


def decimal_tokens(token_ids: Sequence[int] | np.ndarray, tokens: TokenBytes, split: Split) -> tuple[DecimalToken, ...]:
    """The exchangeable tokens of a response with a valid confidence, whose text ends with the number."""
    number = _BELOW_ONE.search(split.content[-64:])
    if number is None:
        return ()
    begin, end = (max(0, len(split.content) - 64) + offset for offset in number.span(1))
    found, stop = [], len(split.content)
    for position in reversed(range(split.boundary or 0, len(token_ids) - split.ended)):
        piece = tokens[int(token_ids[position])]
        start = stop - len(piece)
        if start < begin:
            break
        if piece and stop <= end and len(piece) <= WIDEST:
            found.append(DecimalToken(position, int(piece), len(piece), stop - begin))
        stop = start
    return tuple(reversed(found))


def digit_token_ids(tokens: TokenBytes) -> dict[int, np.ndarray]:
    """Width -> int64 [10 ** width]: the token of each value, ``07`` at 7; -1 where the vocabulary has none."""
    tables = {width: np.full(10**width, -1, np.int64) for width in range(1, WIDEST + 1)}
    for token_id, piece in enumerate(tokens.table):
        if 1 <= len(piece) <= WIDEST and re.fullmatch(rb"[0-9]+", piece) and tables[len(piece)][int(piece)] < 0:
            tables[len(piece)][int(piece)] = token_id
    return tables
