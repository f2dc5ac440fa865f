"""The table that ``make quickstart`` prints."""

from __future__ import annotations

import json
import sys

import pytest

from tests.helpers.paths import EXAMPLES, REPOSITORY


def test_every_number_is_whole_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "80")
    import comparison

    rows = json.loads((REPOSITORY / "docs" / "quickstart.json").read_text())["seed_1"]
    comparison.show(rows)
    sys.modules.pop("comparison")
    shown = capsys.readouterr().out
    assert "…" not in shown
    for name, row in rows.items():
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == [name])
        assert f"{row['brier']:.3f}" in line.split()
        assert f"{row['auroc_within']:.3f}" in line.split()
