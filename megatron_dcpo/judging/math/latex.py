r"""Answers in one notation, before math-verify reads them: plain text in, plain text out, no sympy.

math-verify errs on whole classes of spellings. Each class has a function here and tests in both
directions (``tests/unit/judging/test_latex.py``):

| class | example | becomes |
|---|---|---|
| unicode symbols | ``2√3``, ``½``, ``−5``, ``x²`` | ``2\sqrt{3}``, ``\frac{1}{2}``, ``-5``,
``x^{2}`` |
| shorthand arguments | ``\frac43``, ``\frac\pi2``, ``\sqrt[3]2`` | ``\frac{4}{3}`` ... : TeX takes
one token per argument |
| number spacing | ``1\,000``, ``10 000``, ``1{,}000``, ``1,000`` | ``1000``; ``(1,000)`` and
``1,00`` stay as they are |
| degrees | ``\sin 30^\circ`` | ``\sin (\frac{(30)\pi}{180})``; a degree sign outside trigonometry
is dropped |
| trailing letters | ``2t`` | ``2{t}``: math-verify would take ``t`` for a unit and drop it |

Every function is linear in the length of the text, up to a constant depth of braces, and total.
"""

from __future__ import annotations

import re
import unicodedata
from functools import partial

_SYMBOLS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "‑": "-",
    "﹣": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "•": r"\cdot ",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "°": r"^{\circ}",
    "º": r"^{\circ}",
    "˚": r"^{\circ}",
    "∶": ":",
    "：": ":",
    "，": ",",
    "％": r"\%",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "′": "'",
    "…": r"\ldots ",
    "π": r"\pi ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "δ": r"\delta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "σ": r"\sigma ",
    "τ": r"\tau ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "ε": r"\epsilon ",
    "ρ": r"\rho ",
    "Δ": r"\Delta ",
    "Ω": r"\Omega ",
    "Σ": r"\Sigma ",
    "Γ": r"\Gamma ",
}
_SYMBOL_TABLE = str.maketrans(_SYMBOLS)
_SCRIPTS = {"^": "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "_": "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"}
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}

# three levels, more than answers nest inside one argument
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_TOKEN = rf"(?:{_BRACES}|\\[A-Za-z]+|[0-9A-Za-z])"  # what TeX takes as one argument
_FRACTION = re.compile(
    rf"\\([dtc]?frac|[dt]?binom)\s*({_TOKEN})\s*({_TOKEN})(?=(\s*[0-9])?)"
)
_ROOT = re.compile(rf"\\sqrt\s*(\[[^\[\]{{}}]*\])?\s*({_TOKEN})(?=(\s*[0-9])?)")
_TIGHT_ROOT = re.compile(
    r"([√∛∜])\s*(\([^()]*\)|\{[^{}]*\}|[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[A-Za-z]+)?"
)

_THIN = r"(?:\\[,;:! ]|\\thinspace|~|\{,\}|\{\\,\}|,\\!|\{,\\!\})"
_THIN_GROUPS = re.compile(
    rf"(?<![0-9.])([0-9]{{1,3}})((?:{_THIN}\s*[0-9]{{3}})+)(?![0-9])"
)
_SPACED = re.compile(
    r"(\D{0,3})([0-9]{1,3}(?: [0-9]{3})+)(\.[0-9]+)?(\s*(?:\\?%|\\text\{.*\})?)"
)
_COMMAS = re.compile(
    r"((?:[A-Za-z]\s*=\s*)?[-+]?\s*\\?\$?\s*)([0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]+)?((?:\s*[^0-9,()\[\]]*)?)"
)

_DEGREE = re.compile(
    r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"
)
_DROPPED = re.compile(rf"(?<=[0-9A-Za-z)}}])(?:{_DEGREE.pattern})(?!\s*[0-9])")
_TRIGONOMETRY = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_OPERAND = re.compile(
    rf"([0-9]+(?:\.[0-9]+)?|\\frac{_BRACES}{_BRACES}|\([^()]*\)|{_BRACES}|\\[A-Za-z]+|[A-Za-z])$"
)
_TRAILING_LETTERS = re.compile(r"(?<![A-Za-z\\])((?<=[0-9}])(?:[a-zA-Z]|ab|bc|cc))$")
_END = re.compile(
    r"(?:[.,;]|\\[,;:! ]|\\$|~|\s)+$"
)  # full stops and TeX spaces; the last blank may be stripped off
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])")
_WRAPPERS = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg)(?=[()\[\]|.]|\\[{}])|\\(?:displaystyle|limits)(?![A-Za-z])"
)


def spell_out(text: str) -> str:
    """Spell out everything but what a degree sign outside trigonometry means, which depends on the
    other side.
    """
    text = expand_arguments(plain_symbols(_END.sub("", text.strip())))
    text = _BLACKBOARD.sub(r"\\mathbb{\1}", text.replace(r"\varnothing", r"\emptyset"))
    return degrees_in_trigonometry(join_digits(without_sizes(text)).strip())


