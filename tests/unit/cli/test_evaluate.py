"""What ``dcpo evaluate`` says while it works."""

from __future__ import annotations

import pytest

from megatron_dcpo.cli.evaluate import _progress


def test_progress_takes_ten_lines_where_stderr_is_no_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with _progress() as show:
        for done in range(136):
            show("first", done, 135)
        show("second", 0, 5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 12
    assert lines[0] == "first: 0 of 135 samples"
    assert lines[10] == "first: 135 of 135 samples"
    assert lines[11] == "second: 0 of 5 samples"
