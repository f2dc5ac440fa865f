"""The boxed-answer verifier."""

from __future__ import annotations

import logging
import threading

import pytest

from megatron_dcpo.judging.math import extract_boxed, verify_math


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
def test_right(answer: str, key: str) -> None:
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


def test_other_threads_have_no_alarm_and_work(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bool] = []
    with caplog.at_level(logging.DEBUG):
        thread = threading.Thread(target=lambda: found.append(verify_math("\\boxed{0.25}", "\\frac{1}{4}")))
        thread.start()
        thread.join()
    assert found == [True]
    assert "timeout" not in caplog.text.lower()


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "100000000!"])
def test_an_answer_without_end_is_wrong(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dcpo.judging.math.TIMEOUT_SECONDS", 1)
    assert verify_math(f"\\boxed{{{answer}}}", "5") is False
