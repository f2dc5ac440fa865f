"""What of a growing text is withheld: nothing that can no longer become a confidence block, and all
of what becomes one.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.serving.streamed_choice import safe_length

MARKER = "<conf>"
PIECES = st.sampled_from(
    (
        *("<conf>", "<con", "<", " ", "\n", "Confidence", "confidence:", ":", "x"),
        *("0.8", ".5", "-1", "1", "0.", "\\boxed{6}", "é", "<conf> Confidence: 0.83"),
    )
)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("no tag", 6),
        ("a < b", 5),
        ("a <", 2),
        ("a <con", 2),
        ("a <conx", 7),
        ("a <conf>", 2),
        ("a <conf> \n Confi", 2),
        ("a <conf> CONFIDENCE : 0.", 2),
        ("a <conf> 0.83 \n", 2),
        ("a <conf> very", 13),
        ("a <conf> Confidence 0", 21),
        ("a <conf> 0.8 x <conf> .", 15),
        ("a <conf> 0.8 <conf>", 13),
        # with backtracking, minutes
        ("<conf>" + " " * 200_000 + "x", 200_007),
        ("<conf> Confidence:" + "\n" * 200_000 + "x", 200_019),
    ],
)
def test_safe_length(text: str, safe: int) -> None:
    assert safe_length(text, MARKER) == safe


@given(pieces=st.lists(PIECES, max_size=8), size=st.integers(1, 9))
@example(pieces=["<con", "<conf>", "0.8"], size=1)
def test_a_well_formed_block_is_withheld_to_its_first_character(
    pieces: list[str], size: int
) -> None:
    """Whatever the text and however it is cut, what was shown before the end is a prefix of what
    the whole answer shows.
    """
    text = "".join(pieces)
    sent = 0
    for end in range(size, len(text) + size, size):
        grown = text[sent:end]
        sent += safe_length(grown, MARKER)
    parsed = parse_confidence(text, finished=True)
    if parsed.status == "ok":
        assert sent == text.rfind(MARKER)
    assert sent <= len(text)
