"""Which tokens of a stated confidence are digits behind the decimal point, and which tokens could stand in their place.

``0.83`` is ``0`` ``.`` ``8`` ``3`` to Qwen's tokenizer and ``0`` ``.`` ``83`` to Llama-3's. A token that mixes digits with
anything else (``.8``) is left out, and so is a confidence of 1: ``1.00`` with another digit would be no confidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from megatron_dcpo.judging.blocks import Split
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import DecimalToken

WIDEST = 3  # digits of one token; every tokenizer we know stops there

_BELOW_ONE = re.compile(rb"(?<![0-9])0*\.([0-9]+)[ \t\r\n\f\v]*$")


def decimal_tokens(token_ids: Sequence[int] | np.ndarray, tokens: TokenBytes, split: Split) -> tuple[DecimalToken, ...]:
    """The exchangeable tokens of a response with a valid confidence, whose text ends with the number."""
    number = _BELOW_ONE.search(split.content[-64:])
    if number is None:
        return ()
    begin, end = (max(0, len(split.content) - 64) + offset for offset in number.span(1))
    found, stop = [], len(split.content)
    for position in reversed(range(split.boundary, len(token_ids) - split.ended)):
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
