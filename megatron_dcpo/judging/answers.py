"""How an answer is marked in a response: a box for mathematics, a fenced block for programs.

The confidence line follows the answer, so the form of the answer decides where the confidence block begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_dcpo.judging.boxes import last_box
from megatron_dcpo.judging.fences import last_fence


class AnswerForm(NamedTuple):
    """``opener`` begins an answer; ``end(content)`` is the offset behind the last complete one, 0 without any."""

    opener: str
    end: Callable[[bytes], int]


def _end_of_box(content: bytes) -> int:
    box = last_box(content)
    return box.end if box else 0


def _end_of_fence(content: bytes) -> int:
    fence = last_fence(content)
    return fence.end if fence else 0


BOXED = AnswerForm("\\boxed", _end_of_box)
FENCED = AnswerForm("```", _end_of_fence)
