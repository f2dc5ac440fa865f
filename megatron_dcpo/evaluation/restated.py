"""Answers of a model with another confidence in place of the one that they state: demonstrations
for ``dcpo sft``, from which the model learns to state it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.judging.confidence import number_span
from megatron_dcpo.runtime.files import write_atomically

# The weight of the number's tokens in the loss. The answer's tokens have 1: they are learned too,
# since learning what the model itself has written keeps it.
NUMBER_WEIGHT = 3.0


def restated(sample: Sample, marker: str) -> dict[str, Any] | None:
    """Return a demonstration (``prompt``, ``response``, ``spans``) of a sample whose number is its
    ``posthoc_confidence``; None if it has none, or states none in the form that is read.
    """
    confidence = sample.measures.posthoc_confidence
    text = sample.response.text
    if confidence is None or text is None or sample.judgement.status != "ok":
        return None
    begin, end = number_span(text, marker)
    number = f"{confidence:.2f}"
    span = {"start": begin, "end": begin + len(number), "weight": NUMBER_WEIGHT}
    return {
        "prompt": sample.prompt.problem,
        "response": f"{text[:begin]}{number}{text[end:]}",
        "spans": [span],
    }


def write_restated(samples: Iterable[Sample], path: Path, marker: str) -> int:
    """Write a demonstration for every sample that has one; return their number."""
    rows = [row for sample in samples if (row := restated(sample, marker)) is not None]
    lines = (json.dumps(row) + "\n" for row in rows)
    write_atomically(path, "".join(lines))
    return len(rows)
