"""``training.callback``: the lab's gradient probe measures the first step of the quickstart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import metrics, run

# revision ca02236a, whose updater took the second block's gradient as the step's less the first's
MEASURED = {
    "grad_norm/total": 0.4454235975649902,
    "grad_norm/reasoning": 0.4065104736149057,
    "grad_norm/confidence": 0.17266580090727615,
    "grad_cosine/reasoning_confidence": 0.023777811977650668,
    "grad_cosine_fisher/reasoning_confidence": -0.004555208462855171,
    "grad_cosine/embedding": 0.16591714542734848,
    "grad_cosine/layers_0": -0.06986904289471665,
    "grad_cosine/layers_1": 0.008463333263750634,
    "grad_cosine/output": 0.0449689899453574,
}


def trained(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Return the metrics of two steps of the quickstart, the second not measured."""
    arguments = (f"run_dir={folder}", "training.steps=2", *overrides)
    done = run("train", "--config", QUICKSTART / "dcpo.yaml", *arguments, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(folder)


def test_the_probe_of_the_lab_measures_and_changes_nothing(tmp_path: Path) -> None:
    first, second = trained(
        tmp_path / "probed", "training.callback=lab/gradient_probe.py:every_50_steps"
    )
    assert {name: first[name] for name in MEASURED} == pytest.approx(MEASURED, rel=1e-4, abs=1e-6)
    plain = trained(tmp_path / "plain")
    measured = MEASURED.keys() - {"grad_norm/total"}
    assert not measured & (plain[0].keys() | plain[1].keys() | second.keys())
    for name in ("loss/policy", "grad_norm/total", "reward/accuracy", "confidence/mean"):
        assert [row[name] for row in plain] == [first[name], second[name]]


def test_a_callback_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def measure(step):\n    return {}\n")
    name = f"training.callback={tmp_path / 'mine.py'}:measure"
    arguments = (f"run_dir={tmp_path / 'run'}", "training.steps=1", name)
    done = run("train", "--config", QUICKSTART / "dcpo.yaml", *arguments, cwd=REPOSITORY)
    assert done.returncode == 2
    assert name in done.stderr
