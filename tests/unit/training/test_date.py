"""The date that a chat template writes: one for a whole run, also when it is resumed later."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import Config, load_config
from megatron_dcpo.runtime.run_records import first_date, today
from megatron_dcpo.training import provenance
from tests.helpers.paths import QUICKSTART

OLD = datetime.date(2026, 2, 28)


def config_of(directory: Path, resume: str) -> Config:
    return load_config(
        QUICKSTART / "dcpo.yaml", [f"run_dir={directory}", f"training.resume={resume}"]
    )


def write_launches(directory: Path, *launches: dict[str, Any]) -> None:
    (directory / "run.json").write_text(json.dumps({"launches": launches}))


def test_a_resumed_run_keeps_the_date_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_launches(tmp_path, {"after_step": 0, "date": OLD.isoformat()})
    resumed = config_of(tmp_path, "auto")
    assert provenance.date_of(resumed) == today(), "without a checkpoint it starts again"
    monkeypatch.setattr(provenance, "has_checkpoint", lambda directory: True)
    assert provenance.date_of(resumed) == OLD
    assert provenance.launch(resumed, processes=1, done=2)["date"] == OLD.isoformat()
    assert provenance.date_of(config_of(tmp_path, "none")) == today()


@pytest.mark.parametrize(
    ("launches", "date"),
    [
        ([], None),
        ([{"date": "2026-02-27"}, {"date": "2026-02-28"}], OLD),
        ([{"date": "2026-02-28"}, {"date": "yesterday"}], OLD),
        (
            [
                {"after_step": 0, "time": "2026-02-28T12:00:00+00:00"},
                {"after_step": 3, "time": "2026-03-01T12:00:00+00:00"},
            ],
            OLD,
        ),
        ([{"after_step": 0, "time": None}, {"after_step": 0}], None),
    ],
)
def test_the_date_of_the_first_start(
    launches: list[dict[str, Any]], date: datetime.date | None
) -> None:
    """Also of a release that did not record it."""
    assert first_date(launches) == date
