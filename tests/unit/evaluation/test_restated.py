"""Answers with another confidence: demonstrations that ``dcpo sft`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.restated import (
    NUMBER_WEIGHT,
    check_asked,
    restated,
    write_restated,
)
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.judging.confidence import number_span, parse_confidence
from tests.helpers.evaluated import changed, make_sample

MARKER = "<conf>"
TEXTS = (
    "So \\boxed{6}\n<conf> Confidence: 0.95",
    "So 0.5, \\boxed{6}.\n<conf>.7\n",
    "\\boxed{6} <conf>CONFIDENCE : 1 \n ",
)


def sample(text: str, **fields: object) -> Sample:
    return make_sample(problem="2*3=", text=text, status="ok", **fields)


@pytest.mark.parametrize("text", TEXTS)
def test_the_number_alone_is_another(text: str) -> None:
    found = restated(sample(text, posthoc_confidence=0.4166), MARKER)
    assert found is not None
    begin, end = number_span(text)
    assert found["prompt"] == "2*3="
    assert found["response"] == f"{text[:begin]}0.42{text[end:]}"
    assert parse_confidence(found["response"], finished=True).confidence == 0.42
    (span,) = found["spans"]
    assert found["response"][span["start"] : span["end"]] == "0.42"
    assert span["weight"] == NUMBER_WEIGHT


def test_answers_without_a_number_or_a_confidence_are_left_out(tmp_path: Path) -> None:
    samples = [
        sample(TEXTS[0], posthoc_confidence=0.5),
        sample(TEXTS[0], posthoc_confidence=None),
        changed(sample(TEXTS[0], posthoc_confidence=0.5), status="missing", confidence=None),
    ]
    path = tmp_path / "rows.jsonl"
    assert write_restated(samples, path, MARKER) == 1
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row == restated(samples[0], MARKER)


def test_a_tag_in_the_thinking_stays() -> None:
    thinking = "<think>I shall end with <conf> Confidence: 0.10</think>"
    text = f"{thinking}\\boxed{{6}}\n<conf> Confidence: 0.95"
    found = restated(
        sample(text, posthoc_confidence=0.5, thinking_characters=len(thinking)), MARKER
    )
    assert found is not None
    assert found["response"] == f"{thinking}\\boxed{{6}}\n<conf> Confidence: 0.50"
    (span,) = found["spans"]
    assert found["response"][span["start"] : span["end"]] == "0.50"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{6}",
        "\\boxed{6}\n<conf> none",
        "\\boxed{6}\n<conf> Confidence: 0.2\n<conf> Confidence: 0.3",
        "caf\ufffd \\boxed{6}\n<conf> Confidence: 0.95",
    ],
)
def test_a_text_that_was_edited_or_lost_bytes_is_left_out(text: str) -> None:
    assert restated(sample(text, posthoc_confidence=0.5), MARKER) is None


@pytest.mark.parametrize(
    ("template", "marker", "fields", "refused"),
    [
        ("paper", MARKER, {}, False),
        ("raw", "[sure]", {"form": "choice"}, False),
        ("paper", MARKER, {"form": "choice"}, True),
        ("paper", "[sure]", {}, True),
    ],
)
def test_answers_to_prompts_that_supervised_training_does_not_make_are_refused(
    template: str, marker: str, fields: dict[str, str], refused: bool
) -> None:
    asked = [sample(TEXTS[0], prompt_id="toy/3", **fields)]
    if not refused:
        check_asked(asked, template, marker)
        return
    with pytest.raises(UserError, match="toy/3"):
        check_asked(asked, template, marker)
