r"""Rewrite mathematics that was typed without LaTeX: text in, text out, no sympy.

math-verify reads ``2pi`` as ``2 \cdot p \cdot i`` and drops only the words for units that it knows.

- Mixed numbers: ``1 1/2`` becomes ``1\frac{1}{2}``.
- Names: ``2pi``, ``sqrt(13)``, ``sin(30)``, ``infinity`` become LaTeX commands.
- Products and powers: ``3 * x``, ``2**3`` become ``3\cdot x``, ``2^3``.
- Words after a number (``2000 calories``) are its unit (:func:`split_unit`), unless they say
  something of its size or of other numbers (``5 million``, ``5 or 6``).

Every function is linear in the length of the text, up to a constant depth of brackets, and accepts
any text.
"""

from __future__ import annotations

import re

# commands whose argument is text or a name already
_AS_IT_IS = re.compile(r"(\\(?:text[a-z]*|math[a-z]+|mbox|operatorname\*?|rm|bf)\s*\{[^{}]*\})")
_SPACE = r"(?:\s|~|\\[ ,;:!])"
_MIXED = re.compile(rf"(?<![0-9./^_}}\\])([0-9]+){_SPACE}+([1-9][0-9]*)\s*/\s*([0-9]+)(?![0-9.])")
_WORD_START = r"(?<![A-Za-z\\])"
_PI = re.compile(rf"{_WORD_START}pi(?![A-Za-z])")
_INFINITY = re.compile(rf"{_WORD_START}(?:infinity|infty|inf)(?![A-Za-z])")
# two levels of brackets below those of the root
_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ROOT = re.compile(
    rf"{_WORD_START}(sqrt|cbrt)\s*({_BRACKETS}|(?=\{{)|[0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z]))"
)
# a second (5 sec) is no secant: a function has an argument
_FUNCTION = re.compile(
    rf"{_WORD_START}(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp)"
    r"(?=\s*[(^_\\{0-9]|\s+[a-z](?![A-Za-z]))"
)
_PRODUCT = re.compile(r"(?<=[0-9A-Za-z)}])\s*\*\s*(?=[0-9A-Za-z(\\])")
_POWER = re.compile(r"(?<=[0-9A-Za-z)}])\s*\*\*\s*(?=[0-9A-Za-z({\\-])")

_UNIT_WORDS = re.compile(rf"(.*[0-9)}}]){_SPACE}+([A-Za-z]+(?: +[A-Za-z]+)*)", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
# after a number these change what it says
_NUMBER_WORDS = (
    "half third quarter halves thirds quarters fourths fifths sixths sevenths eighths ninths "
    "tenths hundredths thousandths tens hundred hundreds thousand thousands million millions "
    "billion billions trillion dozen dozens percent squared cubed below negative"
)
_CONNECTIVES = (
    "and or nor to mod modulo remainder if when where for by from than less more greater between "
    "is are not only no none with without except times plus minus over divided choose factorial "
    "base"
)
_TIMES_OF_DAY = "am pm ad bc bce ce st nd rd th"
_NAMES = "pi e i sqrt infinity log ln exp sin cos tan cot sec csc"
_NOT_UNITS = frozenset(f"{_NUMBER_WORDS} {_CONNECTIVES} {_TIMES_OF_DAY} {_NAMES}".split())


def spell_out(text: str) -> str:
    """Return the text with mixed numbers, names and products as LaTeX writes them."""
    pieces = _AS_IT_IS.split(text)
    # every second piece is a command with its argument
    pieces[::2] = [_spell_out_piece(piece) for piece in pieces[::2]]
    return "".join(pieces)


def _spell_out_piece(text: str) -> str:
    text = _MIXED.sub(_mixed, text)
    text = _POWER.sub("^", text)
    text = _ROOT.sub(_root, text)
    text = _PI.sub(r"\\pi ", text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    return _PRODUCT.sub(r"\\cdot ", text)


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    # 1 3/2 is not a mixed number
    if (len(top), top) >= (len(bottom), bottom):
        return match[0]
    return rf"{whole}\frac{{{top}}}{{{bottom}}}"


def _root(match: re.Match[str]) -> str:
    command = r"\sqrt" if match[1] == "sqrt" else r"\sqrt[3]"
    radicand = match[2]
    if radicand.startswith("("):
        radicand = radicand[1:-1]
    if not radicand:  # braces follow
        return command
    # of a root within the root
    radicand = _ROOT.sub(_root, radicand)
    return f"{command}{{{radicand}}}"


def split_unit(text: str) -> tuple[str, str]:
    """Return a number and the words after it: ``2000`` and ``calories``. The words are empty, and
    the text is whole, if it is not a number that words follow.
    """
    match = _UNIT_WORDS.fullmatch(text.strip())
    if match is None:
        return text, ""
    number = match[1]
    words = match[2].lower().split()
    is_number = not re.search("[A-Za-z]", _COMMAND.sub("", number))
    # a single letter may be a variable
    if not is_number or len(words[-1]) == 1 or not _NOT_UNITS.isdisjoint(words):
        return text, ""
    return number, " ".join(words)
