r"""Decide whether two answers are equivalent: by normalization, then by their forms, then by
math-verify. The worker processes import this module, so it imports no torch.

math-verify is used as in OpenCompass' evaluator (LaTeX with the box first, first match, nothing
without an anchor; docs/bring_your_own.md), and the key is the first argument of ``verify``, as the
library documents it. That order decides what an equation may stand for: with the arguments
reversed, the answer ``1`` would pass for the key ``x^2 + y^2 = 1``. The reversed order is
tried only for inequalities and memberships: there it lets ``-1 < x < 2`` be ``(-1, 2)``.
"""

from __future__ import annotations

import cmath
import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megatron_dcpo.judging.math import answer_forms, latex, words

# characters of an answer or a key; keys are far shorter, and sympy's time grows with the length
MAX_ANSWER = 1_000

_INTEGER = re.compile(r"[+-]?[0-9]+")
_IN_MATH = re.compile(r"(?<!\\)\$")  # a key may bring its own delimiters; \$ is money
_EQUATION = re.compile(r"(?<![<>!\\])=")
_EQUALITY = re.compile(
    r"(?<![<>!\\])=|\\(?:approx|simeq|sim|cong|equiv|doteq|thickapprox)(?![A-Za-z])"
)
_ARITHMETIC = re.compile(
    r"(?:[0-9.+*/^(){}\[\]!\s-]|\\(?:frac|sqrt|cdot|times|div|pi|binom)(?![A-Za-z])|\\[ ,;:!])+"
)
_NAME = re.compile(r"\s*[A-Za-z]\s*")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|in)(?![A-Za-z])")
_IMAGINARY = re.compile(
    r"(?<![A-Za-z\\_{])i(?![A-Za-z])|(?<=[^A-Za-z]\{)i(?![A-Za-z])|\\sqrt\{\s*-|\\mathrm\{i\}"
)
# a decimal agrees with another number to these places, as for math-verify, and to the digits that
# the key gives; with a key without a decimal point, to this part of its value
_PLACES = 6
_PART = Fraction(2, 100_000)

for _name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
    # it reports every parse that does not use its timeout
    logging.getLogger(_name).setLevel(logging.CRITICAL)


def quick_verdict(answer: str, key: str) -> bool | None:
    """Return the verdict if it needs no algebra, None if it does. Takes microseconds and any text;
    never raises.
    """
    answer = answer.strip()
    key = key.strip()
    if not answer or not key:
        return False
    if answer == key:
        return True
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(key):
        # AIME keys are written 025
        return _canonical_integer(answer) == _canonical_integer(key)
    if max(len(answer), len(key)) > MAX_ANSWER:
        return False
    left = answer_forms.exact_number(answer)
    right = answer_forms.exact_number(key)
    if left is None or right is None:
        return None
    if left == right:
        return True
    if answer_forms.same_float(left, right, key):
        return True
    is_float = answer_forms.is_float(key, right)
    last_digit = None if is_float else answer_forms.last_place(key)
    if last_digit is not None:
        tolerance = last_digit / 2
    elif answer_forms.last_place(answer) is not None:
        tolerance = _PART * abs(right)
    else:  # two exact values
        return False
    alike = round(left, _PLACES) == round(right, _PLACES)
    return alike and abs(left - right) <= tolerance


def equivalent(answer: str, key: str) -> bool:
    """Return whether ``answer`` is equivalent to ``key``. An answer that sympy or the LaTeX grammar
    cannot take is not. This may take forever; call it in a process that can be interrupted.
    """
    try:
        return _equivalent(answer, key)
    except Exception:  # sympy raises almost anything: TypeError for C(5,2)
        return False


def _equivalent(answer: str, key: str) -> bool:
    quick = quick_verdict(answer, key)
    if quick is not None:
        return quick
    answer = answer_forms.without_base_ten(_undelimited(answer))
    key = answer_forms.without_base_ten(_undelimited(key))
    if answer == key:
        return bool(key)
    by_form = _verdict_of_forms(answer, key)
    if by_form is not None:
        return by_form
    given = words.measured(latex.spell_out(answer))
    wanted = words.measured(latex.spell_out(key))
    if words.differ(given, wanted):
        return False
    return _equal_values(given.number, wanted.number)


