r"""How a response marks its answer: with a box for mathematics, with a fenced block for programs.

The confidence line follows the answer, so the form of the answer decides where the confidence block
begins. A box is ``\boxed{...}`` with matching braces, found in one pass; a program is the last
complete fenced block of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dcpo.types import CONFIDENCE_TAG


class AnswerForm(NamedTuple):
    """How answers are marked. ``opener`` is the text that begins an answer; if it is empty, any
    text is an answer. ``find_marker(content, marker)`` returns the offset of the marker that opens
    the confidence block, and ``extract(reasoning)`` the answer; both return None if there is none.
    """

    opener: str
    find_marker: Callable[[bytes, bytes], int | None]
    extract: Callable[[str], str | None]


class Attempt(NamedTuple):
    """The input of a verifier: the answer that was read, its ground truth, and for a user's
    verifier the whole reasoning block and the row of the data; and the ``verdict`` of an agent,
    if it gave one.
    """

    answer: str | None
    truth: str
    reasoning: str = ""
    row: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None


class Outcome(NamedTuple):
    """Whether an answer is right. The ``category`` says how its program ended
    (``sandbox.tests.CATEGORIES``). A user's verifier also has the values
    that it ``logged``, and a ``score`` in [0, 1] if the score is the reward.
    """

    correct: bool
    category: str | None = None
    score: float | None = None
    logged: Mapping[str, Any] | None = None


# returns the outcomes in the order of the attempts, None for what could not be judged
Verifier = Callable[[Sequence[Attempt]], Sequence[Outcome | None]]


def find_marker_after_box(content: bytes, marker: bytes) -> int | None:
    """Return the offset of the first marker after the last complete box, or of the last marker if
    none follows the box; None if there is no marker.

    The answer and everything before it is reasoning, even if it mentions the marker.
    """
    box = last_box(content)
    at = content.find(marker, box.end if box else 0)
    if at < 0:
        at = content.rfind(marker)
    return at if at >= 0 else None


# An escaped brace (\\{) does not group in TeX; an escaped backslash does not escape what follows.
_TOKEN = re.compile(rb"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    """Offsets of a complete box: ``\\boxed{`` begins at ``start``, and the content is
    ``[inner, end - 1)``.
    """

    start: int
    inner: int
    end: int


def last_box(text: bytes) -> Box | None:
    """Return the complete box that opens last, or None. Linear even if many boxes stay open."""
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
    """Return the content of the complete box that opens last, None if there is none."""
    content = text.encode(errors="surrogatepass")
    box = last_box(content)
    if box is None:
        return None
    return content[box.inner : box.end - 1].decode(errors="replace")


# A fence of three or more backticks or tildes on a line of its own, perhaps indented, as in a list.
# The quantifiers are possessive, so that a line that does not match is not read again for each way
# to divide it.
_OPENING = re.compile(rb"([ \t]*+)(`{3,}+|~{3,}+)([^`\r\n]*+)\r?$")
_LANGUAGES = (b"", b"python", b"py", b"python2", b"python3", b"py3", b"cpython", b"pypy", b"pypy3")


_AS_SPACES = bytes.maketrans(b"{}.", b"   ")


class _Opening(NamedTuple):
    """An opening fence: its offset, its indentation, the fence itself and the language."""

    start: int
    indentation: bytes
    fence: bytes
    language: bytes


@dataclass(frozen=True)
class Fence:
    """A fenced block: the bytes ``[start, end)`` including its fences, and its lines without the
    indentation of the fence.
    """

    start: int
    end: int
    program: bytes


def last_fence(content: bytes) -> Fence | None:
    """Return the last complete block that is marked as Python or not marked at all.

    A block ends at a line that holds only the character of its opening fence, at least as many
    times. An opening fence that is never closed opens nothing, and the blocks before it count.
    Blocks in other languages are skipped. Linear in the length.
    """
    block = None
    opening: _Opening | None = None
    body: list[bytes] = []
    at = 0
    for line in content.split(b"\n"):
        match = None
        if line.lstrip(b" \t")[:3] in (b"```", b"~~~"):
            match = _OPENING.match(line)
        if opening is not None:
            fence = match[2] if match and not match[3].strip(b" \t") else b""
            if fence[:1] == opening.fence[:1] and len(fence) >= len(opening.fence):
                if opening.language in _LANGUAGES:
                    end = min(at + len(line), len(content))
                    block = Fence(opening.start, end, b"\n".join(body))
                opening = None
            else:
                body.append(_without(line.removesuffix(b"\r"), opening.indentation))
        elif match:
            language = _language(match[3])
            opening = _Opening(at, match[1], match[2], language)
            body = []
        at += len(line) + 1
    return block


def _language(info: bytes) -> bytes:
    """Return the first word after an opening fence, in lower case; b"" if there is none."""
    words = info.lower().translate(_AS_SPACES).split()
    return words[0] if words else b""


def find_marker_after_program(content: bytes, marker: bytes) -> int | None:
    """Return the offset of the marker that opens the confidence block of a response with a program,
    None if there is none.

    This is the first marker after the last complete block, or the last one before the block if none
    follows it. A marker inside the block is part of the program.
    """
    fence = last_fence(content)
    after = content.find(marker, fence.end if fence else 0)
    if after >= 0:
        return after
    if fence is None:
        return None
    before = content.rfind(marker, 0, fence.start)
    return before if before >= 0 else None


def extract_fenced(reasoning: str) -> str | None:
    """Return the last complete fenced program of a reasoning block, None if there is none."""
    fence = last_fence(reasoning.encode(errors="surrogatepass"))
    return None if fence is None else fence.program.decode(errors="surrogatepass")


def extract_program(response: str, marker: str = CONFIDENCE_TAG) -> str | None:
    """Return the last complete fenced program of a whole response. A block after the confidence
    line is not an answer, and R does not depend on it.
    """
    content = response.encode(errors="surrogatepass")
    fence = last_fence(content[: find_marker_after_program(content, marker.encode())])
    return None if fence is None else fence.program.decode(errors="surrogatepass")


def _without(line: bytes, indentation: bytes) -> bytes:
    if line.startswith(indentation):
        return line[len(indentation) :]
    return line.lstrip(b" \t")


BOXED = AnswerForm("\\boxed", find_marker_after_box, extract_boxed)
# for a user's verifier: the whole reasoning block is an answer
FREE = AnswerForm("", find_marker_after_box, extract_boxed)
FENCED = AnswerForm("```", find_marker_after_program, extract_fenced)
