"""The files of a run that grow with its steps, and its loggers: what RL and supervised
training have in common. A resumed run goes on where its checkpoint is, and a step whose records the
disk refuses is not checkpointed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_dcpo.calibration import json_ready
from megatron_dcpo.checkpoints.saver import Saver, last_complete
from megatron_dcpo.config import RunConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.distributed import Topology, broadcast_object
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.training.loggers import open_loggers
from megatron_dcpo.training.progress import Progress
from megatron_dcpo.training.provenance import record_start

logger = logging.getLogger(__name__)

ToLoggers = Callable[[int, Mapping[str, Any]], None]


class Records:
    """Writes on rank 0; on the other ranks a call only takes part in what is collective.

    Files are open inside ``with records.from_step(n)``. ``by_step`` are the files that have a row
    for each step. ``saver`` gives up the checkpoint of a step whose records the disk refuses.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        topology: Topology,
        saver: Saver,
        by_step: Sequence[str] = ("metrics.jsonl",),
    ) -> None:
        self.directory = directory
        self.run_config = config
        self.saver = saver
        self.writes = topology.rank == 0
        self.processes = topology.world_size
        self.by_step = tuple(directory / name for name in by_step)
        self.metrics_path = directory / "metrics.jsonl"
        self.rows: list[dict[str, Any]] = []  # of the steps up to now
        self.counts: Mapping[str, int] = {}  # problems or examples of each path of the data
        self.to_loggers: ToLoggers = _to_nobody
        self.progress = Progress(config.training.steps)

    @contextmanager
    def from_step(self, first_step: int) -> Iterator[None]:
        """Open the records, without the steps that will be done again. Raises
        :class:`UserError`.
        """
        if not self.writes:
            yield
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            record_start(
                self.directory,
                self.run_config,
                self.processes,
                done=first_step - 1,
                counts=self.counts,
            )
            for path in self.by_step:
                _keep_steps_before(path, first_step)
            self.rows = logged_rows(self.metrics_path)
            for text in self.warnings_of_the_start():
                logger.warning("%s", text)
        except OSError as refused:
            raise UserError(
                f"cannot write in run_dir {self.directory} ({why_refused(refused)}); free space or "
                "change run_dir"
            ) from None
        with ExitStack() as stack:
            self.to_loggers = stack.enter_context(
                open_loggers(self.directory, self.run_config, first_step)
            )
            stack.enter_context(self.progress.shown(done=first_step - 1))
            yield

    def warnings_of_the_start(self) -> Iterable[str]:
        """Return what is odd about the run before its first step."""
        return ()

    @staticmethod
    def append(path: Path, row: Mapping[str, Any]) -> None:
        """Add a row to a file of JSON lines; it is on the disk when this returns."""
        with path.open("a") as file:
            file.write(json.dumps(json_ready(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def end_if(self, refused: str | None, step: int) -> None:
        """Raise :class:`UserError` on every rank when the disk has ``refused`` the records of
        ``step`` on the first one; its checkpoint is given up. Collective.
        """
        refused = broadcast_object(refused)
        if refused is not None:
            self.saver.give_up(step)
            raise UserError(
                f"cannot write the records of step {step} in {self.directory} ({refused}); "
                f"{last_complete(self.saver.directory)}. Free space, and continue with --resume "
                "auto"
            )


def _to_nobody(step: int, metrics: Mapping[str, Any]) -> None:
    """Show metrics to no logger: none is open."""


def why_refused(error: OSError) -> str:
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Drop the records of steps that will be done again: a killed run has usually logged past its
    last checkpoint. A warning names the rows that are damaged, which are dropped too.
    """
    if not path.exists():
        return
    rows, damaged = _read_rows(path)
    if damaged:
        logger.warning("%s is damaged in line %s; these rows are lost", path, ", ".join(damaged))
    kept = [row for row in rows if row["step"] < first_step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def logged_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` or ``mismatch.jsonl`` that are intact and have a
    step.
    """
    if not path.exists():
        return []
    return _read_rows(path)[0]


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the intact rows and the numbers of the damaged lines. A last line without its end was
    cut off by a kill and is not counted.
    """
    rows = []
    damaged = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode())
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            if number < len(lines):
                damaged.append(str(number))
    return rows, damaged
