"""How an answer is marked in a response: a box for mathematics, a fenced block for programs.

The confidence line follows the answer, so the form of the answer decides where the confidence block begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_dcpo.judging.boxes import last_box
from megatron_dcpo.judging.programs import find_marker_after_program


class AnswerForm(NamedTuple):
    """``opener`` begins an answer; ``find_marker(content, marker)`` is the offset of the marker that opens the
    confidence block, None when there is none."""

    opener: str
    find_marker: Callable[[bytes, bytes], int | None]


def find_marker_after_box(content: bytes, marker: bytes) -> int | None:
    """With several markers, the first one behind the last complete box: the answer and everything before it is
    reasoning even where the marker was only talked about. When no marker follows the last box, the last marker."""
    box = last_box(content)
    after = content.find(marker, box.end if box else 0)
    at = after if after >= 0 else content.rfind(marker)
    return at if at >= 0 else None


BOXED = AnswerForm("\\boxed", find_marker_after_box)
FENCED = AnswerForm("```", find_marker_after_program)
