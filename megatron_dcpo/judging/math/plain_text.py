r"""Rewrite mathematics that was typed without LaTeX: text in, text out, no sympy.

math-verify reads ``2pi`` as ``2 \cdot p \cdot i``.

- Mixed numbers: ``1 1/2`` becomes ``1\frac{1}{2}``.
- Names: ``2pi``, ``sqrt(13)``, ``sin(30)``, ``infinity`` become LaTeX commands.
- Products and powers: ``3 * x``, ``2**3`` become ``3\cdot x``, ``2^3``.

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
