r"""Are two answers the same? Normalization, then shapes, then math-verify. Imported by the worker
processes: no torch.

math-verify is used as OpenCompass' evaluator uses it (LaTeX with the box first, first match,
nothing without an anchor; docs/evaluation.md#the-verifier), with the key as ``verify``'s first
argument as the library documents it. That order decides what an equation may stand for: with the
arguments reversed, the answer ``1`` would pass for the key ``x^2 + y^2 = 1``. The reversed order is
tried only for inequalities and memberships: there it lets ``-1 < x < 2`` be ``(-1, 2)``.
"""

from __future__ import annotations

import cmath
import logging
import math
import re
from functools import lru_cache
from typing import Any

from megatron_dcpo.judging.math import answer_forms, latex

# characters of an answer or a key; no key is near it, and sympy's time grows with what it is fed
MAX_ANSWER = 1_000

_INTEGER = re.compile(r"[+-]?[0-9]+")
_IN_MATH = re.compile(r"(?<!\\)\$")  # a key may bring its own delimiters; \$ is money
_EQUATION = re.compile(r"(?<![<>!\\])=")
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|in)(?![A-Za-z])")
_IMAGINARY = re.compile(
    r"(?<![A-Za-z\\_{])i(?![A-Za-z])|(?<=[^A-Za-z]\{)i(?![A-Za-z])|\\sqrt\{\s*-|\\mathrm\{i\}"
)
# plain numbers that far apart cannot be equal by math-verify's rounding to six digits
_APART = 1e-4

for _name in (
    "math_verify",
    "math_verify.parser",
    "math_verify.grader",
    "math_verify.utils",
):
    logging.getLogger(_name).setLevel(
        logging.CRITICAL
    )  # it reports every parse without a timeout of its own


def quick_verdict(answer: str, key: str) -> bool | None:
    """Return the verdict where no algebra is needed, None where it is. Microseconds; any text;
    never raises.
    """
    answer, key = answer.strip(), key.strip()
    if not answer or not key:
        return False
    if answer == key:
        return True
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(key):
        return _canonical_integer(answer) == _canonical_integer(
            key
        )  # AIME keys are written 025
    if max(len(answer), len(key)) > MAX_ANSWER:
        return False
    left, right = answer_forms.exact_number(answer), answer_forms.exact_number(key)
    if left is not None and right is not None:
        if left == right:
            return True
        if abs(left - right) > _APART:
            return False
    return None


def equivalent(answer: str, key: str) -> bool:
    """Return whether ``answer`` is ``key`` in another form. May take for ever: call it where it can
    be interrupted.
    """
    quick = quick_verdict(answer, key)
    if quick is not None:
        return quick
    answer, key = (
        answer_forms.without_base_ten(_undelimited(text)) for text in (answer, key)
    )
    if answer == key:
        return bool(key)
    if not answer_forms.is_well_formed(answer):
        return False
    numerals = answer_forms.numeral(answer), answer_forms.numeral(key)
    if any(numerals):
        return numerals[0] == numerals[1]
    if answer_forms.units_differ(answer, key) or {
        answer_forms.is_braced_set(answer),
        answer_forms.is_braced_set(key),
    } == {True, False}:
        return False
    left, right = latex.spell_out(answer), latex.spell_out(key)
    if r"\pi" in left + right and latex.has_degrees(left) != latex.has_degrees(right):
        left, right = latex.degrees_to_radians(left), latex.degrees_to_radians(right)
    left, right = (
        latex.protect_letters(latex.drop_degrees(text)).strip()
        for text in (left, right)
    )
    quick = quick_verdict(left, right)
    if quick is not None:
        return quick
    left_ratio = answer_forms.ratio(left)
    right_ratio = answer_forms.ratio(right)
    if left_ratio or right_ratio:
        return _proportional(left, right, left_ratio, right_ratio)
    return _algebraically_equal(left, right)


def _proportional(
    answer: str, key: str, left: tuple[str, ...] | None, right: tuple[str, ...] | None
) -> bool:
    if answer_forms.is_clock(answer) and answer_forms.is_clock(key):
        return False  # two times of day that are written differently
    if left is None or right is None:
        parts, single = (left, key) if left else (right or (), answer)
        return len(parts) == 2 and _algebraically_equal(
            _quotient(parts[0], parts[1]), single
        )
    return len(left) == len(right) and all(
        _algebraically_equal(_quotient(a, left[0]), _quotient(b, right[0]))
        for a, b in zip(left[1:], right[1:], strict=True)
    )


