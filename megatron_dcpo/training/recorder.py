"""What a run leaves behind while it trains: ``metrics.jsonl``, samples, loggers, progress on a
terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo import codec
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.checkpoints.saver import Saver, last_complete
from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import named_sources
from megatron_dcpo.evaluation.run_description import seconds_left
from megatron_dcpo.objectives import find_method
from megatron_dcpo.planning.plan import Machine, make_plan
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.distributed import Topology, broadcast_object
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.loggers import open_loggers
from megatron_dcpo.training.metrics import (
    abstention_metrics,
    source_metrics,
    step_metrics,
    utilization,
)
from megatron_dcpo.training.mismatch import MISMATCH_EDGES, mismatch_histogram, routing_mismatch
from megatron_dcpo.training.provenance import record_start
from megatron_dcpo.training.updater import UpdateStatistics
from megatron_dcpo.training.warnings import new_warnings
from megatron_dcpo.types import BLOCKS, TrainingSample, replaced

logger = logging.getLogger(__name__)

SAMPLES_PER_STEP = 32  # judged responses written


class Recorder:
    """Writes on rank 0 only; on the other ranks every call is a no-op. Files are open inside ``with
    recorder.from_step(n)``.

    ``decode``: token ids -> text. ``saver``: waited for before a full disk ends the run.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        policy: Policy,
        decode: Callable[[Sequence[int]], str],
        topology: Topology,
        timers: Timers,
        saver: Saver,
    ) -> None:
        self.directory, self.config, self.policy, self.decode = directory, config, policy, decode
        self.timers, self.saver = timers, saver
        self.writes, self.processes = topology.rank == 0, topology.world_size
        self.metrics_path, self.mismatch_path = (
            directory / "metrics.jsonl",
            directory / "mismatch.jsonl",
        )
        self.sources = list(named_sources(config)) if len(config.data.sources) > 1 else []
        self.planned = planned_memory(config, topology.world_size) if self.writes else {}
        self.rows: list[dict[str, Any]] = []  # what the watchers see
        self.warned: list[str] = []  # after the last step
        self.to_loggers: Callable[[int, Mapping[str, Any]], None] = lambda step, metrics: None
        self.progress: Any = None

    @contextmanager
    def from_step(self, first_step: int) -> Iterator[None]:
        """Open the records, without those of steps that will be done again. Raises
        :class:`UserError`.
        """
        if not self.writes:
            yield
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            record_start(self.directory, self.config, self.processes, first_step - 1)
            for path in (self.metrics_path, self.mismatch_path):
                _keep_steps_before(path, first_step)
            self.rows = logged_rows(self.metrics_path)
        except OSError as refused:
            raise UserError(
                f"cannot write in run_dir {self.directory} ({_why(refused)}); free space or "
                "change run_dir"
            ) from None
        with ExitStack() as stack:
            self.to_loggers = stack.enter_context(
                open_loggers(self.directory, self.config, first_step)
            )
            if sys.stderr.isatty():
                self.progress = _progress_bar(self.config.training.steps, first_step - 1)
                stack.callback(self.progress.stop)
            yield

    def log(
        self,
        step: int,
        samples: Sequence[TrainingSample],
        statistics: UpdateStatistics,
        measured: Mapping[str, float],
    ) -> None:
        """Record one step and clear the timers. Collective. ``measured``: what the other parts
        counted.

        Raises :class:`UserError` on every rank when the disk refuses, after the checkpoint on its
        way is complete.
        """
        refused: str | None = None
        if self.writes:
            timers, sums = self.timers, statistics["sums"]
            metrics = {"step": step, **step_metrics(samples, statistics, timers), **measured}
            metrics |= utilization(self.policy, statistics["computed"], timers) | self.planned
            metrics |= source_metrics(samples, self.sources)
            metrics |= abstention_metrics(
                samples, find_method(self.config.objective.name).abstention
            )
            metrics |= routing_mismatch(self.policy.arch, self.config.model.params_dtype, sums)
            # what is busy runs beside a phase
            seconds = sum(
                value for phase, value in timers.seconds.items() if not phase.endswith("_busy")
            )
            metrics["time/step"] = seconds
            metrics["tokens/s/step"] = metrics["length/mean"] * len(samples) / max(seconds, 1e-9)
            try:
                self._log(step, samples, metrics)
                self._write_mismatch(step, mismatch_histogram(sums))
            except OSError as error:
                refused = _why(error)
        self.timers.clear()
        self._end_if(refused, step)

    def _end_if(self, refused: str | None, step: int) -> None:
        if (refused := broadcast_object(refused)) is not None:
            self.saver.wait()  # says so itself if that one was refused too
            raise UserError(
                f"cannot write the records of step {step} in {self.directory} ({refused}); "
                f"{last_complete(self.saver.directory)}. Free space, and continue with --resume "
                "auto"
            )

    def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """Record the validation of a step whose training is not recorded now: before the first one,
        or cut short by a signal. Collective; raises as :meth:`log` does.
        """
        refused: str | None = None
        if self.writes and measured:
            rows = logged_rows(self.metrics_path)
            row: dict[str, Any] = (
                rows.pop() if rows and rows[-1]["step"] == step else {"step": step}
            )
            lines = [json.dumps(json_ready(each)) + "\n" for each in (*rows, {**row, **measured})]
            try:
                write_atomically(self.metrics_path, "".join(lines))
                self._scalars(step, measured)
            except OSError as error:
                refused = _why(error)
        self._end_if(refused, step)

    def _scalars(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.to_loggers(step, metrics)
        if held_out := evaluation_line(metrics):
            logger.info("step %d  held out: %s", step, held_out)

    def _log(
        self, step: int, samples: Sequence[TrainingSample], metrics: Mapping[str, Any]
    ) -> None:
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(json_ready(metrics)) + "\n")
        self._scalars(step, metrics)
        self.rows.append(dict(metrics))
        self.warned = new_warnings(self.directory, self.rows)
        for text in self.warned:
            logger.warning("step %d: %s", step, text)
        interval = self.config.logging.samples_interval
        if interval and (step == 1 or step % interval == 0 or step == self.config.training.steps):
            self._write_samples(step, samples)
        line = (
            f"acc {metrics['reward/accuracy']:.3f}  conf {metrics['confidence/mean']:.3f}  "
            f"ECE {metrics['calibration/ece']:.3f}  AUROC {metrics['calibration/auroc']:.3f}  "
            f"length {metrics['length/mean']:.0f}"
        )
        speed = f"{metrics['tokens/s/step']:,.0f} tokens/s"
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=step, line=f"{line}  {speed}")
            return
        total, seconds = self.config.training.steps, metrics["time/step"]
        probed = (
            ", the gradient probe's pass included" if metrics["grad_norm/reasoning"] >= 0 else ""
        )
        rest = seconds_left(self.rows, total - step)
        left = f"  {timedelta(seconds=round(rest))} left" if rest else ""
        loss = metrics["loss/policy"]
        logger.info(
            "step %d/%d  %s  loss %+.4f  %.2f s  %s%s%s",
            step,
            total,
            line,
            loss,
            seconds,
            speed,
            left,
            probed,
        )

    def _write_mismatch(self, step: int, counts: Mapping[str, list[int]]) -> None:
        """Write the histogram of |engine - trainer| log-probs of the sampled tokens, per block."""
        with self.mismatch_path.open("a") as file:
            file.write(json.dumps({"step": step, "edges": list(MISMATCH_EDGES), **counts}) + "\n")

    def _write_samples(self, step: int, samples: Sequence[TrainingSample]) -> None:
        directory = self.directory / "samples"
        directory.mkdir(exist_ok=True)
        with (directory / f"step_{step:06d}.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples[:SAMPLES_PER_STEP]:
                row = sample_row(sample, step, self.decode)
                file.write(json.dumps(json_ready(row), ensure_ascii=False) + "\n")


def sample_row(
    sample: TrainingSample, step: int, decode: Callable[[Sequence[int]], str]
) -> codec.Row:
    """Return a judged response as a line of ``samples/step_*.jsonl``: a row of the codec, the step
    that trains on it, and its ``pieces``.
    """
    response = sample.response
    if response.text is None:
        ids = response.token_ids.tolist()
        # the last token of a finished response ends it, and is no part of its text
        text = decode(ids[:-1] if response.finish_reason == "stop" else ids)
        response = replaced(response, text=text)
    row = codec.to_row(sample.prompt, response, sample.judgement)
    row["training_step"] = step
    row["pieces"] = token_pieces(sample, decode)
    return row


def token_pieces(
    sample: TrainingSample, decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str, float | None]]:
    """Return the response in runs of tokens that share block and advantage, as (text, block,
    advantage); the advantage is None if the response was not scored.
    """
    ids = sample.response_ids.tolist()
    if sample.block_ids is None or sample.advantages is None:
        boundary = sample.judgement.boundary
        return [
            (decode(ids[:boundary]), "reasoning", None),
            (decode(ids[boundary:]), "confidence", None),
        ]
    names = {index: block for block, index in BLOCKS.items()}
    blocks = [names.get(index, "other") for index in sample.block_ids.tolist()]
    advantages = np.round(sample.advantages, 4).tolist()
    marks = zip(blocks, advantages, strict=True)
    pieces: list[tuple[str, str, float | None]] = []
    for (block, advantage), run in groupby(zip(ids, marks, strict=True), key=itemgetter(1)):
        tokens = [token for token, _ in run]
        pieces.append((decode(tokens), block, advantage))
    return pieces


