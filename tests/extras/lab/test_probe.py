"""The parts of the lab's probe against the objectives' own advantages."""

from __future__ import annotations

import numpy as np
import pytest

from lab.gradient_probe import ALL
from lab.probe import (
    BASELINES,
    PAIRS,
    parts_of,
    summary_lines,
    without_regularizers,
)
from megatron_dcpo.objectives import ObjectiveConfig, as_method, build_method, resolve
from megatron_dcpo.types import Judgement
from tests.helpers.objective_cases import samples_of

PROPER = {
    "lam": 0.0,
    "calibration_loss": "brier",
    "confidence_baseline": "counterfactual",
    "advantage_normalization_confidence": "batch_std",
}


def test_the_probes_parts_add_up_to_the_objectives() -> None:
    """The coupled parts sum to the coupled advantage, the DCPO parts to DCPO's, token by token."""
    rng = np.random.default_rng(0)
    judgements = []
    for row in range(24):
        ok, right = rng.random() < 0.8, float(rng.random() < 0.5)
        confidence = float(rng.integers(0, 100)) / 100 if ok else None
        judgements.append(
            Judgement(f"p{row % 4}", right, confidence, "ok" if ok else "missing", 3, 5)
        )
    for options in ({}, PROPER, {"preset": "verl_compat", "lam": 0.25}):
        config = without_regularizers(
            ObjectiveConfig(**options, kl_coef=0.1, entropy_coef_confidence=0.1)
        )
        assert not any(
            (*resolve(config).blocks("kl_coef"), *resolve(config).blocks("entropy_coef"))
        )
        samples = samples_of(judgements)
        parts = parts_of(samples, config)
        for name in ("coupled", "dcpo"):
            whole = build_method(as_method(config, name)).score(samples)
            for a, b, expected in zip(
                parts[f"{name}_accuracy"], parts[f"{name}_calibration"], whole, strict=True
            ):
                assert a.advantages + b.advantages == pytest.approx(expected.advantages, abs=1e-9)
        assert all(not sample.advantages[:3].any() for sample in parts["counterfactual"]), (
            "confidence tokens only"
        )


def test_the_summary_is_in_words() -> None:
    """One batch has no noise to measure: the line says what it needs."""
    one = {"cosine": -0.25, "accuracy_norm": 1.0, "calibration_norm": 2.0}
    lines = summary_lines(
        {
            "conflict": {name: {"plain": {ALL: one}, "fisher": {ALL: one}} for name in PAIRS},
            "gradients": {
                BASELINES[0]: {"signal_to_noise": None},
                BASELINES[1]: {"signal_to_noise": 1.5},
            },
        }
    )
    text = "\n".join(lines)
    assert "proposition" not in text
    assert "accuracy, mean confidence" in lines[0]
    assert lines[3].endswith("needs at least two batches (--batches)")
    assert lines[4].startswith("counterfactual ")
    assert lines[4].endswith("1.50")
