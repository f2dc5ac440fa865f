"""ConfClass on a real policy, from its own samples to a saved predictor that scores other
samples.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc, is_held_out, problem_of
from megatron_dcpo.evaluation.samples import read_samples
from tests.helpers.paths import QUICKSTART

SAMPLING = [
    "--template",
    "raw",
    "--max-tokens",
    "40",
    "--temperature",
    "1",
    "--top-p",
    "1",
    "--top-k",
    "0",
]
SAMPLING += ["--batch-size", "512", "--resamples", "0", "--engine", "transformers"]


def evaluate(out: Path, data: str, *options: object) -> None:
    model = [
        "--model",
        str(QUICKSTART / "policy"),
        "--benchmarks",
        f"{data}={QUICKSTART / 'data' / data}.jsonl",
    ]
    assert main(["evaluate", *model, *SAMPLING, "--out", str(out), *map(str, options)]) == 0


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training problems; the paper draws 20 responses to each, the test 8."""
    out = tmp_path_factory.mktemp("confclass") / "train"
    evaluate(out, "train", "--repeats", 8, "--limit", 48, "--features")
    return out


def test_confclass_learns_from_log_probs_and_is_used_again(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "confclass.npz"
    arguments = [
        "calibrate",
        "--samples",
        str(sampled / "samples.jsonl"),
        "--method",
        "confclass",
        "--out",
        str(saved),
    ]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    held_out = json.loads(capsys.readouterr().out)["held_out"]
    predictor = Posthoc.load(saved)
    assert predictor.weights["weight2"].shape == (2048, 2048), "the paper's width"
    assert predictor.weights["weight1"].shape == (2048, 20), "the paper's 20 log-probs"

    samples = read_samples(sampled / "samples.jsonl")
    assert all(
        sample.measures.features is not None and len(sample.measures.features) == 60
        for sample in samples
    )
    outside = [sample for sample in samples if is_held_out(problem_of(sample), 0.2, 0)]
    assert {
        len([s for s in outside if s.prompt.prompt_id == p])
        for p in {s.prompt.prompt_id for s in outside}
    } == {8}
    assert held_out["confclass"]["n"] == len(outside)
    # The raw token probability is over-confident; what is learnt from the log-probs is less so, on
    # other problems.
    assert held_out["confclass"]["ece"] < held_out["token"]["ece"]
    assert held_out["confclass"]["brier"] < held_out["token"]["brier"]
    assert held_out["confclass"]["auroc"] > 0.6

    again = tmp_path / "again.npz"
    assert main([*arguments[:-1], str(again)]) == 0
    for name, weights in Posthoc.load(again).weights.items():
        assert np.array_equal(weights, predictor.weights[name]), "the same fit in every run"

    out = tmp_path / "held"
    evaluate(out, "heldout", "--repeats", 2, "--limit", 24, "--posthoc", saved)
    scored = read_samples(out / "samples.jsonl")
    assert [s.measures.posthoc_confidence for s in scored] == predictor.predict(scored)
    scores = json.loads((out / "evaluation.json").read_text())["benchmarks"]["heldout"]
    assert scores["posthoc"]["n"] == 48
    assert scores["posthoc"]["ece"] < scores["token"]["ece"]
