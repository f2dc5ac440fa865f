"""Tell exact values apart at any size.

math-verify finds two values equal if their difference is less than 1e-15, and two decimals if they
agree to six places, however small the values are: ``2^{-2016}`` passes for ``2^{-2017}``. Here the
difference of exact values is computed exactly, or to as many digits as show that it is not zero.
The worker processes import this module, which imports sympy.
"""

from __future__ import annotations

from fractions import Fraction

from math_verify import grader
from sympy import (
    Add,
    Derivative,
    Expr,
    Float,
    Integer,
    Integral,
    Limit,
    Mul,
    Pow,
    Product,
    Rational,
    Sum,
    UnevaluatedExpr,
    binomial,
    factorial,
)

# larger fractions are compared by their digits: 2^18 bits are 79,000 decimal digits
LARGEST_BITS = 1 << 18
LARGEST_FACTORIAL = 20_000
# of the numbers whose difference may be zero
DIGITS = 2_000
# of decimals within lists and expressions, whose last digit is not known
DECIMAL_TOLERANCE = Fraction(2, 100_000)

_UNEVALUATED = (Derivative, Integral, Limit, Product, Sum)
_PERCENT = UnevaluatedExpr(Rational(1, 100))
_library_numeric_eq = grader.sympy_numeric_eq


def compare_exactly() -> None:
    """Let math-verify, wherever it finds two numbers equal by their digits (also within sets,
    tuples, intervals and relations), ask :func:`certainly_unequal` as well.
    """
    grader.sympy_numeric_eq = _numeric_eq


def _numeric_eq(a: object, b: object, float_rounding: int, numeric_precision: int) -> bool:
    """Return what ``grader.sympy_numeric_eq`` returns, but False for values that differ."""
    if not _library_numeric_eq(a, b, float_rounding, numeric_precision):
        return False
    return not certainly_unequal(a, b)


def certainly_unequal(a: object, b: object) -> bool:
    """Return whether two expressions certainly have different values: exact ones if their
    difference is not zero, those with a decimal if they differ by more than
    :data:`DECIMAL_TOLERANCE` of the larger one.

    Expressions with symbols are compared at one point. False if that is not known, as for integrals
    and matrices.
    """
    if not isinstance(a, Expr) or not isinstance(b, Expr):
        return False
    if a.has(_PERCENT) or b.has(_PERCENT):
        return _percentages_differ(a, b)
    if not (a.is_commutative and b.is_commutative):
        return False
    if a.has(*_UNEVALUATED) or b.has(*_UNEVALUATED):
        return False
    point = sample_point(a, b)
    if point is None:
        return False
    if point:
        return _values_differ(a.subs(point), b.subs(point))
    return _values_differ(a, b)


def _values_differ(a: Expr, b: Expr) -> bool:
    """Return whether two expressions without symbols certainly differ."""
    if a.has(Float) or b.has(Float):
        return _decimals_differ(_decimals_as_fractions(a), _decimals_as_fractions(b))
    left = _fraction(a)
    right = _fraction(b)
    if left is not None and right is not None:
        return left != right
    return _difference_is_not_zero(a, b)


def _percentages_differ(a: Expr, b: Expr) -> bool:
    r"""Return whether values, of which one is a percentage at least, certainly differ. ``10\%``
    may stand for ten and for a tenth, as for math-verify.
    """
    left = grader.get_pct_val(a)
    right = grader.get_pct_val(b)
    if left is not None and right is not None:
        return certainly_unequal(left, right)
    number = right if left is None else left
    other = a if left is None else b
    # a percentage within an expression
    if not isinstance(number, Expr) or number.has(_PERCENT) or other.has(_PERCENT):
        return False
    hundredth = Mul(number, Rational(1, 100), evaluate=False)
    return certainly_unequal(number, other) and certainly_unequal(hundredth, other)


def sample_point(a: Expr, b: Expr) -> dict[Expr, Expr] | None:
    """Return a rational value for each symbol of two expressions, None where a symbol may be a
    constant (``i``, ``e``) or is none of numbers.
    """
    symbols = a.free_symbols | b.free_symbols
    point: dict[Expr, Expr] = {}
    for n, symbol in enumerate(sorted(symbols, key=str)):
        if not symbol.is_Symbol or symbol.name in "iIeE":
            return None
        point[symbol] = Rational(7 + 4 * n, 5 + 2 * n) + Integer(n)
    return point


def _decimals_as_fractions(expression: Expr) -> Expr:
    """Return the expression with each decimal as the fraction that its digits say."""
    decimals = expression.atoms(Float)
    return expression.xreplace({value: Rational(str(value)) for value in decimals})


def _fraction(expression: Expr) -> Fraction | None:
    """Return the value of an expression of integers, sums, products, whole powers, factorials and
    binomial coefficients; None for any other, and for one of more than :data:`LARGEST_BITS`.
    """
    if isinstance(expression, Rational):
        return Fraction(int(expression.p), int(expression.q))
    parts = [_fraction(argument) for argument in expression.args]
    if not parts or any(part is None for part in parts):
        return None
    values = [part for part in parts if part is not None]
    value = _combined(expression, values)
    if value is None or _bits(value) > LARGEST_BITS:
        return None
    return value


def _combined(expression: Expr, values: list[Fraction]) -> Fraction | None:
    if isinstance(expression, Add):
        return sum(values, start=Fraction(0))
    if isinstance(expression, Mul):
        product = Fraction(1)
        for value in values:
            product *= value
            if _bits(product) > LARGEST_BITS:
                return None
        return product
    if isinstance(expression, Pow):
        return _power(*values)
    if isinstance(expression, UnevaluatedExpr):
        return values[0]
    if isinstance(expression, factorial | binomial):
        if not all(0 <= value <= LARGEST_FACTORIAL for value in values):
            return None
        if any(value.denominator != 1 for value in values):
            return None
        result = expression.func(*[int(value) for value in values])
        return Fraction(int(result))
    return None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        return None
    if abs(exponent) * _bits(base) > LARGEST_BITS:
        return None
    return Fraction(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _difference_is_not_zero(a: Expr, b: Expr) -> bool:
    """Return whether the first digits of the difference were found, among the first
    :data:`DIGITS` of the values.
    """
    difference = Add(a, Mul(Integer(-1), b, evaluate=False), evaluate=False)
    try:
        value = difference.evalf(2, maxn=DIGITS, strict=True)
    except Exception:  # all of these digits cancel, or sympy cannot evaluate it
        return False
    return bool(value.is_number and value.is_finite and value.is_zero is False)


def _decimals_differ(a: Expr, b: Expr) -> bool:
    """Return whether two values differ by more than :data:`DECIMAL_TOLERANCE`."""
    left = _fraction(a)
    right = _fraction(b)
    if left is not None and right is not None:
        return abs(left - right) > DECIMAL_TOLERANCE * max(abs(left), abs(right))
    try:
        first = a.evalf(20)
        second = b.evalf(20)
        tolerance = Rational(DECIMAL_TOLERANCE) * max(abs(first), abs(second))
        return bool(abs(first - second) > tolerance)
    except Exception:  # sympy cannot evaluate or order them
        return False