def _quotient(top: str, bottom: str) -> str:
    return rf"\frac{{{top}}}{{{bottom}}}"


def _algebraically_equal(answer: str, key: str) -> bool:
    from math_verify import verify

    if answer == key:
        return True
    gold = _parse_key(key)
    predicted = _parse(f"\\boxed{{{answer}}}", box_first=True)
    if not gold or not predicted:
        return False
    if "%" not in answer + key and _clearly_apart(gold[0], predicted[0]):
        return False
    if verify(gold, predicted, timeout_seconds=None):
        return True
    relation = _RELATION.search(answer + " " + key) and not _EQUATION.search(
        answer + " " + key
    )
    if relation and verify(predicted, gold, timeout_seconds=None):
        return True
    return bool(_IMAGINARY.search(answer + " " + key)) and _complex_equal(
        gold[0], predicted[0]
    )


def _clearly_apart(gold: object, predicted: object) -> bool:
    """Return whether two expressions in the same symbols differ at a point, by far more than
    rounding.

    Spares math-verify's ``simplify`` on most wrong answers, which is where its time goes.
    Percentages have rules of their own, and ``i`` may be the imaginary unit: those are left to the
    rest.
    """
    from sympy import Expr, Float, Integer, Rational

    if not (isinstance(gold, Expr) and isinstance(predicted, Expr)):
        return False
    symbols = gold.free_symbols
    if symbols != predicted.free_symbols or any(
        not s.is_Symbol or s.name in "iIeE" for s in symbols
    ):
        return False
    if any(
        not part.is_commutative or part.has(_unevaluated())
        for part in (gold, predicted)
    ):
        return False
    ordered = sorted(symbols, key=str)
    point = {
        symbol: Rational(7 + 4 * n, 5 + 2 * n) + Integer(n)
        for n, symbol in enumerate(ordered)
    }
    values = [
        complex(expression.subs(point).evalf(15)) for expression in (gold, predicted)
    ]
    scale = (
        max(1.0, *map(abs, values)) if all(map(cmath.isfinite, values)) else math.nan
    )
    rounded = any(expression.has(Float) for expression in (gold, predicted))
    return abs(values[0] - values[1]) > (1e-4 if rounded else 1e-8) * scale


def _unevaluated() -> tuple[Any, ...]:
    from sympy import Derivative, Integral, Limit, Product, Sum

    return Derivative, Integral, Limit, Product, Sum


def _complex_equal(gold: object, predicted: object) -> bool:
    """Return whether they are equal as complex numbers, to 30 digits. Only for numbers: with a free
    symbol ``i`` may be an index.
    """
    from sympy import Basic, Expr, I

    values = []
    for expression in (gold, predicted):
        if not isinstance(expression, Basic):
            return False
        value = expression.subs(
            {s: I for s in expression.free_symbols if s.name == "i"}
        ).doit()
        if not isinstance(value, Expr) or value.free_symbols:
            return False
        values.append(value)
    difference = (values[0] - values[1]).evalf(30)
    scale = max(1.0, abs(complex(values[0].evalf(30))))
    return bool(abs(complex(difference)) < 1e-12 * scale)


@lru_cache(maxsize=4096)
def _parse_key(key: str) -> list[Any]:
    """Parse a key, which is judged against G responses, once."""
    return _parse(key if _IN_MATH.search(key) else f"${key}$", box_first=False)


def _parse(text: str, *, box_first: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        boxed_match_priority=0 if box_first else 50,
        try_extract_without_anchor=not box_first,
    )
    expression = () if box_first else (ExprExtractionConfig(),)
    parsed: list[Any] = parse(
        text,
        extraction_config=[latex, *expression],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return parsed


def _undelimited(text: str) -> str:
    r"""Return the text without the ``$...$``, ``\(...\)`` or ``\[...\]`` around the whole of it and
    without sizes. ``\$36`` is money and stays.
    """
    text = latex.without_sizes(text).strip()
    inner = text[1:-1]
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in inner:
        text = inner.strip()
    if (
        text[:2] + text[-2:] in (r"\(\)", r"\[\]")
        and len(text) > 4
        and text[:2] not in text[2:]
    ):
        text = text[2:-2].strip()
    return text


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits
