"""The probes of a real model's study."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from megatron_dcpo.calibration import auroc
from tests.helpers.evaluated import make_sample
from tests.helpers.paths import EXAMPLES


def test_states_that_know_nothing_predict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe knows the problems that it was fitted on; of the others it says what it can."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "smollm2"))
    import controls

    sys.modules.pop("controls")
    generator = np.random.default_rng(0)
    hidden = np.repeat(generator.normal(size=(60, 40)), 2, axis=0)
    right = np.repeat(generator.random(60) < 0.5, 2)
    samples = [
        make_sample(prompt_id=f"toy/{row // 2}", sample_index=row % 2, correct=float(right[row]))
        for row in range(120)
    ]
    found = controls._cross_fitted(hidden, samples)
    assert 0.2 < auroc(found, right.astype(float)) < 0.7
    informed = np.column_stack([hidden, 3 * right + generator.normal(size=120)])
    assert auroc(controls._cross_fitted(informed, samples), right.astype(float)) > 0.8
