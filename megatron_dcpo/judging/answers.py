r"""How an answer is marked in a response: a box for mathematics, a fenced block for programs.

The confidence line follows the answer, so the form of the answer decides where the confidence block
begins. A box is brace-matched ``\boxed{...}``, found in one pass; a program is the last complete
fenced block of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dcpo.types import CONFIDENCE_TAG


class AnswerForm(NamedTuple):
    """``opener`` begins an answer ("": any text does); ``find_marker(content, marker)`` is the
    offset of the marker that opens the confidence block, None when there is none;
    ``extract(reasoning)`` is the answer, None when there is none.
    """

    opener: str
    find_marker: Callable[[bytes, bytes], int | None]
    extract: Callable[[str], str | None]


class Attempt(NamedTuple):
    """What a verifier decides: the answer that was read, its ground truth, and for a user's
    verifier the whole reasoning block and the row of the data.
    """

    answer: str | None
    truth: str
    reasoning: str = ""
    row: Mapping[str, Any] | None = None


class Outcome(NamedTuple):
    """Whether an answer is right. ``category``: how its program ended
    (``sandbox.tests.CATEGORIES``), or ``verifier_error``. Of a user's verifier: what it has
    ``logged``; its ``score`` in [0, 1] where that is the reward.
    """

    correct: bool
    category: str | None = None
    score: float | None = None
    logged: Mapping[str, Any] | None = None


def find_marker_after_box(content: bytes, marker: bytes) -> int | None:
    """Return, with several markers, the first one behind the last complete box: the answer and
    everything before it is reasoning even where the marker was only talked about. When no marker
    follows the last box, the last marker.
    """
    box = last_box(content)
    after = content.find(marker, box.end if box else 0)
    at = after if after >= 0 else content.rfind(marker)
    return at if at >= 0 else None


# An escaped brace (\\{) is not a brace of TeX's; an escaped backslash hides nothing behind it.
_TOKEN = re.compile(rb"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    """Offsets of a complete box: ``\\boxed{`` starts at ``start``, its content is ``[inner, end -
    1)``.
    """

    start: int
    inner: int
    end: int


def last_box(text: bytes) -> Box | None:
    """Return the complete box that opens last, or None. Linear, however many boxes stay open."""
    best: Box | None = None
    open_braces: list[tuple[int, int, bool]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == b"}":
            if open_braces:
                start, inner, boxed = open_braces.pop()
                if boxed and (best is None or start > best.start):
                    best = Box(start, inner, token.end())
        elif token[0].endswith(b"{") and token[0] != b"\\{":
            open_braces.append((token.start(), token.end(), token[0] != b"{"))
    return best


def extract_boxed(text: str) -> str | None:
    """Return the content of the complete box that opens last, None when there is none."""
    content = text.encode(errors="surrogatepass")
    box = last_box(content)
    return content[box.inner : box.end - 1].decode(errors="replace") if box else None


# A fence of three or more backticks or tildes on a line of its own, perhaps indented or quoted in a
# list. Possessive: a line that does not match must not be read again for each way to divide it.
_OPENING = re.compile(rb"([ \t]*+)(`{3,}+|~{3,}+)([^`\r\n]*+)\r?$")
_LANGUAGES = (
    b"",
    b"python",
    b"py",
    b"python2",
    b"python3",
    b"py3",
    b"cpython",
    b"pypy",
    b"pypy3",
)


@dataclass(frozen=True)
class Fence:
    """Bytes ``[start, end)`` of a fenced block, its fences included, and its lines without common
    indentation.
    """

    start: int
    end: int
    program: bytes


def last_fence(content: bytes) -> Fence | None:
    """Return the last complete block that is marked as Python or not marked at all.

    A block ends at a line with nothing but at least as many of the same character. An opening fence
    that is never closed opens nothing: blocks before it count. Blocks in other languages are passed
    over. Linear in the length.
    """
    block = None
    opening: tuple[int, bytes, bytes, bytes] | None = None
    body: list[bytes] = []
    at = 0
    for line in content.split(b"\n"):
        match = (
            _OPENING.match(line)
            if line.lstrip(b" \t")[:3] in (b"```", b"~~~")
            else None
        )
        if opening is not None:
            fence = match[2] if match and not match[3].strip(b" \t") else b""
            if fence[:1] == opening[2][:1] and len(fence) >= len(opening[2]):
                if opening[3] in _LANGUAGES:
                    block = Fence(
                        opening[0], min(at + len(line), len(content)), b"\n".join(body)
                    )
                opening = None
            else:
                body.append(_without(line.removesuffix(b"\r"), opening[1]))
        elif match:
            words = (
                match[3]
                .lower()
                .replace(b"{", b" ")
                .replace(b"}", b" ")
                .replace(b".", b" ")
                .split()
            )
            opening, body = (at, match[1], match[2], words[0] if words else b""), []
        at += len(line) + 1
    return block


def find_marker_after_program(content: bytes, marker: bytes) -> int | None:
    """Return the offset of the marker that opens the confidence block of a response with a program,
    None when there is none.

    The first marker behind the last complete block; else, when no marker follows a block, the last
    one before it. A marker inside the block is part of the program.
    """
    fence = last_fence(content)
    after = content.find(marker, fence.end if fence else 0)
    if after >= 0:
        return after
    before = content.rfind(marker, 0, fence.start) if fence else -1
    return before if before >= 0 else None


def extract_fenced(reasoning: str) -> str | None:
    """Return the last complete fenced program of a reasoning block, None when there is none."""
    fence = last_fence(reasoning.encode(errors="surrogatepass"))
    return None if fence is None else fence.program.decode(errors="surrogatepass")


def extract_program(response: str, marker: str = CONFIDENCE_TAG) -> str | None:
    """Return the same of a whole response. A block after the confidence line is not an answer: R
    does not depend on it.
    """
    content = response.encode(errors="surrogatepass")
    fence = last_fence(content[: find_marker_after_program(content, marker.encode())])
    return None if fence is None else fence.program.decode(errors="surrogatepass")


def _without(line: bytes, indentation: bytes) -> bytes:
    return (
        line[len(indentation) :]
        if line.startswith(indentation)
        else line.lstrip(b" \t")
    )


BOXED = AnswerForm("\\boxed", find_marker_after_box, extract_boxed)
FREE = AnswerForm(
    "", find_marker_after_box, extract_boxed
)  # of a user's verifier: whatever is reasoning is an answer
FENCED = AnswerForm("```", find_marker_after_program, extract_fenced)
