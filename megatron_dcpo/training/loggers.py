"""Where metrics go besides ``metrics.jsonl``: TensorBoard, the page of the run, Weights & Biases,
MLflow, SwanLab, Trackio, or a logger by import path.

Each package is imported only if ``logging.to`` names it, and reads its own environment variables
(``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ``SWANLAB_MODE``). A logger that fails while a run
trains is left out from then on.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_dcpo.config import RunConfig, as_dict, flat
from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.plugins import check_signature, is_import_path, load_object, load_part
from megatron_dcpo.runtime.text import read_json_object

logger = logging.getLogger(__name__)

_IDS = "logger_ids.json"  # in the run directory
ARTIFACTS = ("config.yaml", "report.html")  # of the run directory


class RunLogger(Protocol):
    """Takes the metrics of a run, on its first process."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite metrics of a step."""

    def finish(self, artifacts: Sequence[Path]) -> None:
        """End the run, however it ended, and keep ``artifacts``: its configuration, and its report
        if there is one.
        """


# run directory, configuration, first step that will be logged
Open = Callable[[Path, RunConfig, int], RunLogger]


def check_loggers(config: RunConfig) -> None:
    """Raise :class:`UserError` for a logger of ``logging.to`` that is unknown, cannot be loaded, or
    is not installed.
    """
    for name in config.logging.to:
        if is_import_path(name):
            opener = load_object(name, "logging.to")
            check_signature(opener, name, "logging.to", "directory", "config", "first_step")
        elif name not in OPENERS:
            hint = did_you_mean(name, OPENERS)
            raise UserError(
                f"logging.to={name}: unknown logger{hint}, or write file.py:function of your own"
            )
        elif OPENERS[name] is not Report and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.to={name}, but the package {name} is not installed; pip install {name}, "
                "or remove it from logging.to"
            )


class Loggers:
    """The loggers of a run that still work: one that fails is left out from then on."""

    def __init__(self) -> None:
        self.opened: dict[str, RunLogger] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand every logger the finite numbers of a step."""
        finite = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._each("log", lambda target: target.log(step, finite))

    def finish(self, artifacts: Sequence[Path]) -> None:
        """End the run in every logger."""
        self._each("finish", lambda target: target.finish(artifacts))

    def _each(self, what: str, call: Callable[[RunLogger], None]) -> None:
        for name, target in list(self.opened.items()):
            try:
                call(target)
            except Exception as error:
                del self.opened[name]
                why = f"{type(error).__name__}: {one_line(error, 200)}"
                logger.warning(
                    "logging.to=%s failed to %s (%s); the run goes on without it", name, what, why
                )


@contextmanager
def open_loggers(
    directory: Path, config: RunConfig, first_step: int
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Open the loggers of ``logging.to``, which are checked, and yield a function that hands them
    the numbers of a step; finish them at the end.
    """
    loggers = Loggers()
    try:
        for name in config.logging.to:
            opener: Open = OPENERS.get(name) or load_object(name, "logging.to")
            try:
                loggers.opened[name] = opener(directory, config, first_step)
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error, 300)}"
                raise UserError(
                    f"logging.to={name} cannot be opened ({why}); fix it, or remove it from "
                    "logging.to"
                ) from None
        yield loggers.log
    finally:
        if loggers.opened.keys() - {"tensorboard", "report"}:
            _write_report(directory)
        artifacts = [directory / name for name in ARTIFACTS]
        loggers.finish([path for path in artifacts if path.is_file()])


def _write_report(directory: Path) -> None:
    """Write ``report.html`` of the run for the loggers that keep it. A failure here does not end
    the run.
    """
    try:
        load_part("megatron_dcpo.evaluation.report:write_report_of_run")(directory)
    except Exception as error:
        logger.warning(
            "no report for logging.to (%s: %s)", type(error).__name__, one_line(error, 200)
        )


def project_of(config: RunConfig) -> str:
    """Return ``logging.project``, or the name of the directory that the run directory is in."""
    return config.logging.project or Path(config.run_dir).absolute().parent.name or "megatron-dcpo"


