"""``examples/say``: the whole example on a few problems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import EXAMPLES

QUICKSTART = EXAMPLES / "quickstart"


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