def _verdict_of_forms(answer: str, key: str) -> bool | None:
    """Return the verdict if what the answer or the key is decides: a name, a numeral, a set."""
    is_same_name = words.same_name(answer, key)
    if is_same_name is not None:
        return is_same_name
    if not answer_forms.is_well_formed(answer):
        return False
    answer_numeral = answer_forms.numeral(answer)
    key_numeral = answer_forms.numeral(key)
    if answer_numeral or key_numeral:
        return answer_numeral == key_numeral
    are_sets = {answer_forms.is_braced_set(answer), answer_forms.is_braced_set(key)}
    return False if are_sets == {True, False} else None


def _equal_values(left: str, right: str) -> bool:
    """Return whether two answers without units are equal."""
    if r"\pi" in left + right and latex.has_degrees(left) != latex.has_degrees(right):
        left = latex.degrees_to_radians(left)
        right = latex.degrees_to_radians(right)
    left = latex.protect_letters(latex.drop_degrees(left)).strip()
    right = latex.protect_letters(latex.drop_degrees(right)).strip()
    quick = quick_verdict(left, right)
    if quick is not None:
        return quick
    if _is_false_equation(left):
        return False
    sides = _EQUALITY.split(left)
    numbers = [side for side in sides if _ARITHMETIC.fullmatch(side)]
    if len(numbers) > 1 and all(side in numbers or _NAME.fullmatch(side) for side in sides):
        return any(_equal_values(number, right) for number in numbers)
    if left.endswith("%") != right.endswith("%"):
        return _percent_equal(left, right)
    if (r"\pm" in left) != (r"\pm" in right):
        left, right = _both_signs(left), _both_signs(right)
    left_ratio = answer_forms.ratio(left)
    right_ratio = answer_forms.ratio(right)
    if left_ratio or right_ratio:
        return _proportional(left, right, left_ratio, right_ratio)
    return _algebraically_equal(left, right)


def _is_false_equation(answer: str) -> bool:
    """Return whether an answer claims that different numbers are equal, as ``2+2=5`` and
    ``7\\approx 8`` do. Decimals may be rounded.
    """
    from sympy import Abs, Expr

    without_commas = _THOUSANDS.sub("", answer)
    for equation in without_commas.split(","):
        values = []
        tolerance = 1e-9
        sides = _EQUALITY.split(equation)
        for side in sides if len(sides) > 1 else ():
            if not _ARITHMETIC.fullmatch(side) or not any(map(str.isdecimal, side)):
                continue
            parsed = _parse(f"\\boxed{{{side}}}", box_first=True)
            if parsed and isinstance(parsed[0], Expr) and not parsed[0].free_symbols:
                values.append(parsed[0].evalf(15))
                tolerance = max(tolerance, float(answer_forms.last_place(side) or 0) * 0.51)
        for value in values[1:]:
            if Abs(value - values[0]) > tolerance * (1 + Abs(value)):
                return True
    return False


def _percent_equal(left: str, right: str) -> bool:
    """Return whether a percentage and a number are equal: ``10\\%`` is 10, and 0.1."""
    percent, number = (left, right) if left.endswith("%") else (right, left)
    percent = percent.removesuffix("%").removesuffix("\\").strip()
    hundredth = rf"\frac{{{percent}}}{{100}}"
    if answer_forms.last_place(percent) is not None:
        hundredth = f"{percent}e-2"
    return any(
        _equivalent(one, number) if left.endswith("%") else _equivalent(number, one)
        for one in (percent, hundredth)
    )


def _both_signs(text: str) -> str:
    r"""Return the two values of a text with one ``\pm``."""
    if text.count(r"\pm") != 1 or "," in text:
        return text
    return ",".join(text.replace(r"\pm", sign) for sign in "+-")


def _proportional(
    answer: str, key: str, left: tuple[str, ...] | None, right: tuple[str, ...] | None
) -> bool:
    if answer_forms.is_clock(answer) and answer_forms.is_clock(key):
        return False  # two times of day that are written differently
    if left is None or right is None:
        if left:
            parts = left
            single = key
        else:
            parts = right or ()
            single = answer
        if len(parts) != 2:
            return False
        return _algebraically_equal(_quotient(parts[0], parts[1]), single)
    if len(left) != len(right):
        return False
    for a, b in zip(left[1:], right[1:], strict=True):
        if not _algebraically_equal(_quotient(a, left[0]), _quotient(b, right[0])):
            return False
    return True


