r"""Rewrite answers in one notation before math-verify reads them: text in, text out, no sympy.

math-verify errs on whole classes of spellings. Each class has a function here and tests in both
directions (``tests/unit/judging/test_latex.py``):

- Unicode symbols: ``2√3``, ``½``, ``−5``, ``x²`` become ``2\sqrt{3}``, ``\frac{1}{2}``, ``-5``,
  ``x^{2}``.
- Shorthand arguments: ``\frac43``, ``\frac\pi2``, ``\sqrt[3]2`` become ``\frac{4}{3}`` and so on,
  since TeX takes one token per argument.
- Digit grouping: ``1\,000``, ``10 000``, ``1{,}000``, ``1,000`` lose their separators; ``(1,000)``
  and ``1,00`` stay as they are.
- Degrees: ``\sin 30^\circ`` becomes ``\sin (\frac{(30)\pi}{180})``; a degree sign outside
  trigonometry is dropped.
- Trailing letters: ``2t`` becomes ``2{t}``, because math-verify would take ``t`` for a unit and
  drop it.

Every function is linear in the length of the text, up to a constant depth of braces, and accepts
any text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import partial

from megatron_dcpo.judging.math import plain_text

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

# three levels, deeper than answers nest within one argument
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_TOKEN = rf"(?:{_BRACES}|\\[A-Za-z]+|[0-9A-Za-z])"  # what TeX takes as one argument
_FRACTION = re.compile(rf"\\([dtc]?frac|[dt]?binom)\s*({_TOKEN})\s*({_TOKEN})(?=(\s*[0-9])?)")
_ROOT = re.compile(rf"\\sqrt\s*(\[[^\[\]{{}}]*\])?\s*({_TOKEN})(?=(\s*[0-9])?)")
_TIGHT_ROOT = re.compile(
    r"([√∛∜])\s*(\([^()]*\)|\{[^{}]*\}|[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[A-Za-z]+)?"
)

_THIN = r"(?:\\[,;:! ]|\\thinspace|~|\{,\}|\{\\,\}|,\\!|\{,\\!\})"
_THIN_GROUPS = re.compile(rf"(?<![0-9.])([0-9]{{1,3}})((?:{_THIN}\s*[0-9]{{3}})+)(?![0-9])")
_SPACED = re.compile(r"(\D{0,3})([0-9]{1,3}(?: [0-9]{3})+)(\.[0-9]+)?(\s*(?:\\?%|\\text\{.*\})?)")
_COMMAS = re.compile(
    r"((?:[A-Za-z]\s*=\s*)?[-+]?\s*\\?\$?\s*)([0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]+)?((?:\s*[^0-9,()\[\]]*)?)"
)

_DEGREE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])")
_DROPPED = re.compile(rf"(?<=[0-9A-Za-z)}}])(?:{_DEGREE.pattern})(?!\s*[0-9])")
_TRIGONOMETRY = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_OPERAND = re.compile(
    rf"([0-9]+(?:\.[0-9]+)?|\\frac{_BRACES}{_BRACES}|\([^()]*\)|{_BRACES}|\\[A-Za-z]+|[A-Za-z])$"
)
_TRAILING_LETTERS = re.compile(r"(?<![A-Za-z\\])((?<=[0-9}])(?:[a-zA-Z]|ab|bc|cc))$")
# full stops and TeX spaces; the last blank may have been stripped
_END = re.compile(r"(?:[.,;]|\\[,;:! ]|\\$|~|\s)+$")
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])")
_WRAPPERS = re.compile(
    r"\\(?:left|right)\."
    r"|\\(?:left|right|big|Big|bigg|Bigg)(?=[()\[\]|.]|\\[{}])|\\(?:displaystyle|limits)(?![A-Za-z])"
    r"|\\(?:textstyle|scriptstyle|tiny|scriptsize|footnotesize|small|normalsize)(?![A-Za-z])"
    r"|\\(?:scriptscriptstyle|large|Large|LARGE|huge|Huge|bf|it|sf|bfseries|boldmath)(?![A-Za-z])"
    r"|\\(?:rm|mathrm|mathbf|mathit|mathsf|mathtt)(?=\s*[0-9])|\\(?:text)?color\s*\{[A-Za-z]+\}"
)
# a font around a number; \mathbf{R} may be a set
_FONTS = re.compile(rf"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|pmb|underline)\s*({_BRACES})")
_BRACKETS_BY_NAME = {
    r"\{": (r"\lbrace",),
    r"\}": (r"\rbrace",),
    "(": (r"\langle", r"\lparen"),
    ")": (r"\rangle", r"\rparen"),
}
_INVISIBLE = re.compile(r"\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}")
_PERCENT = re.compile(r"(?:\s|~)*(?:\\text\s*\{\s*percent\s*\}|(?<=[0-9} ])percent(?![A-Za-z]))")
_INFINITY = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*[Ii]nfinity\s*\}")
_DESCENDS = re.compile(r">|\\(?:geq?|gt)(?:slant)?(?![A-Za-z])")
_TURNED = {">": "<", r"\gt": "<", r"\ge": r"\le ", r"\geq": r"\le "}
# what may stand before the only value of a box
_LEADING = re.compile(
    r"(?:\s*(?:\\text\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?:?\s*\}|[Aa]nswer:|="
    r"|\\(?:approx|thickapprox|simeq|sim|cong|doteq|therefore|Rightarrow|implies)"
    r"(?![A-Za-z])))+"
)


def spell_out(text: str) -> str:
    """Spell out everything except degree signs outside trigonometry, whose meaning depends on the
    other side.
    """
    text = without_relation(plain_symbols(_END.sub("", text.strip())))
    text = _ascending(_PERCENT.sub(r"\\%", text))
    text = _INFINITY.sub(r"\\infty ", text)
    text = plain_text.spell_out(_FONTS.sub(_plain_font, text))
    text = expand_arguments(text)
    text = _BLACKBOARD.sub(r"\\mathbb{\1}", text.replace(r"\varnothing", r"\emptyset"))
    return degrees_in_trigonometry(join_digits(without_sizes(text)).strip())


def without_commands(text: str) -> str:
    """Return the text without the names of commands."""
    return re.sub(r"\\[A-Za-z]+", " ", text)


def without_relation(text: str) -> str:
    r"""Return the text without the signs that it begins with: ``=4`` and ``\approx 4`` are 4."""
    match = _LEADING.match(text)
    rest = "" if match is None else text[match.end() :].strip()
    return rest or text


def _plain_font(match: re.Match[str]) -> str:
    return match[1] if any(character.isdecimal() for character in match[1]) else match[0]


def without_sizes(text: str) -> str:
    r"""Return the text without ``\left``, ``\right``, ``\big``, ``\displaystyle``, ``\Large``,
    ``\bf``, ``\color{red}``, ``\phantom{-}`` and fonts of a bare number (``\mathbf 4``), which do
    not change its meaning, and with brackets for their names.
    """
    for bracket, spellings in _BRACKETS_BY_NAME.items():
        for spelling in spellings:
            text = text.replace(spelling, bracket)
    return _INVISIBLE.sub("", _WRAPPERS.sub("", text))


def _ascending(text: str) -> str:
    r"""Return a chain of inequalities in rising order: ``2\le x<5`` of ``5>x\ge 2``."""
    signs = _DESCENDS.findall(text)
    if len(signs) != 2 or "<" in text or r"\le" in text.replace(r"\left", ""):
        return text
    first, middle, last = _DESCENDS.split(text)
    turned = [_TURNED.get(sign.removesuffix("slant"), sign) for sign in signs]
    return f"{last}{turned[1]}{middle}{turned[0]}{first}"


def plain_symbols(text: str) -> str:
    """Write Unicode mathematics as LaTeX. Compatibility characters (full-width digits, thin spaces)
    become plain ones.
    """
    if text.isascii():
        return text
    text = _TIGHT_ROOT.sub(_root_of, text)
    for command, characters in _SCRIPTS.items():
        text = re.sub(f"[{characters}]+", partial(_script, command), text)
    text = text.translate(_SYMBOL_TABLE)
    text = "".join(_vulgar_fraction(character) for character in text)
    return _plain(text).translate(_SYMBOL_TABLE)


def _root_of(match: re.Match[str]) -> str:
    command = _ROOTS[match[1]]
    inner = match[2] or ""
    if not inner:
        return command
    if inner[0] in "({":
        inner = inner[1:-1]
    return f"{command}{{{inner}}}"


def _script(command: str, match: re.Match[str]) -> str:
    return f"{command}{{{_plain(match[0])}}}"


def _vulgar_fraction(character: str) -> str:
    top, slash, bottom = unicodedata.normalize("NFKD", character).partition("⁄")
    if slash and top.isdecimal() and bottom.isdecimal():
        return rf"\frac{{{top}}}{{{bottom}}}"
    return character


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def expand_arguments(text: str) -> str:
    r"""Rewrite ``\frac43`` as ``\frac{4}{3}`` and ``\sqrt2`` as ``\sqrt{2}``, as TeX reads them,
    with one token per argument.

    A digit that follows directly is a factor and not a part of the argument: ``\frac123`` is one
    half times three.
    """
    # several passes: in \frac\sqrt2 2 the outer command matches once the inner one has braces
    for _ in range(3):
        expanded = _FRACTION.sub(_braced_fraction, _ROOT.sub(_braced_root, text))
        if expanded == text:
            break
        text = expanded
    return text


def _braced_root(match: re.Match[str]) -> str:
    return rf"\sqrt{match[1] or ''}{_brace(match[2])}" + _factor(match[2], match[3])


def _braced_fraction(match: re.Match[str]) -> str:
    if match[2] == r"\sqrt" or match[3] == r"\sqrt":
        return match[0]  # an argument without braces; TeX would not read this fraction either
    return rf"\{match[1].lstrip('dtc')}{_brace(match[2])}{_brace(match[3])}" + _factor(
        match[3], match[4]
    )


def _brace(token: str) -> str:
    return token if token.startswith("{") else f"{{{token}}}"


def _factor(last: str, following: str | None) -> str:
    """Return a product sign if a digit follows the last argument directly."""
    if not following or following[0].isspace() or last.startswith("{"):
        return ""
    return r"\cdot "


def join_digits(text: str) -> str:
    r"""Join the digit groups of a number.

    ``1\,000`` and ``1{,}000`` are joined anywhere, ``1 000`` and ``1,000`` only as the whole
    answer, because a comma or a space within brackets separates the members of a list or a tuple.
    Groups must have three digits: ``1,00`` stays.
    """
    text = _THIN_GROUPS.sub(lambda m: m[1] + re.sub(r"[^0-9]", "", m[2]), text)
    for pattern in (_SPACED, _COMMAS):
        whole = pattern.fullmatch(text)
        if whole:
            digits = re.sub(r"[ ,]", "", whole[2])
            decimals = whole[3] or ""
            text = whole[1] + digits + decimals + whole[4]
    return text


def has_degrees(text: str) -> bool:
    """Return whether a spelled-out text still has a degree sign."""
    return _DEGREE.search(text) is not None


def degrees_in_trigonometry(text: str) -> str:
    """Write degrees in radians if the text has a trigonometric function, since math-verify would
    drop the sign.
    """
    if not _TRIGONOMETRY.search(text):
        return text
    return degrees_to_radians(text)


def degrees_to_radians(text: str) -> str:
    """Write every angle in degrees as a fraction of pi."""
    parts = []
    rest = text
    while (sign := _DEGREE.search(rest)) is not None:
        before = rest[: sign.start()]
        rest = rest[sign.end() :]
        operand = _OPERAND.search(before)
        if operand is None:
            parts.append(before)
            continue
        angle = operand[1]
        if angle[0] == "{":
            angle = angle[1:-1]
        parts.append(before[: operand.start()] + rf"(\frac{{({angle})\pi}}{{180}})")
    return "".join([*parts, rest])


def drop_degrees(text: str) -> str:
    """Drop degree signs after a number, letter or bracket, but not between two numbers: ``201°60``
    is not 20160.
    """
    return _DROPPED.sub("", text)


def protect_letters(text: str) -> str:
    r"""Rewrite ``2t`` as ``2{t}``. math-verify takes a letter at the end for a unit (``t``, ``h``,
    ``m``, ``ab`` and so on) and drops it, but directly after a number or a brace it is a variable.
    ``5 m`` and ``5\text{ m}`` are still five.
    """
    return _TRAILING_LETTERS.sub(r"{\1}", text)
