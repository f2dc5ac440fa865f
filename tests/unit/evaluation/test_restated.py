"""Answers with another confidence: demonstrations that ``dcpo sft`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.evaluation.restated import NUMBER_WEIGHT, restated, write_restated
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
