"""Answers of a model with another confidence in place of the one that they state: demonstrations
for ``dcpo sft``, from which the model learns to state it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_dcpo.data import prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.judging.confidence import number_span, parse_confidence
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.types import CONFIDENCE_TAG

# The weight of the number's tokens in the loss. The answer's tokens have 1: they are learned too,
# since learning what the model itself has written keeps it.
NUMBER_WEIGHT = 3.0
# what bytes become that are not UTF-8: such a text is not what the model wrote
_UNREADABLE = "\ufffd"


def check_asked(samples: Iterable[Sample], template: str, marker: str) -> None:
    """Raise :class:`UserError` if ``dcpo sft`` puts the problem of a sample otherwise than it was
    asked: it asks for an answer in a box, and for a confidence behind the usual tag.
    """
    for sample in samples:
        problem = ({"role": "user", "content": sample.prompt.problem},)
        form = sample.prompt.form
        if prompts.ask(problem, template, marker, form) != prompts.ask(problem, template):
            raise UserError(
                f"--demonstrations: {sample.prompt.prompt_id} was asked with template={template} "
                f"for an answer of the form {form} and the tag {marker}, and dcpo sft would ask "
                f"for math and {CONFIDENCE_TAG}; only answers to --template chat or raw can be "
                "learned with these"
            )


def restated(sample: Sample, marker: str) -> dict[str, Any] | None:
    """Return a demonstration (``prompt``, ``response``, ``spans``) of a sample whose number is its
    ``posthoc_confidence``; None if it has none, or states none in the form that is read, or if its
    text has lost bytes.
    """
    confidence = sample.measures.posthoc_confidence
    text = sample.response.text
    if confidence is None or text is None or sample.judgement.status != "ok" or _UNREADABLE in text:
        return None
    # the thinking may mention the tag; a text that was edited may state nothing any more
    start = sample.judgement.thinking_characters
    answer = text[start:]
    if parse_confidence(answer, marker=marker, finished=True, opener="").status != "ok":
        return None
    begin, end = (start + place for place in number_span(answer, marker))
    number = f"{confidence:.2f}"
    span = {"start": begin, "end": begin + len(number), "weight": NUMBER_WEIGHT}
    return {
        "prompt": sample.prompt.problem,
        "response": f"{text[:begin]}{number}{text[end:]}",
        "spans": [span],
    }


def write_restated(samples: Iterable[Sample], path: Path, marker: str) -> int:
    """Write a demonstration for every sample that has one; return their number. Nothing is written
    if there is none.
    """
    rows = [row for sample in samples if (row := restated(sample, marker)) is not None]
    if not rows:
        return 0
    lines = (json.dumps(row) + "\n" for row in rows)
    write_atomically(path, "".join(lines))
    return len(rows)