def _quotient(top: str, bottom: str) -> str:
    return rf"\frac{{{top}}}{{{bottom}}}"


def _algebraically_equal(answer: str, key: str) -> bool:
    from math_verify import verify

    from megatron_dcpo.judging.math import exact

    if answer == key:
        return True
    exact.compare_exactly()
    gold = _parse_key(key)
    predicted = _parse(f"\\boxed{{{answer}}}", box_first=True)
    if not gold or not predicted:
        return False
    if "%" not in answer + key and _clearly_apart(gold[0], predicted[0]):
        return False
    if verify(gold, predicted, timeout_seconds=None):
        return True
    both = answer + " " + key
    is_relation = _RELATION.search(both) and not _EQUATION.search(both)
    if is_relation and verify(predicted, gold, timeout_seconds=None):
        return True
    if not _IMAGINARY.search(both):
        return False
    return _complex_equal(gold[0], predicted[0])


def _clearly_apart(gold: object, predicted: object) -> bool:
    """Return whether two expressions in the same symbols differ at a point by far more than
    rounding.

    This avoids math-verify's ``simplify`` on most wrong answers, which takes most of its time.
    Percentages have their own rules, and ``i`` may be the imaginary unit, so both are left to the
    other checks.
    """
    from sympy import Derivative, Expr, Float, Integral, Limit, Product, Sum

    from megatron_dcpo.judging.math import exact

    if not (isinstance(gold, Expr) and isinstance(predicted, Expr)):
        return False
    if gold.free_symbols != predicted.free_symbols:
        return False
    for expression in (gold, predicted):
        unevaluated = expression.has(Derivative, Integral, Limit, Product, Sum)
        if not expression.is_commutative or unevaluated:
            return False
    point = exact.sample_point(gold, predicted)
    if point is None:
        return False
    gold_value = complex(gold.subs(point).evalf(15))
    predicted_value = complex(predicted.subs(point).evalf(15))
    if not cmath.isfinite(gold_value) or not cmath.isfinite(predicted_value):
        return False
    scale = max(1.0, abs(gold_value), abs(predicted_value))
    tolerance = 1e-8
    if gold.has(Float) or predicted.has(Float):
        tolerance = 1e-4
    return abs(gold_value - predicted_value) > tolerance * scale


def _complex_equal(gold: object, predicted: object) -> bool:
    """Return whether two numbers are equal as complex numbers, to 30 digits and not certainly
    unequal. False for expressions with free symbols, in which ``i`` may be an index.
    """
    from sympy import Basic, Expr, I

    from megatron_dcpo.judging.math import exact

    values = []
    for expression in (gold, predicted):
        if not isinstance(expression, Basic):
            return False
        units = [s for s in expression.free_symbols if s.name == "i"]
        value = expression.subs(dict.fromkeys(units, I)).doit()
        if not isinstance(value, Expr) or value.free_symbols:
            return False
        values.append(value)
    if exact.certainly_unequal(values[0], values[1]):
        return False
    difference = (values[0] - values[1]).evalf(30)
    scale = max(1.0, abs(complex(values[0].evalf(30))))
    return bool(abs(complex(difference)) < 1e-12 * scale)


@lru_cache(maxsize=4096)
def _parse_key(key: str) -> list[Any]:
    """Parse a key. It is cached, because a key is compared with all responses of its group."""
    if not _IN_MATH.search(key):
        key = f"${key}$"
    return _parse(key, box_first=False)


def _parse(text: str, *, box_first: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        boxed_match_priority=0 if box_first else 50, try_extract_without_anchor=not box_first
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
    r"""Return the text without sizes and without the ``$...$``, ``\(...\)`` or ``\[...\]`` around
    the whole of it. ``\$36`` is money and stays.
    """
    text = latex.without_sizes(text).strip()
    inner = text[1:-1]
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in inner:
        text = inner.strip()
    while text[:1] == "{" and text[-1:] == "}" and "{" not in text[1:-1].replace("\\{", ""):
        text = text[1:-1].strip()
    delimited = text[:2] + text[-2:] in (r"\(\)", r"\[\]")
    if delimited and len(text) > 4 and text[:2] not in text[2:]:
        text = text[2:-2].strip()
    return text


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    if text.startswith("-") and digits != "0":
        return "-" + digits
    return digits
