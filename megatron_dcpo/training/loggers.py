"""Where metrics go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, SwanLab, or a
logger by import path.

Each package is imported only where ``logging.to`` names it, and reads its own environment variables
(``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ``SWANLAB_MODE``). A logger that fails while a run
trains is left out from there on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_dcpo.config import Config, as_dict, flat
from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.plugins import check_signature, is_import_path, load_object

logger = logging.getLogger(__name__)

ARTIFACTS = ("config.yaml", "report.html")  # of the run directory
# what verl calls the same number
VERL_NAMES = MappingProxyType(
    {
        "reward/accuracy": "critic/score/mean",
        "loss/policy": "actor/pg_loss",
        "loss/clip_fraction": "actor/pg_clipfrac",
        "loss/kl": "actor/kl_loss",
        "entropy": "actor/entropy",
        "grad_norm/total": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "length/mean": "response_length/mean",
        "length/max": "response_length/max",
        "length/truncated": "response_length/clip_ratio",
        "time/rollout": "timing_s/gen",
        "time/train": "timing_s/update_actor",
        "mfu/train": "perf/mfu/actor",
    }
)


class RunLogger(Protocol):
    """Takes the metrics of a run, on its first process."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite metrics of a step."""

    def finish(self, artifacts: Sequence[Path]) -> None:
        """End the run, however it ended, and keep ``artifacts``: its configuration, and its report
        where there is one.
        """


Open = Callable[
    [Path, Config, int], RunLogger
]  # run directory, configuration, first step that will be logged


def check_loggers(config: Config) -> None:
    """Raise :class:`UserError` for a logger of ``logging.to`` that is unknown, cannot be loaded, or
    is not installed.
    """
    for name in config.logging.to:
        if is_import_path(name):
            check_signature(
                load_object(name, "logging.to"),
                name,
                "logging.to",
                "directory",
                "config",
                "first_step",
            )
        elif name not in OPENERS:
            hint = did_you_mean(name, OPENERS)
            raise UserError(
                f"logging.to={name}: unknown logger{hint}, or write file.py:function of your own"
            )
        elif importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.to={name}, but the package {name} is not installed; pip install {name}, "
                "or take it out of "
                "logging.to"
            )


@contextmanager
def open_loggers(
    directory: Path, config: Config, first_step: int
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Open the loggers of ``logging.to``, which are checked, and yield what hands them the numbers
    of a step; finish them at the end.
    """
    opened: dict[str, RunLogger] = {}

    def each(what: str, call: Callable[[RunLogger], None]) -> None:
        for name, target in list(opened.items()):
            try:
                call(target)
            except Exception as error:
                del opened[name]
                why = f"{type(error).__name__}: {one_line(error, 200)}"
                logger.warning(
                    "logging.to=%s failed to %s (%s); the run goes on without it", name, what, why
                )

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        finite = {
            k: v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)
        }
        if config.logging.verl_names:
            finite |= {verl: finite[ours] for ours, verl in VERL_NAMES.items() if ours in finite}
        each("log", lambda target: target.log(step, finite))

    try:
        for name in config.logging.to:
            opener: Open = (
                load_object(name, "logging.to") if is_import_path(name) else OPENERS[name]
            )
            try:
                opened[name] = opener(directory, config, first_step)
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error, 300)}"
                raise UserError(
                    f"logging.to={name} cannot be opened ({why}); mend it, or take it out of "
                    "logging.to"
                ) from None
        yield log
    finally:
        if opened.keys() - {"tensorboard"}:
            _write_report(directory)
        each(
            "finish",
            lambda target: target.finish([p for a in ARTIFACTS if (p := directory / a).is_file()]),
        )


def _write_report(directory: Path) -> None:
    """Write ``report.html`` of the run for the loggers that keep it. What fails here ends
    no run.
    """
    from megatron_dcpo.evaluation.report import write_report
    from megatron_dcpo.evaluation.runs import find_runs

    try:
        write_report(
            find_runs([str(directory)]), directory / "report.html", directory.absolute().name, []
        )
    except Exception as error:
        logger.warning(
            "no report for logging.to (%s: %s)", type(error).__name__, one_line(error, 200)
        )


def project_of(config: Config) -> str:
    """Return ``logging.project``, or the name of the directory that the run directory is in."""
    return config.logging.project or Path(config.run_dir).absolute().parent.name or "megatron-dcpo"


def run_id(directory: Path) -> str:
    """Return a name that a resumed run has again."""
    return hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]


class TensorBoard:
    """Writes events to ``run_dir/tensorboard``."""

    def __init__(self, directory: Path, config: Config, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        self.writer.close()


class WandB:
    """Continues the Weights & Biases run of this run directory."""

    def __init__(self, directory: Path, config: Config, first_step: int) -> None:
        import wandb

        self.wandb: Any = wandb
        self.run: Any = wandb.init(
            project=project_of(config),
            name=directory.absolute().name,
            id=run_id(directory),
            resume="allow",
            dir=str(directory),
            config=as_dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
        for path in artifacts:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()


class MLflow:
    """Continues the MLflow run whose id is in ``run_dir/mlflow_run_id``."""

    def __init__(self, directory: Path, config: Config, first_step: int) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        known = directory / "mlflow_run_id"
        mlflow.set_experiment(project_of(config))
        if known.is_file():
            mlflow.start_run(run_id=known.read_text().strip())
            return
        run = mlflow.start_run(run_name=directory.absolute().name)
        write_atomically(known, run.info.run_id + "\n")
        mlflow.log_params({name: str(value)[:500] for name, value in flat(as_dict(config))})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        for path in artifacts:
            self.mlflow.log_artifact(str(path))
        self.mlflow.end_run()


class SwanLab:
    """Continues the SwanLab run of this run directory. SwanLab keeps no files: the configuration
    goes along as values.
    """

    def __init__(self, directory: Path, config: Config, first_step: int) -> None:
        import swanlab

        self.run: Any = swanlab.init(
            project=project_of(config),
            experiment_name=directory.absolute().name,
            logdir=str(directory / "swanlab"),
            config=as_dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, artifacts: Sequence[Path]) -> None:
        self.run.finish()


OPENERS: Mapping[str, Open] = MappingProxyType(  # by the name of the package, too
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "swanlab": SwanLab}
)
