"""Runs that were never made: judged samples, their evaluation, the metrics of a training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.evaluation.samples import (
    Sample,
    sample_line,
    sample_of,
    with_consistency,
    write_samples,
)
from megatron_dcpo.evaluation.scoring import score_samples

A_SAMPLE: dict[str, Any] = {
    "version": 2,
    "task": "b",
    "prompt_id": "p",
    "problem": "q",
    "ground_truth": "1",
    "sample_index": 0,
    "text": "r",
    "finish_reason": "stop",
    "weights_version": 0,
    "answer": "1",
    "correct": 0.0,
    "confidence": None,
    "status": "missing",
    "boundary": None,
    "length": 1,
}


def make_sample(**fields: Any) -> Sample:
    """One judged response; ``fields`` of any of its records."""
    return sample_of(A_SAMPLE | fields)


def changed(sample: Sample, **fields: Any) -> Sample:
    """The same sample with other ``fields`` of any of its records."""
    parts = {}
    for part in dataclasses.fields(sample):
        record = getattr(sample, part.name)
        if part.name == "state":
            continue
        names = {field.name for field in dataclasses.fields(record)}
        parts[part.name] = replace(record, **{k: v for k, v in fields.items() if k in names})
    return replace(sample, **parts)


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples as lines of samples.jsonl have them, for comparison."""
    return [json.loads(sample_line(sample)) for sample in samples]


def make_samples(
    problems: int = 30, repeats: int = 4, benchmark: str = "toy", seed: int = 0
) -> list[Sample]:
    """Judged responses with every kind of trouble in them."""
    generator = np.random.default_rng(seed)
    samples = []
    for i in range(problems):
        for repeat in range(repeats):
            confidence: float | None = round(float(generator.beta(2, 1)), 2)
            correct = bool(generator.random() < (confidence or 0))
            status = "ok"
            if generator.random() < 0.1:
                confidence, status = None, "missing"
            answer = (
                None
                if generator.random() < 0.05
                else str(i if correct else generator.integers(3) + 1000)
            )
            samples.append(
                make_sample(
                    task=benchmark,
                    prompt_id=f"{benchmark}/{i}",
                    sample_index=repeat,
                    problem=f"What is {i}?",
                    text=f"It is \\boxed{{{answer}}}."
                    + (f"\n<conf> Confidence: {confidence}" if confidence else ""),
                    answer=answer,
                    ground_truth=str(i),
                    correct=float(correct and answer is not None),
                    confidence=confidence,
                    status=status,
                    token_confidence=float(generator.random()),
                    min_logprob=-2.0,
                    length=int(generator.integers(5, 50)),
                )
            )
    return with_consistency(samples, lambda a, b: False)


def evaluated(path: Path, seed: int = 0, samples: list[Sample] | None = None) -> dict[str, object]:
    path.mkdir(parents=True, exist_ok=True)
    judged = samples or make_samples(seed=seed)
    evaluation = score_samples(judged, ["verbal", "token"], model=path.name, resamples=0)
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    write_samples(judged, path / "samples.jsonl")
    return evaluation


def trained(path: Path, steps: int = 12) -> None:
    path.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": s,
            "reward/accuracy": 0.5 + s / 100,
            "calibration/ece": float("nan") if s == 3 else 0.4 - s / 100,
        }
        for s in range(steps)
    ]
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
