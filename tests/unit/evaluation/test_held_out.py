"""What a run is validated on and by: words of the configuration, what is better, which checkpoint
that names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config
from megatron_dcpo.conversion.megatron_checkpoint import find_checkpoint
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.headline import improves, value_of
from megatron_dcpo.evaluation.held_out import load_held_out
from megatron_dcpo.judging.token_bytes import token_bytes
from tests.helpers.paths import QUICKSTART

HELDOUT = f"evaluation.benchmarks=heldout={QUICKSTART / 'data' / 'heldout.jsonl'}"
METRICS = {
    "evaluation/a/ece": 0.2,
    "evaluation/b/ece": 0.4,
    "evaluation/a/auroc": math.nan,
    "evaluation/a/accuracy": 0.5,
}


@pytest.mark.parametrize(
    ("word", "value"), [("a/ece", 0.2), ("evaluation/b/ece", 0.4), ("ece", 0.3), ("accuracy", 0.5)]
)
def test_a_word_is_a_benchmarks_metric_or_the_mean(word: str, value: float) -> None:
    assert value_of(METRICS, word) == pytest.approx(value)


@pytest.mark.parametrize(
    ("word", "before", "better"),
    [
        ("ece", {"evaluation/a/ece": 0.31}, True),
        ("ece", {"evaluation/a/ece": 0.29}, False),
        ("accuracy", {"evaluation/a/accuracy": 0.49}, True),
        ("accuracy", {"evaluation/a/accuracy": 0.51}, False),
        ("accuracy", {"evaluation/a/accuracy": 0.5}, False),  # the first of equal ones stays
        ("auroc", None, False),
        ("accuracy", {"evaluation/a/accuracy": math.nan}, True),
    ],
)
def test_less_is_better_for_errors(word: str, before: Any, better: bool) -> None:
    assert improves(word, METRICS, before) is better


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.keep_best=ece"],
            "training.keep_best and training.early_stop need evaluation.interval",
        ),
        (["evaluation.interval=5"], "evaluation.interval=5 needs evaluation.benchmarks"),
        (["evaluation.interval=5", "evaluation.benchmarks=meth500"], "unknown benchmark 'meth500'"),
        (
            ["evaluation.interval=5", "evaluation.benchmarks=mine=/nowhere.jsonl"],
            "/nowhere.jsonl: no such data file",
        ),
        (
            ["evaluation.interval=5", HELDOUT, "training.keep_best=acuracy"],
            "did you mean 'accuracy'?",
        ),
        (
            ["evaluation.interval=5", HELDOUT, "training.keep_best=math500/ece"],
            "write heldout/ece, or ece for the mean of",
        ),
        (
            [
                "evaluation.interval=5",
                HELDOUT,
                "training.keep_best=mean_length",
                "training.early_stop=2",
            ],
            "training.keep_best=mean_length",
        ),
        (
            ["evaluation.interval=5", HELDOUT, "training.early_stop=2"],
            "training.early_stop=2 needs training.keep_best",
        ),
        (["evaluation.intervall=5"], "did you mean evaluation.interval?"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(overrides: list[str], message: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "policy")
    with pytest.raises(UserError) as refused:
        load_held_out(
            load_config(QUICKSTART / "dcpo.yaml", overrides), tokenizer, token_bytes(tokenizer)
        )
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_dry_run_knows_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["train", "--config", str(QUICKSTART / "dcpo.yaml"), "--dry-run", "evaluation.interval=5"]
    assert main([*dry, "--allow-missing", "evaluation.benchmarks=[MATH-500, mine=a.jsonl]"]) == 0
    assert "every 5 steps on math500, mine" in capsys.readouterr().out
    assert main([*dry, HELDOUT, "training.keep_best=brierr"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("best", "message"),
    [
        (None, "has no best.json"),
        ('{"iteration": "x"}', "is damaged"),
        ('{"iteration": 4}', "iter_0000004 does not exist"),
    ],
)
def test_a_best_checkpoint_that_is_not_there_is_one_line(
    tmp_path: Path, best: str | None, message: str
) -> None:
    if best:
        (tmp_path / "best.json").write_text(best)
    with pytest.raises(UserError, match=message):
        find_checkpoint(tmp_path, "best")


def test_the_best_checkpoint_is_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"iteration": 4, "metric": "ece", "value": 0.1}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    for step in (4, 6):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / ".metadata").touch()
    assert find_checkpoint(tmp_path, "best").name == "iter_0000004"
    assert find_checkpoint(tmp_path).name == "iter_0000006"
