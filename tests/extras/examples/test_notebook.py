"""``examples/quickstart.ipynb``: its cells run in order, and the policy is better calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES

NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.mark.full
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), values)
    before = values["before"]["benchmarks"]["heldout"]["verbal"]
    after = values["after"]["benchmarks"]["heldout"]["verbal"]
    assert after["ece"] < before["ece"]
    assert {"verbal", "logistic", "lookup"} <= set(values["scores"])
    assert (tmp_path / "runs" / "notebook" / "confidence.npz").is_file()


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
