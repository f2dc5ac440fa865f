"""Validation while training changes nothing of the run, is resumed with it, and chooses the
checkpoint that is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.evaluation.evaluation_run import run_evaluation
from tests.helpers.launch import torchrun_all
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, without_clocks

HELDOUT = QUICKSTART / "data" / "heldout.jsonl"
SMALL = [
    "data.prompts_per_step=2",
    "rollout.group_size=4",
    "training.micro_batch_size=8",
    "logging.samples_interval=0",
    "training.steps=3",
    "training.save_interval=0",
]
VALIDATED = [
    "evaluation.interval=2",
    f"evaluation.benchmarks=a={HELDOUT},b={HELDOUT}",
    "evaluation.limit=3",
    "evaluation.samples=2",
    "training.keep_best=b/ece",
]
ONE = [
    "evaluation.interval=1",
    f"evaluation.benchmarks=heldout={HELDOUT}",
    "evaluation.limit=1",
]  # rank 1 has no share

ADAPTER = [
    *SMALL,
    "training.steps=1",
    "optimizer.lr=0.05",
    "optimizer.weight_decay=0",
    "model.adapter.rank=4",
    "parallel.pipeline_model_parallel_size=2",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two ranks (the adapter's: pipeline stages, else data parallel): the runs by name, and what
    each rank returned.
    """
    out = tmp_path_factory.mktemp("validation")
    jobs = {
        "plain": {"overrides": SMALL},
        "validated": {"overrides": [*SMALL, *VALIDATED]},
        "begun": {"overrides": [*SMALL, *VALIDATED, f"run_dir={out}/resumed", "training.steps=2"]},
        "resumed": {
            "overrides": [*SMALL, *VALIDATED, "training.resume=auto"],
            "forget_evaluations": True,
        },
        "stopped": {
            "overrides": [
                *SMALL,
                *ONE,
                "optimizer.lr=0",
                "training.keep_checkpoints=1",
                "training.early_stop=1",
                "training.keep_best=accuracy",
            ]
        },
        "adapter": {"overrides": [*ADAPTER, *VALIDATED]},
        "adapter_plain": {"overrides": ADAPTER},
    }
    for name, options in jobs.items():
        options["overrides"] = [f"run_dir={out}/{name}", *options["overrides"]]
    results = torchrun_all([("training", options) for options in jobs.values()], 2, out)
    return out, dict(zip(jobs, results, strict=True))


def split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
    """Records of the training, and those of the validation by step."""
    trained = [
        {k: v for k, v in row.items() if not k.startswith("evaluation/")}
        for row in without_clocks(rows)
    ]
    return [row for row in trained if row["step"]], {
        row["step"]: values
        for row in rows
        if (values := {k: v for k, v in row.items() if k.startswith("evaluation/")})
    }


def test_the_run_is_the_one_without_validation(runs: Any) -> None:
    out, results = runs
    for name in ("validated", "adapter"):
        plain = results["plain" if name == "validated" else "adapter_plain"]
        assert [rank["digests"] for rank in results[name]] == [rank["digests"] for rank in plain], (
            "weights and moments"
        )
    trained, evaluations = split(metrics(out / "validated"))
    assert trained == split(metrics(out / "plain"))[0]
    assert list(evaluations) == [0, 2, 3]


def test_a_resumed_run_validates_and_keeps_as_one_without_a_stop(runs: Any) -> None:
    """Its second step had lost its validation, which the resumption makes up for."""
    out, _ = runs
    assert without_clocks(metrics(out / "resumed")) == without_clocks(metrics(out / "validated"))
    best = [
        json.loads((out / name / "checkpoints" / "best.json").read_text())
        for name in ("resumed", "validated")
    ]
    assert best[0] == best[1]
    evaluations = split(metrics(out / "validated"))[1]
    values = {step: evaluations[step]["evaluation/b/ece"] for step in (2, 3)}
    assert (best[0]["value"], best[0]["iteration"]) == min(
        (value, step) for step, value in values.items()
    )


@pytest.mark.parametrize("name", ["validated", "adapter"])
def test_it_is_what_dcpo_evaluate_finds(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The exported policy, sampled with the same seed by one engine; an adapter states by the
    transformers model.
    """
    out, _ = runs
    shown = ("accuracy", "ece", "brier", "auroc", "mean_confidence", "violation_rate")
    measured = max(split(metrics(out / name))[1].items())[1]
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.evaluation_run.write_evaluation", lambda *_: None
    )  # pictures
    evaluation = run_evaluation(
        load_evaluation(
            {
                "run_dir": str(tmp_path),
                "model.path": str(out / name / "policy"),
                "evaluation.benchmarks": f"a={HELDOUT},b={HELDOUT}",
                "evaluation.limit": 3,
                "evaluation.samples": 2,
                "data.template": "raw",
                "evaluation.max_tokens": 32,
                "evaluation.resamples": 0,
                "rollout.engine": "transformers",
            }
        )
    )
    for benchmark, scores in evaluation["benchmarks"].items():
        flat = scores["verbal"] | {
            "accuracy": scores["accuracy"],
            "mean_confidence": scores["verbal"]["mean"],
        }
        for metric in shown:
            assert measured[f"evaluation/{benchmark}/{metric}"] == pytest.approx(
                flat[metric], abs=1e-9, nan_ok=True
            )


def test_an_early_stop_saves_and_the_best_checkpoint_outlives_the_pruning(runs: Any) -> None:
    """Nothing is learnt: the first validation stays the best, and the next one ends the run."""
    out, _ = runs
    checkpoints = out / "stopped" / "checkpoints"
    assert [row["step"] for row in metrics(out / "stopped")] == [0, 1, 2]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
    ]
    assert json.loads((checkpoints / "best.json").read_text())["iteration"] == 1
