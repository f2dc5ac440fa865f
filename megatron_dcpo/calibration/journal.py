"""The samples of an evaluation in progress: each is on disk as soon as it is judged, and none is asked for twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megatron_dcpo.calibration.samples import Sample, read_samples, sample_line
from megatron_dcpo.errors import UserError


class Journal:
    """``samples.jsonl`` of a run directory, appended to line by line, with ``settings.json`` beside it.

    A directory that holds samples drawn with other settings is refused: they must not be mixed. A last line that a
    killed process left unfinished is cut off; its sample is drawn again.
    """

    def __init__(self, directory: str | Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        self.path, settings_path = root / "samples.jsonl", root / "settings.json"
        if fresh:
            self.path.unlink(missing_ok=True)
            settings_path.unlink(missing_ok=True)
        if self.path.exists():
            _check_settings(settings_path, settings)
            _cut_torn_line(self.path)
        self._found = read_samples(self.path) if self.path.exists() else []
        settings_path.write_text(json.dumps(dict(settings), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        self._file: IO[str] = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def finished(self, benchmark: str) -> dict[tuple[str, int], Sample]:
        """The samples of a benchmark found on disk, by prompt id and repeat."""
        return {(s.prompt_id, s.repeat): s for s in self._found if s.benchmark == benchmark}

    def add(self, sample: Sample) -> None:
        self._file.write(sample_line(sample))
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path.parent} holds samples of unknown settings; give another --out, or --fresh") from None
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise UserError(
                f"{path.parent} was begun with {name} = {before.get(name)!r}, now it is {settings.get(name)!r}; "
                "give another --out, or --fresh to drop its samples"
            )


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
