"""The page of a run is written while it trains, and never twice at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.training.loggers import OPENERS, Report
from tests.helpers.evaluated import trained


def opened(run: Path) -> Report:
    report = OPENERS["report"](run, None, 1)  # type: ignore[arg-type]
    assert isinstance(report, Report)
    return report


def test_a_short_run_has_no_page(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    report = opened(tmp_path / "run")
    report.log(1, {})
    report.finish(())
    assert not (tmp_path / "run" / "report.html").exists()


def test_the_page_is_written_during_the_run_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "_SECONDS", 0.0)
    run = tmp_path / "run"
    trained(run)
    report = opened(run)
    report.log(1, {})
    first = report.process
    report.log(2, {})
    assert report.process is first, "one process at a time"
    assert first is not None
    assert first.wait(120) == 0
    page = run / "report.html"
    assert "step" in page.read_text()
    page.unlink()
    report.finish(())
    assert page.exists()
