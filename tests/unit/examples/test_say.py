"""A model is taught to state what was fitted: the rows that it learns from, and the whole example
on a few problems.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES

QUICKSTART = EXAMPLES / "quickstart"
ANSWER = {"problem": "2*3=", "text": "6 \\boxed{6}\n<conf> Confidence: 0.95", "status": "ok"}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("say_run", EXAMPLES / "say" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_an_answer_is_learned_again_with_the_adapters_number(tmp_path: Path) -> None:
    say = example()
    answers = [
        ANSWER | {"posthoc_confidence": 0.4166},
        ANSWER | {"posthoc_confidence": None},
        ANSWER | {"posthoc_confidence": 0.5, "status": "missing", "text": "6 \\boxed{6}"},
    ]
    path = tmp_path / "read.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    assert say.write_rows(path, tmp_path / "rows.jsonl") == 1
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["prompt"] == "2*3="
    assert row["response"] == "6 \\boxed{6}\n<conf> Confidence: 0.42"
    (span,) = row["spans"]
    assert row["response"][span["start"] : span["end"]] == "0.42"
    assert span["weight"] == say.WEIGHT


@pytest.mark.slow
@pytest.mark.full
def test_the_whole_example(tmp_path: Path) -> None:
    """What was done is kept: a second call prints the same table and trains nothing."""
    files = {}
    for name, count in (("train", 120), ("heldout", 40)):
        lines = (QUICKSTART / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(lines[:count]))
    out = tmp_path / "out"
    command = [
        *(sys.executable, EXAMPLES / "say" / "run.py", "--out", out),
        *("--fit", files["train"], "--test", files["heldout"]),
        *("--adapter", "model.adapter.rank=4 model.params_dtype=fp32 logging.to=[]"),
    ]
    tables = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        tables.append(done.stdout[done.stdout.index("\nconfidence") :])
    assert "stated after" in tables[0]
    assert tables[0] == tables[1]
    assert (out / "said" / "policy" / "config.json").is_file()
