"""The splitter on sampled ids: real Qwen tokens, sentencepiece with byte fallback, and 200,000
fuzzed outputs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import Attempt, Outcome, last_box
from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.types import MALFORMED, Prompt, Response
from tests.helpers.judging import judge
from tests.helpers.tokenizers import EOS, byte_level, qwen, sentencepiece, table_of

MARKER = "<conf>"


def pieces_of(tokenizer: Callable[[], Tokenizer], text: str) -> tuple[list[int], TokenBytes]:
    return tokenizer().encode(text, add_special_tokens=False).ids, table_of(tokenizer)


# Text, the token that holds the first byte of the marker, whether it starts there.
STRADDLING = [
    ("\\boxed{5}<conf> 0.83", "}<", False),
    ("is 5.<conf> 0.83", ".<", False),
    ("\\boxed{5}\n<conf> 0.83", "<", True),
    ("\\boxed{5} <conf> 0.83", " <", False),
    ("<conf> 0.83", "<", True),
    ("größer 数学 🙂\n<conf> 0.83", "<", True),
]


@pytest.mark.parametrize(("text", "piece", "starts"), STRADDLING)
def test_qwen_straddling_token_stays_with_the_reasoning(
    text: str, piece: str, starts: bool
) -> None:
    """kills_boundary_off_by_one on the real tokenizer."""
    ids, tokens = pieces_of(qwen, text + EOS)
    eos = ids[-1]
    assert tokens[eos] == EOS.encode()
    split = split_blocks(ids, tokens, {eos}, MARKER)
    offset = text.encode().index(MARKER.encode())
    assert (split.marker, split.content, split.ended) == (offset, text.encode(), True)
    holder = split.boundary if starts else split.boundary - 1
    assert tokens[ids[holder]] == piece.encode()
    before = b"".join(tokens.pieces(ids[: split.boundary]))
    assert (before == text.encode()[:offset]) == starts
    assert len(before) - offset == (0 if starts else 1)


def test_qwen_marker_is_three_tokens_and_the_block_runs_through_eos() -> None:
    ids, tokens = pieces_of(qwen, "$$\\boxed{5}$$\n\n<conf> Confidence: 0.95" + EOS)
    split = split_blocks(ids, tokens, {ids[-1]}, MARKER)
    block = [piece.decode() for piece in tokens.pieces(ids[split.boundary :])]
    assert block[:3] == ["<", "conf", ">"]
    assert split.marker_end == split.boundary + 3
    assert block[-5:] == ["0", ".", "9", "5", EOS]


def test_qwen_bytes_are_the_text_they_decode_to() -> None:
    text = "x² + ½ = 数学 🙂\r\n\t<|im_start|> \u00ad \x7f"
    ids, tokens = pieces_of(qwen, text)
    assert b"".join(tokens.pieces(ids)) == text.encode()
    assert tokens[10**9] == tokens[-1] == b""


def test_sentencepiece_bytes_and_straddling() -> None:
    tokenizer, tokens = sentencepiece(), table_of(sentencepiece)
    index = tokenizer.token_to_id

    def ids(*names: str) -> list[int]:
        return [index(name) for name in names]

    text = ids(
        "\u2581",
        "\\boxed{5",
        "}<",
        "conf",
        ">",
        "\u2581Confidence",
        ":",
        "\u25810",
        ".8",
        "3",
        "</s>",
    )
    split = split_blocks(text, tokens, {index("</s>")}, MARKER)
    assert split.content == b" \\boxed{5}<conf> Confidence: 0.83"
    assert split.boundary == 3  # behind the straddling "}<"
    # kills_character_offsets: a token of three bytes, and a character of four tokens
    emoji = ids(
        "数", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0x0A>", "<conf>", "\u25810", ".8", "</s>"
    )
    split = split_blocks(emoji, tokens, {index("</s>")}, MARKER)
    assert (split.content, split.boundary) == ("数🙂\n<conf> 0.8".encode(), 6)
    # A marker spelled in fallback bytes is the same marker.
    spelled = ids("数", *(f"<0x{byte:02X}>" for byte in b"<conf>"), "\u25810", "</s>")
    assert split_blocks(spelled, tokens, {index("</s>")}, MARKER).boundary == 1


def test_sentencepiece_pieces_join_to_the_decoded_text() -> None:
    tokenizer, tokens = sentencepiece(), table_of(sentencepiece)
    ids = tokenizer.encode("a 🙂 5").ids
    assert b"".join(tokens.pieces(ids)).decode().removeprefix(" ") == tokenizer.decode(ids)


def test_unknown_tokenizers_are_refused() -> None:
    with pytest.raises(UserError, match=r"decoder \(none\)"):
        token_bytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        token_bytes(object())


def split_text(text: bytes, *, eos: bool = True) -> tuple[int, int]:
    """Boundary and length with a token per byte; EOS is 256."""
    tokens = TokenBytes((*(bytes([b]) for b in range(256)), EOS.encode()))
    ids = [*text, *([256] if eos else [])]
    return split_blocks(ids, tokens, {256}, MARKER).boundary, len(ids)


@pytest.mark.parametrize(
    ("text", "eos", "boundary"),
    [
        (b"ab<conf> 0.5", True, 2),
        (b"ab", True, 2),  # no marker: EOS alone
        (b"ab", False, 2),  # truncated: nothing
        (b"", True, 0),
        (b"", False, 0),
        (b"<conf> 0.5", True, 0),
        (b"ab<conf> 0.", False, 2),  # truncated inside the number
        (b"ab<con", False, 6),  # truncated inside the marker
        (b"<conf>, then \\boxed{5} <conf> 0.5 <conf> 1", True, 23),  # the first behind the last box
        (b"<conf> 1 <conf> 2 \\boxed{5}", True, 9),  # none behind it: the last
        (b"<conf> 1 <conf> 2", True, 0),  # no box: the first
        (b"<conf> 1 \\boxed{5} <conf> 2 \\boxed{6", True, 19),  # an open box is none
    ],
)
def test_the_boundary_is_where_the_marker_begins(text: bytes, eos: bool, boundary: int) -> None:
    assert split_text(text, eos=eos)[0] == boundary


def test_a_special_token_in_the_middle_contributes_its_content() -> None:
    tokens = table_of(byte_level)
    eos = byte_level().token_to_id(EOS)
    ids = [*byte_level().encode("a<conf> 0.5").ids, eos, *byte_level().encode("x").ids]
    split = split_blocks(ids, tokens, {eos}, MARKER)
    assert split.content.endswith(EOS.encode() + b"x")
    assert (split.boundary, split.ended) == (1, False)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (rb"\boxed{5}", b"5"),
        (rb"\boxed{1} then \boxed{2}", b"2"),
        (rb"\boxed{1} then \boxed{2", b"1"),
        (rb"\boxed{\frac{1}{2}}", rb"\frac{1}{2}"),
        (rb"\boxed{\boxed{5}}", b"5"),
        (rb"\boxed  {5}", b"5"),
        (rb"\boxed{\{1, 2\}}", rb"\{1, 2\}"),
        (rb"\boxed{\left\{ x \right.}", rb"\left\{ x \right."),
        (rb"} \boxed{5}", b"5"),
        (rb"{ \boxed{5}", b"5"),
        (rb"\\\boxed{5}", b"5"),
        (rb"\boxed{}", b""),
        (rb"\boxed 7", None),
        (rb"\boxed{5", None),
        (rb"\fbox{5}", None),
        (b"", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: bytes, content: bytes | None) -> None:
    box = last_box(text)
    assert (None if box is None else text[box.inner : box.end - 1]) == content


@pytest.mark.parametrize(
    "text", [rb"\boxed{" * 10**5, b"{" * 10**5, b"}" * 10**5, b"\\" * 10**5, b"\\boxed" * 10**5]
)
def test_last_box_is_linear(text: bytes) -> None:
    start = time.perf_counter()
    last_box(text)
    assert time.perf_counter() - start < 5  # quadratic would take hours


@pytest.mark.parametrize(
    ("tokenizer", "end_name"), [(byte_level, EOS), (sentencepiece, "</s>"), (qwen, EOS)]
)
@given(
    before=st.text(),
    middle=st.sampled_from(["", MARKER, "\\boxed{5}<conf> 0.5", "<conf", "数<conf>"]),
    after=st.text(),
    eos=st.booleans(),
)
def test_blocks_partition_every_text(
    tokenizer: Callable[[], Tokenizer],
    end_name: str,
    before: str,
    middle: str,
    after: str,
    eos: bool,
) -> None:
    """Disjoint, covering, and the block starts at the first token at or after the marker."""
    text = before + middle + after
    ids, tokens = pieces_of(tokenizer, text)
    end = tokenizer().token_to_id(end_name)
    ids += [end] if eos else []
    split = split_blocks(ids, tokens, {end}, MARKER)
    starts = np.cumsum([0, *map(len, tokens.pieces(ids))])[:-1]
    if split.marker is None:
        assert split.boundary == split.marker_end == len(ids) - split.ended
    else:
        assert split.content[split.marker :].startswith(MARKER.encode())
        assert (starts[: split.boundary] < split.marker).all()
        assert (starts[split.boundary :] >= split.marker).all()
        behind = split.marker + len(MARKER.encode())
        assert (starts[: split.marker_end] < behind).all()
        assert (starts[split.marker_end :] >= behind).all()


FRAGMENTS = [
    b"<conf>",
    b"<conf> Confidence: ",
    b"Confidence:",
    b"0.83",
    b"1",
    b"1.5",
    b"-0.2",
    b"9" * 400,
    b"85%",
    b"\\boxed{",
    b"\\boxed{5}",
    b"{",
    b"}",
    b"\\{",
    b"\\",
    b"<",
    b"conf",
    b">",
    b" ",
    b"\n",
    b"<|im_end|>",
    "٠.٥".encode(),
    "🙂".encode(),
    b"\xff",
    b"\xf0\x9f",
    b"\x00",
    b"nan",
    b"1e-3",
    b".",
    b"0,5",
    b"\\boxed",
]


def fuzzed(rng: Any) -> bytes:
    """Random bytes, or fragments of what a response is made of, cut anywhere."""
    if rng.random() < 0.2:
        return rng.bytes(int(rng.integers(0, 60)))  # type: ignore[no-any-return]
    text = b"".join(FRAGMENTS[i] for i in rng.integers(0, len(FRAGMENTS), int(rng.integers(0, 12))))
    if rng.random() < 0.4:
        text += b"\\boxed{5}\n<conf> Confidence: 0.%d" % rng.integers(0, 100)
    return text[: int(rng.integers(0, len(text) + 1))] if rng.random() < 0.3 else text


def same_text(attempts: Sequence[Attempt]) -> list[Outcome]:
    return [Outcome(a.answer == a.truth) for a in attempts]


def test_fuzzed_outputs_are_all_classified() -> None:
    """No exception, no c outside [0, 1], a partition, a status each. DCPO_FUZZ=200000 for the long
    run.
    """
    rng = np.random.default_rng(int(os.environ.get("DCPO_FUZZ_SEED", "0")))
    prompt = Prompt("p", (), (), "5", "math")
    seen: dict[str, int] = {}
    for count in range(int(os.environ.get("DCPO_FUZZ", "5000"))):
        if count % 1000 == 0:  # another vocabulary that cuts text anywhere, with tokens of no bytes
            cuts = [rng.bytes(int(rng.integers(0, 3))) for _ in range(100)]
            cuts += [
                b"".join(FRAGMENTS)[i : i + int(rng.integers(1, 4))]
                for i in rng.integers(0, 500, 200)
            ]
            tokens = TokenBytes((*(bytes([b]) for b in range(256)), *cuts, EOS.encode()))
            eos = len(tokens.table) - 1
            by_bytes = {piece: index for index, piece in enumerate(tokens.table) if piece}
        text = fuzzed(rng)
        ids, at = [], 0
        while at < len(
            text
        ):  # a random tokenisation: pieces of up to three bytes, some of no bytes at all
            size = int(rng.integers(1, 4))
            token = by_bytes.get(text[at : at + size])
            ids.append(text[at] if token is None else token)
            at += 1 if token is None else size
            if rng.random() < 0.02:
                ids.append(int(rng.integers(256, len(tokens.table) + 50)))
        finished = rng.random() < 0.7
        ids += [eos] if finished else []
        response = Response(
            "p",
            0,
            np.array(ids, dtype=np.int64),
            np.zeros(len(ids)),
            "stop" if finished else "length",
            0,
        )
        judged = judge(
            response,
            prompt,
            tokens,
            {eos},
            verifier=lambda attempts: [Outcome(a.answer == a.truth) for a in attempts],
        )
        assert judged.status == "ok" or judged.status in MALFORMED
        assert (judged.status == "ok") == (judged.confidence is not None)
        assert judged.confidence is None or 0 <= judged.confidence <= 1
        assert 0 <= judged.boundary <= judged.length == len(ids)
        assert judged.status != "ok" or judged.boundary < judged.length
        seen[judged.status] = seen.get(judged.status, 0) + 1
    assert set(seen) == {"ok", *MALFORMED}, seen
