"""The boxed-answer verifier."""

from __future__ import annotations

import threading

import pytest

from megatron_dcpo.judging.answers import Attempt, extract_boxed
from megatron_dcpo.judging.math.equivalence import equivalent
from megatron_dcpo.judging.math.pool import verify_answers


def verify_many(pairs: list[tuple[str, str]]) -> list[bool]:
    """The judge's way from (text before the confidence, key) to right or wrong."""
    return [
        outcome.correct
        for outcome in verify_answers([Attempt(extract_boxed(text), key) for text, key in pairs])
    ]


def verify_math(text: str, key: str) -> bool:
    return verify_many([(text, key)])[0]


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ("5", "5"),
        (" 5 ", "5"),
        ("1/2", r"\frac{1}{2}"),
        (r"\frac43", r"\frac{4}{3}"),
        (r"\dfrac{3}{4}", r"\frac{3}{4}"),
        ("0.25", r"\frac{1}{4}"),
        ("1,000", "1000"),
        ("x=5", "5"),
        (r"5\text{ cm}", "5"),
        (r"90^\circ", "90"),
        ("025", "25"),
        ("25", "025"),
        ("-07", "-7"),
        ("0" * 5000, "0"),
        ("(1,2)", "(1, 2)"),
        (r"\{2,1\}", r"\{1,2\}"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
        ("5", "$5$"),
        (r"\$36.00", r"\$36"),
        ("32348", r"\$32,\!348"),
        (r"\frac{\sqrt 2}{2}", r"\frac{1}{\sqrt{2}}"),
    ],
)
def test_equal_answers_are_right(answer: str, key: str) -> None:
    assert verify_math(f"so \\boxed{{{answer}}}.", key)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("the answer is 5", "5"),
        ("\\boxed{5", "5"),
        ("\\boxed 5", "5"),
        ("\\boxed{}", ""),
        ("\\boxed{}", "5"),
        ("\\boxed{6}", "5"),
        ("\\boxed{5} no, \\boxed{6}", "5"),
        ("\\boxed{" + "1" * 5000 + "}", "1"),
        ("\\boxed{" + "(" * 3000 + "}", "5"),
        ("\\boxed{\\frac{1}{}}", "5"),
        ("\\boxed{\ud800}", "5"),
        ("\\boxed{\x00}", "5"),
        ("\\boxed{5}", ""),
        ("", "5"),
    ],
)
def test_wrong_and_never_raises(text: str, key: str) -> None:
    assert verify_math(text, key) is False


def test_the_last_complete_box_is_read() -> None:
    assert extract_boxed("\\boxed{1} or \\boxed{2} or \\boxed{3") == "2"
    assert extract_boxed("nothing") is None


def test_many_keep_their_order_and_repeat() -> None:
    pairs = [
        ("\\boxed{1/2}", "0.5"),
        ("none", "5"),
        ("\\boxed{x+1}", "1+x"),
        ("\\boxed{x+1}", "1-x"),
    ] * 3
    assert verify_many(pairs) == [True, False, True, False] * 3
    assert verify_many([]) == []


def test_other_threads_work() -> None:
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(verify_math("\\boxed{0.25x}", "\\frac{x}{4}"))
    )
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    ("answer", "key", "right"),
    [
        ("0.3", "0.30000000000000004", True),
        ("4.1", "4.1000000000000005", True),
        (r"\frac{2}{3}", "0.6666666666666666", True),
        (r"\frac{100}{3}", "33.333333333333336", True),
        ("0.666667", "0.6666666666666666", True),
        ("0.1", "0.10000000149011612", True),  # of 32 bits
        ("3", "2.9999999999999996", True),
        ("0.667", "0.6666666666666666", False),
        ("33.34", "33.333333333333336", False),
        ("0.31", "0.30000000000000004", False),
        (r"\frac13", "0.33333334", True),  # of 32 bits, as NumPy prints them
        ("2.2", "2.1999998", True),
        (r"\frac{2}{3}", "0.6666667", True),
        ("0.3333335", "0.33333334", False),
        ("2.19999", "2.1999998", False),
        ("3.1415926", "3.1415928", False),
        ("12345.67", "12345.678", False),
        ("6.884", "6.88", False),
    ],
)
def test_keys_of_a_float_computation_are_the_number_they_stand_for(
    answer: str, key: str, right: bool
) -> None:
    assert equivalent(answer, key) is right


@pytest.mark.parametrize(
    "box",
    [
        r"{\bf 4}",
        r"\mathbf{4}",
        r"\boldsymbol{4}",
        r"\Large 4",
        r"{\large 4}",
        "=4",
        "= 4",
        r"\approx 4",
        r"\sim 4",
        r"\therefore 4",
        r"\textstyle 4",
        r"\scriptscriptstyle 4",
        r"\rm 4",
        r"\mathbf 4",
        r"\color{red} 4",
        r"\left. 4 \right.",
        r"= \approx 4",
    ],
)
def test_fonts_sizes_and_signs_before_a_number(box: str) -> None:
    """math-verify 0.9 reads all of them as 4, but \\boldsymbol."""
    assert equivalent(box, "4")
    assert equivalent("4", box)
    assert not equivalent(box, "5")
