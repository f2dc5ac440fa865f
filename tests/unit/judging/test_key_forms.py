"""What is said at the start of the keys of mathematics."""

from __future__ import annotations

import logging

import pytest

from megatron_dcpo.judging.math.key_forms import form_of_key, report_keys


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("42", "number"),
        (r"\frac{1}{2}\text{ cm}", "number"),
        ("x^2+1", "expression"),
        (r"\{1,2\}", "set"),
        ("2024-01-05", "date"),
        ("3-2", "span"),
        ("listen", "word"),
        (r"\text{Sunday}", "word"),
        ("True", "truth value"),
        ("We see that the answer must be odd", "sentence"),
        ("First, x = 2.\nSo 5.", "worked solution"),
        (r"\frac{1}{2", "unreadable key"),
        ("1" * 2000 + "x", "unreadable key"),
    ],
)
def test_forms(key: str, form: str) -> None:
    assert form_of_key(key) == form


def test_keys_that_no_answer_equals_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report_keys(["1", "x+1", "1,2"], "a.jsonl")
        assert not caplog.messages
        report_keys(["1", "2", "listen", "So x.\nThus 5."], "a.jsonl")
    (said,) = caplog.messages
    assert "2 number ('1')" in said
    assert "1 word ('listen')" in said
    assert "no answer equals 1 of them" in said
