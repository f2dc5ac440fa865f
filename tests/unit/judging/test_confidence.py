"""The strict confidence parser: every kind of malformed line under its own name."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo import codec
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.types import MALFORMED, Judgement

BOX = "so \\boxed{5}\n"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("<conf> Confidence: 0.83", 0.83),
        ("<conf>0.83", 0.83),
        ("<conf> confidence:.5", 0.5),
        ("<conf>\tCONFIDENCE : 1", 1.0),
        ("<conf> 1.0\n \n", 1.0),
        ("<conf> Confidence: 0", 0.0),
        ("<conf> 000.25", 0.25),
    ],
)
def test_a_well_formed_confidence_is_read(line: str, value: float) -> None:
    parsed = parse_confidence(BOX + line, finished=True)
    assert (parsed.confidence, parsed.status) == (value, "ok")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (BOX, "missing"),
        (BOX + "Confidence: 0.8", "missing"),
        (BOX + "<CONF> 0.8", "missing"),
        (BOX + "<conf> 0.8 <conf> 0.9", "multiple"),
        (BOX + "<conf><conf> 0.9", "multiple"),
        ("<conf> 0.8 \\boxed{5}", "before_box"),
        ("<conf> \\boxed{0.8", "before_box"),
        (BOX + "<conf>", "unparsable"),
        (BOX + "<conf> Confidence: high", "unparsable"),
        (BOX + "<conf> Confidence 0.8", "unparsable"),
        (BOX + "<conf> <0.8>", "unparsable"),
        (BOX + "<conf> +0.8", "unparsable"),
        (BOX + "<conf> nan", "unparsable"),
        (BOX + "<conf> inf", "unparsable"),
        (BOX + "<conf> ٠.٥", "unparsable"),
        (BOX + "<conf> \uff10.\uff15", "unparsable"),
        (BOX + "<conf>\u00a00.5", "unparsable"),
        (BOX + "<conf> ²", "unparsable"),
        (BOX + "<conf> 0.8 sure", "trailing_text"),
        (BOX + "<conf> 0.8.", "trailing_text"),
        (BOX + "<conf> 0.", "trailing_text"),
        (BOX + "<conf> 0..9", "trailing_text"),
        (BOX + "<conf> 0,83", "trailing_text"),
        (BOX + "<conf> 1e-3", "trailing_text"),
        (BOX + "<conf> 85%", "trailing_text"),
        (BOX + "<conf> 1/2", "trailing_text"),
        (BOX + "<conf> 0.5\u00a0", "trailing_text"),
        (BOX + "<conf> 0.5\ufffd", "trailing_text"),
        (BOX + "<conf> 0.5\x00", "trailing_text"),
        (BOX + "<conf> 0.8<|im_end|>", "trailing_text"),
        (BOX + "<conf> 85", "out_of_range"),
        (BOX + "<conf> 2.5", "out_of_range"),
        (BOX + "<conf> 1.0001", "out_of_range"),
        (BOX + "<conf> -0.3", "out_of_range"),
        (BOX + "<conf> -0", "out_of_range"),
        (BOX + "<conf> " + "9" * 5000, "out_of_range"),
    ],
)
def test_a_malformed_confidence_has_its_status(text: str, status: str) -> None:
    parsed = parse_confidence(text, finished=True)
    assert (parsed.confidence, parsed.status) == (None, status)


def test_the_number_as_written_is_kept_only_out_of_range_and_finite() -> None:
    assert parse_confidence(BOX + "<conf> 85", finished=True).stated == 85.0
    assert parse_confidence(BOX + "<conf> " + "9" * 5000, finished=True).stated is None
    assert parse_confidence(BOX + "<conf> 0.5", finished=True).stated is None


@pytest.mark.parametrize("zeros", [299, 300, 308, 309])
def test_a_number_that_was_kept_is_read_again(zeros: int) -> None:
    """A response with a longer one once made its whole file unreadable."""
    text = f"{BOX}<conf> 1{'0' * zeros}"
    parsed = parse_confidence(text, finished=True)
    assert parsed.status == "out_of_range"
    judgement = Judgement(
        prompt_id="p",
        correct=0.0,
        confidence=None,
        status=parsed.status,
        boundary=None,
        length=0,
        stated=parsed.stated,
    )
    assert codec.from_row(Judgement, codec.to_row(judgement)) == judgement


def test_an_unfinished_number_is_never_believed() -> None:
    """kills_truncation_taken_for_a_number: 0.8 may be the first half of 0.83, in every cut."""
    full = BOX + "<conf> Confidence: 0.83"
    for end in range(len(full) + 1):
        assert parse_confidence(full[:end], finished=False).status == "truncated"


def test_another_marker_is_read_alike() -> None:
    assert (
        parse_confidence("5 CONFIDENCE: 0.7", marker="CONFIDENCE:", finished=True).confidence == 0.7
    )
    assert parse_confidence("5 [c.] 0.7", marker="[c.]", finished=True).confidence == 0.7


@given(st.text(), st.booleans())
def test_every_text_has_a_status(text: str, finished: bool) -> None:
    for candidate in (text, "<conf>" + text, BOX + "<conf> Confidence: " + text):
        parsed = parse_confidence(candidate, finished=finished)
        assert (parsed.status == "ok") == (parsed.confidence is not None)
        assert parsed.status == "ok" or parsed.status in MALFORMED
        assert parsed.confidence is None or 0 <= parsed.confidence <= 1


@given(st.floats(0, 1))
def test_every_printed_confidence_is_read_back(c: float) -> None:
    text = f"{c:.17f}".rstrip("0")
    text += "0" if text.endswith(".") else ""
    assert parse_confidence(f"<conf> Confidence: {text}", finished=True).confidence == float(text)


@pytest.mark.parametrize(
    "text",
    [
        "<conf>" + "9" * 10**6,
        "<conf> 0." + "9" * 10**6,
        "<conf>" * 10**5,
        "<conf> " + " " * 10**6 + "x",
        "<conf> confidence" + " " * 10**6,
        "<con" * 10**6,
    ],
    ids=["digits", "decimals", "markers", "spaces", "word", "halves"],
)
def test_linear_time(text: str) -> None:
    start = time.perf_counter()
    parse_confidence(text, finished=True)
    assert time.perf_counter() - start < 5  # quadratic would take hours
