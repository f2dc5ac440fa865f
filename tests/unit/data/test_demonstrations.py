"""Rows of a data file as demonstrations: their tokens, their weights, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.data.datasets import PromptOptions
from megatron_dcpo.data.demonstrations import Demonstration, load_demonstrations
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.tokens import load_tokenizer
from tests.helpers.paths import QUICKSTART

TOKENIZER = load_tokenizer(QUICKSTART / "policy")
RAW = PromptOptions(template="raw")


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    path: Path, *rows: dict[str, Any], options: PromptOptions = RAW, **other: Any
) -> list[Demonstration]:
    return load_demonstrations(
        written(path / "rows.jsonl", *rows),
        TOKENIZER,
        options,
        max_length=other.get("max_length", 100),
        reading=RowOptions(columns=other.get("columns", {})),
    )


def text(ids: Any) -> str:
    return str(TOKENIZER.decode(list(ids)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2*3=", "response": "6"},
        {"problem": "2*3=", "solution": "6"},
        {"question": "2*3=", "answer": "6", "other": None},
        {
            "messages": [
                {"role": "user", "content": "2*3="},
                {"role": "assistant", "content": [{"type": "text", "text": "6"}]},
            ]
        },
        {
            "prompt": [{"role": "user", "content": "2*3="}],
            "completion": [{"role": "assistant", "content": "6"}],
        },
    ],
)
def test_every_form_of_a_row_is_the_same_demonstration(tmp_path: Path, row: dict[str, Any]) -> None:
    (one,) = load(tmp_path, row)
    assert text(one.prompt.token_ids) == "2*3="
    assert one.response_ids.tolist() == [
        *TOKENIZER.encode("6", add_special_tokens=False),
        TOKENIZER.eos_token_id,
    ]
    assert one.weights.tolist() == [1.0, 1.0]


def test_columns_are_named(tmp_path: Path) -> None:
    row = {"a": "2*3=", "b": "6", "prompt": "no", "response": "no", "messages": "no"}
    (one,) = load(tmp_path, row, columns={"problem": "a", "response": "b"})
    assert text(one.prompt.token_ids) == "2*3="
    with pytest.raises(UserError, match=r"row 1 .*'c'.*data\.columns"):
        load(tmp_path, row, columns={"problem": "c"})


def test_spans_are_in_characters_and_the_last_one_counts(tmp_path: Path) -> None:
    response = "44 \\boxed{44}\n<conf> Confidence: 0.83"
    start = response.index("<conf>")
    spans = [
        {"start": 0, "end": len(response), "weight": 0.0},
        {"start": start, "end": len(response), "weight": 2.0},
    ]
    row = {"prompt": "1*44=", "response": response, "weight": 3, "spans": spans}
    (one,) = load(tmp_path, row)
    weighted = text(one.response_ids[one.weights > 0])
    assert weighted == "<conf> Confidence: 0.83<|endoftext|>"
    assert set(one.weights.tolist()) == {0.0, 6.0}


def test_what_is_left_out_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "2*3=", "response": "6"}
    turns = [{"role": role, "content": "7"} for role in ("user", "assistant", "user", "assistant")]
    with caplog.at_level(logging.WARNING):
        kept = load(
            tmp_path, row, row | {"response": "6" * 200}, row | {"weight": 0}, {"messages": turns}
        )
    assert len(kept) == 2
    assert text(kept[1].prompt.token_ids) == "7\n\n7\n\n7", "the earlier turns"
    assert sorted(message.split(": ")[1][:6] for message in caplog.messages) == [
        "1 chat",
        "1 rows",
        "1 rows",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2*3="},
        {"prompt": "2*3=", "response": ""},
        {"prompt": "2*3=", "response": 6},
        {"prompt": "2*3=", "response": "6", "weight": -1},
        {"prompt": "2*3=", "response": "6", "weight": "1"},
        {"prompt": "2*3=", "response": "6", "spans": [[0, 1, 0.0]]},
        {"prompt": "2*3=", "response": "6", "spans": [{"start": 0, "end": 2, "weight": 1}]},
        {"messages": [{"role": "user", "content": "2*3="}]},
        {"messages": [{"role": "assistant", "content": "6"}]},
        {
            "messages": [
                {"role": "user", "content": "2*3="},
                {"role": "assistant", "content": "6", "weight": "much"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
                {"role": "assistant", "content": "6"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "2*3="},
                {"role": "assistant", "content": "", "tool_calls": [{}]},
            ]
        },
    ],
)
def test_what_is_no_demonstration_is_refused_by_its_row(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    good = {"prompt": "2*3=", "response": "6"}
    with pytest.raises(UserError, match="row 2"):
        load(tmp_path, good, row)


def test_the_digest_sees_weights(tmp_path: Path) -> None:
    row = {"prompt": "2*3=", "response": "6"}
    (one,) = load(tmp_path, row)
    (other,) = load(tmp_path, row | {"weight": 2})
    (same,) = load(tmp_path, row)
    assert one.digest() == same.digest() != other.digest()
    assert np.array_equal(one.response_ids, other.response_ids)
