"""Runs that were never made: judged samples, their evaluation, the metrics of a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron_dcpo.evaluation.samples import Sample, with_consistency, write_samples
from megatron_dcpo.evaluation.scoring import score_samples


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
                Sample(
                    benchmark=benchmark,
                    prompt_id=f"{benchmark}/{i}",
                    repeat=repeat,
                    problem=f"What is {i}?",
                    response=f"It is \\boxed{{{answer}}}."
                    + (f"\n<conf> Confidence: {confidence}" if confidence else ""),
                    answer=answer,
                    ground_truth=str(i),
                    correct=correct and answer is not None,
                    confidence=confidence,
                    status=status,
                    token_confidence=float(generator.random()),
                    min_logprob=-2.0,
                    num_tokens=int(generator.integers(5, 50)),
                    finish_reason="stop",
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