def known_id(directory: Path, name: str, first_step: int) -> str | None:
    """Return the id under which the logger ``name`` knows the run of ``directory``; None for a new
    run: one that begins at step 1, or in a copy of another run's directory.
    """
    path = directory / _IDS
    if first_step == 1 or not path.is_file():
        return None
    known = read_json_object(path).get(name)
    if not isinstance(known, dict) or not isinstance(known.get("id"), str):
        return None
    # a directory that was moved keeps its inode, a copy has neither path nor inode
    here = (str(directory.absolute()), directory.stat().st_ino)
    if known.get("directory") != here[0] and known.get("inode") != here[1]:
        logger.info("logging.to=%s: %s is a copy of another run's, a new run begins", name, here[0])
        return None
    return str(known["id"])


def remember_id(directory: Path, name: str, value: str) -> None:
    """Keep the id of the run in its directory, for :func:`known_id`."""
    path = directory / _IDS
    ids = read_json_object(path) if path.is_file() else {}
    ids[name] = {
        "id": value,
        "directory": str(directory.absolute()),
        "inode": directory.stat().st_ino,
    }
    write_atomically(path, json.dumps(ids, indent=2) + "\n")


class TensorBoard:
    """Writes events to ``run_dir/tensorboard``."""

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        self.writer.close()


class Report:
    """Rewrites ``report.html`` while the run trains, once a minute at most, in another process,
    which takes the cores that training leaves; and at the end, if it has been written.
    """

    _SECONDS = 60.0
    _LAST_SECONDS = 120.0  # that the end of a run waits for its report

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        self.directory = directory
        self.begun = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_written = self.process is not None and self.process.poll() is None
        if is_written or time.monotonic() - self.begun < self._SECONDS:
            return
        self._write()

    def finish(self, artifacts: Sequence[Path]) -> None:
        if self.process is None:
            return
        self.process.wait(self._LAST_SECONDS)
        self._write().wait(self._LAST_SECONDS)

    def _write(self) -> subprocess.Popen[bytes]:
        self.begun = time.monotonic()
        command = [sys.executable, "-m", "megatron_dcpo", "report", str(self.directory)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(OSError):  # it has ended, or this is not Linux
            os.setpriority(os.PRIO_PROCESS, self.process.pid, 10)
        return self.process


class WandB:
    """Continues the Weights & Biases run of this run directory, or begins a new one."""

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        import wandb

        identity = known_id(directory, "wandb", first_step) or uuid.uuid4().hex[:16]
        self.wandb: Any = wandb
        self.run: Any = wandb.init(
            project=project_of(config),
            name=directory.absolute().name,
            id=identity,
            resume="allow",
            dir=str(directory),
            config=as_dict(config),
        )
        remember_id(directory, "wandb", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
        for path in artifacts:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()


class MLflow:
    """Continues the MLflow run of this run directory, or begins a new one."""

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        identity = known_id(directory, "mlflow", first_step)
        mlflow.set_experiment(project_of(config))
        if identity is not None:
            mlflow.start_run(run_id=identity)
            return
        run = mlflow.start_run(run_name=directory.absolute().name)
        remember_id(directory, "mlflow", str(run.info.run_id))
        mlflow.log_params({name: str(value)[:500] for name, value in flat(as_dict(config))})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        for path in artifacts:
            self.mlflow.log_artifact(str(path))
        self.mlflow.end_run()


class SwanLab:
    """Continues the SwanLab run of this run directory, or begins a new one. SwanLab keeps no files:
    the configuration goes along as values.
    """

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        import swanlab

        # SwanLab wants 21 small letters and digits
        identity = known_id(directory, "swanlab", first_step) or uuid.uuid4().hex[:21]
        self.run: Any = swanlab.init(
            project=project_of(config),
            experiment_name=directory.absolute().name,
            id=identity,
            resume="allow",
            logdir=str(directory / "swanlab"),
            config=as_dict(config),
        )
        remember_id(directory, "swanlab", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        self.run.finish()


class Trackio:
    """Continues the Trackio run of this run directory, or begins a new one. Trackio knows a run by
    its name, and keeps no files of it.
    """

    def __init__(self, directory: Path, config: RunConfig, first_step: int) -> None:
        import trackio

        new = f"{directory.absolute().name}-{uuid.uuid4().hex[:8]}"
        identity = known_id(directory, "trackio", first_step) or new
        self.run: Any = trackio.init(
            project=project_of(config),
            name=identity,
            resume="allow",
            embed=False,
            config=dict(flat(as_dict(config))),
        )
        remember_id(directory, "trackio", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        self.run.finish()


# by the name of the package as well
OPENERS: Mapping[str, Open] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "report": Report,
        "wandb": WandB,
        "mlflow": MLflow,
        "swanlab": SwanLab,
        "trackio": Trackio,
    }
)