def _why(error: OSError) -> str:
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def planned_memory(config: Config, gpus: int) -> dict[str, float]:
    """Return ``memory/planned/PHASE`` in GB on a GPU: what ``dcpo plan`` says of the fullest,
    beside the measured ``memory/PHASE/device``.
    """
    if not capabilities().separate_memory:
        return {}
    plan = make_plan(config, Machine(gpus=gpus))
    peaks = {"train": plan.largest.total, "save": plan.saving_bytes, "rollout": plan.rollout_bytes}
    return {f"memory/planned/{phase}": peak / 1e9 for phase, peak in peaks.items()}


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Drop the records of steps that will be done again: a killed run has usually logged past its
    last checkpoint.
    """
    if path.exists():
        kept = [row for row in logged_rows(path) if row["step"] < first_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def logged_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` or ``mismatch.jsonl`` that have a step; without the line
    that a kill cut off.
    """
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            row = parse_json(line)
            rows.append(row | {"step": int(row["step"])})
    return rows


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """Return the accuracy and ECE of every benchmark that was validated, in words."""
    names = [
        key.split("/")[1]
        for key in metrics
        if key.startswith("evaluation/") and key.endswith("/accuracy")
    ]
    shown = (("acc", "accuracy"), ("ECE", "ece"))
    return "; ".join(
        f"{name} "
        + "  ".join(f"{label} {metrics[f'evaluation/{name}/{key}']:.3f}" for label, key in shown)
        for name in names
    )


def _progress_bar(total: int, completed: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(12),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[line]}"),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("train", total=total, completed=completed, line="")
    progress.start()
    return progress