def without_sizes(text: str) -> str:
    r"""Return the text without ``\left``, ``\right``, ``\big`` and ``\displaystyle``, which change
    no meaning.
    """
    return _WRAPPERS.sub("", text)


def plain_symbols(text: str) -> str:
    """Write Unicode mathematics as LaTeX. Compatibility forms (full-width digits, thin spaces)
    become their plain ones.
    """
    if text.isascii():
        return text
    text = _TIGHT_ROOT.sub(_root_of, text)
    for command, characters in _SCRIPTS.items():
        text = re.sub(f"[{characters}]+", partial(_script, command), text)
    return _plain(
        "".join(map(_vulgar_fraction, text.translate(_SYMBOL_TABLE)))
    ).translate(_SYMBOL_TABLE)


def _root_of(match: re.Match[str]) -> str:
    inner = match[2] or ""
    return _ROOTS[match[1]] + (
        f"{{{inner[1:-1] if inner[0] in '({' else inner}}}" if inner else ""
    )


def _script(command: str, match: re.Match[str]) -> str:
    return f"{command}{{{_plain(match[0])}}}"


def _vulgar_fraction(character: str) -> str:
    top, slash, bottom = unicodedata.normalize("NFKD", character).partition("⁄")
    return (
        rf"\frac{{{top}}}{{{bottom}}}"
        if slash and top.isdecimal() and bottom.isdecimal()
        else character
    )


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def expand_arguments(text: str) -> str:
    r"""Rewrite ``\frac43`` to ``\frac{4}{3}``, ``\sqrt2`` to ``\sqrt{2}``, as TeX reads them: one
    token per argument.

    A digit that follows directly is a factor, not a part of the argument: ``\frac123`` is one half
    times three.
    """
    for _ in range(
        3
        # a command that is an argument itself, \frac\sqrt2 2, is found once the inner one has
        # braces
    ):
        expanded = _FRACTION.sub(_braced_fraction, _ROOT.sub(_braced_root, text))
        if expanded == text:
            break
        text = expanded
    return text


def _braced_root(match: re.Match[str]) -> str:
    return rf"\sqrt{match[1] or ''}{_brace(match[2])}" + _factor(match[2], match[3])


def _braced_fraction(match: re.Match[str]) -> str:
    if match[2] == r"\sqrt" or match[3] == r"\sqrt":
        return match[0]  # its argument is not braced: no fraction TeX would read either
    return rf"\{match[1].lstrip('dtc')}{_brace(match[2])}{_brace(match[3])}" + _factor(
        match[3], match[4]
    )


def _brace(token: str) -> str:
    return token if token.startswith("{") else f"{{{token}}}"


def _factor(last: str, following: str | None) -> str:
    return (
        r"\cdot "
        if following and not following[0].isspace() and not last.startswith("{")
        else ""
    )


def join_digits(text: str) -> str:
    r"""Join thousands written apart to one number.

    ``1\,000`` and ``1{,}000`` anywhere; ``1 000`` and ``1,000`` only as the whole answer, because a
    comma or a space between brackets separates the members of a list or a tuple. Groups must have
    three digits: ``1,00`` stays.
    """
    text = _THIN_GROUPS.sub(lambda m: m[1] + re.sub(r"[^0-9]", "", m[2]), text)
    for pattern in (_SPACED, _COMMAS):
        whole = pattern.fullmatch(text)
        if whole:
            text = (
                whole[1] + re.sub(r"[ ,]", "", whole[2]) + (whole[3] or "") + whole[4]
            )
    return text


def has_degrees(text: str) -> bool:
    """Return whether a degree sign is left in a spelled-out text."""
    return _DEGREE.search(text) is not None


def degrees_in_trigonometry(text: str) -> str:
    """Write arguments of trigonometric functions that are given in degrees in radians: math-verify
    would drop the sign.
    """
    return degrees_to_radians(text) if _TRIGONOMETRY.search(text) else text


def degrees_to_radians(text: str) -> str:
    parts, rest = [], text
    while (sign := _DEGREE.search(rest)) is not None:
        before, rest = rest[: sign.start()], rest[sign.end() :]
        operand = _OPERAND.search(before)
        if operand is None:
            parts.append(before)
            continue
        angle = operand[1][1:-1] if operand[1][0] == "{" else operand[1]
        parts.append(before[: operand.start()] + rf"(\frac{{({angle})\pi}}{{180}})")
    return "".join([*parts, rest])


def drop_degrees(text: str) -> str:
    """Move a sign that stands behind something, but not between two numbers: ``201°60`` is no
    20160.
    """
    return _DROPPED.sub("", text)


def protect_letters(text: str) -> str:
    r"""Rewrite ``2t`` to ``2{t}``. math-verify takes a letter at the end for a unit (``t``, ``h``,
    ``m``, ``ab`` ...) and drops it; directly behind a number or a brace it is a variable. ``5 m``
    and ``5\text{ m}`` still are five.
    """
    return _TRAILING_LETTERS.sub(r"{\1}", text)
