"""What a run writes while it trains: ``metrics.jsonl``, samples, loggers, progress on a
terminal.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo import codec
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.config import Config
from megatron_dcpo.judging.source_verifiers import named_sources
from megatron_dcpo.objectives import find_method
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.distributed import Collectives, Topology, broadcast_object
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.dealing import fetch
from megatron_dcpo.training.mismatch import (
    MISMATCH_EDGES,
    Apart,
    mismatch_histogram,
    routing_mismatch,
)
from megatron_dcpo.training.progress import time_left
from megatron_dcpo.training.records import Records, logged_rows, why_refused
from megatron_dcpo.training.step_metrics import (
    abstention_metrics,
    source_metrics,
    step_metrics,
    utilization,
)
from megatron_dcpo.training.trainer import UpdateStatistics
from megatron_dcpo.training.warnings import new_warnings, warnings_of_the_start
from megatron_dcpo.types import BLOCKS, ResponseKey, TrainingSample, replaced

logger = logging.getLogger(__name__)

SAMPLES_PER_STEP = 32  # judged responses written
Piece = tuple[str, str, float | None] | tuple[str, str, float | None, float]


@dataclass(frozen=True)
class Texts:
    """``decode`` turns token ids into text, special tokens included; one of ``eos_ids`` that ends a
    response is no part of its text.
    """

    decode: Callable[[Sequence[int]], str]
    eos_ids: Collection[int]

    def of_response(self, token_ids: Sequence[int]) -> str:
        has_ended = len(token_ids) > 0 and token_ids[-1] in self.eos_ids
        return self.decode(token_ids[:-1] if has_ended else token_ids)


class Recorder(Records):
    """Writes on rank 0; on the other ranks a call only takes part in what is collective.

    Files are open inside ``with recorder.from_step(n)``. ``texts`` are those of responses.
    ``saver`` gives up the checkpoint of a step whose records the disk refuses.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        policy: Policy,
        texts: Texts,
        topology: Topology,
        timers: Timers,
        saver: Saver,
    ) -> None:
        super().__init__(
            directory=directory,
            config=config,
            topology=topology,
            saver=saver,
            by_step=("metrics.jsonl", "mismatch.jsonl"),
        )
        self.config = config
        self.policy = policy
        self.texts = texts
        self.timers = timers
        self.mismatch_path = directory / "mismatch.jsonl"
        self.sources = list(named_sources(config)) if len(config.data.sources) > 1 else []

    def warnings_of_the_start(self) -> list[str]:
        """Return what is odd about the run before its first step."""
        return warnings_of_the_start(self.directory, self.config.objective)

    def logged_validations(self, done: int) -> dict[int, dict[str, float]]:
        """Return ``evaluation/BENCHMARK/METRIC`` of the validations up to the step ``done``, by
        step, from ``metrics.jsonl``. Collective.
        """
        validations: dict[int, dict[str, float]] = {}
        rows = logged_rows(self.metrics_path) if self.writes else []
        for row in rows:
            metrics = {
                name: math.nan if value is None else float(value)
                for name, value in row.items()
                if name.startswith("evaluation/")
            }
            if metrics and row["step"] <= done:
                validations[row["step"]] = metrics
        return broadcast_object(validations)

    def log(
        self,
        step: int,
        samples: Sequence[TrainingSample],
        statistics: UpdateStatistics,
        measured: Mapping[str, float],
    ) -> None:
        """Record one step and clear the timers. Collective. ``measured`` are the metrics that other
        parts counted.

        The records are on the disk when this returns. Raises :class:`UserError` on every rank when
        the disk refuses, after the checkpoint of an earlier step is complete; that of this step is
        given up, so that a resumed run does the step again and records it.
        """
        shown = list(samples[: self.samples_shown(step)])
        if shown:
            wanted = range(len(shown)) if self.writes else ()
            shown = fetch(shown, wanted, Collectives())
        refused: str | None = None
        if self.writes:
            metrics = self._metrics(step, samples, statistics, measured)
            try:
                self.append(self.metrics_path, metrics)
                self._hand_on(step, metrics)
                if shown:
                    self._write_samples(step, shown, statistics.apart)
                histogram = mismatch_histogram(statistics.sums)
                edges = list(MISMATCH_EDGES)
                self.append(self.mismatch_path, {"step": step, "edges": edges, **histogram})
            except OSError as error:
                refused = why_refused(error)
        self.timers.clear()
        self.end_if(refused, step)

    def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """Record the validation of a step whose training is not recorded now: before the first one,
        or cut short by a signal. Collective; raises as :meth:`log` does.
        """
        refused: str | None = None
        if self.writes and measured:
            rows = logged_rows(self.metrics_path)
            row: dict[str, Any] = {"step": step}
            if rows and rows[-1]["step"] == step:
                row = rows.pop()
            lines = [json.dumps(json_ready(each)) + "\n" for each in (*rows, {**row, **measured})]
            try:
                write_atomically(self.metrics_path, "".join(lines))
                self.to_loggers(step, measured)
                self.progress.log_validation(step, measured)
            except OSError as error:
                refused = why_refused(error)
        self.end_if(refused, step)

    def write_validation(self, step: int, write: Callable[[Path], None]) -> None:
        """Write ``evaluation/step_000010.jsonl``, which ``dcpo evaluate --samples`` reads.

        A full disk is a warning here; when the records of the step do not fit either, they end the
        run on all ranks.
        """
        if not self.writes:
            return
        path = self.directory / "evaluation" / f"step_{step:06d}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            write(path)
        except OSError as refused:
            logger.warning("cannot write %s (%s)", path, refused.strerror)

    def _metrics(
        self,
        step: int,
        samples: Sequence[TrainingSample],
        statistics: UpdateStatistics,
        measured: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return the row of ``metrics.jsonl``."""
        abstains = find_method(self.config.objective.name).abstention
        params_dtype = self.config.model.params_dtype
        metrics: dict[str, Any] = {"step": step}
        metrics |= step_metrics(samples, statistics, self.timers)
        metrics |= measured
        metrics |= utilization(self.policy, statistics.trained, self.timers)
        metrics |= source_metrics(samples, self.sources)
        metrics |= abstention_metrics(samples, abstains)
        metrics |= routing_mismatch(self.policy.arch, params_dtype, statistics.sums)
        # the *_busy timers overlap phases
        phases = {
            phase: seconds
            for phase, seconds in self.timers.seconds.items()
            if not phase.endswith("_busy")
        }
        seconds = sum(phases.values())
        metrics["time/step"] = seconds
        metrics["tokens/s/step"] = metrics["length/mean"] * len(samples) / max(seconds, 1e-9)
        return metrics

    def _hand_on(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a row to loggers, watchers and the terminal."""
        self.to_loggers(step, metrics)
        self.progress.log_validation(step, metrics)
        self.rows.append(dict(metrics))
        for text in new_warnings(self.directory, self.rows):
            logger.warning("step %d: %s", step, text)
        left = time_left(self.rows, self.config.training.steps - step)
        self.progress.log_step(step, metrics, left)

    def samples_shown(self, step: int) -> int:
        """Return how many responses of a step are written at most."""
        interval = self.config.logging.samples_interval
        due = interval and (step in (1, self.config.training.steps) or step % interval == 0)
        return SAMPLES_PER_STEP if due else 0

    def _write_samples(
        self,
        step: int,
        samples: Sequence[TrainingSample],
        apart: Mapping[ResponseKey, Apart],
    ) -> None:
        directory = self.directory / "samples"
        directory.mkdir(exist_ok=True)
        lines = []
        for sample in samples:
            row = sample_row(sample, step, self.texts, apart.get(sample.response.key, {}))
            lines.append(json.dumps(json_ready(row), ensure_ascii=False) + "\n")
        write_atomically(directory / f"step_{step:06d}.jsonl", "".join(lines))


def sample_row(
    sample: TrainingSample, step: int, texts: Texts, apart: Mapping[int, float]
) -> codec.Row:
    """Return a judged response as a line of ``samples/step_*.jsonl``: a row of the codec, the step
    that trains on it, and its ``pieces``.
    """
    response = sample.response
    if response.text is None:
        text = texts.of_response(response.token_ids[response.branch_tokens :].tolist())
        response = replaced(response, text=text)
    row = codec.to_row(sample.prompt, response, sample.judgement)
    row["training_step"] = step
    row["pieces"] = token_pieces(sample, texts.decode, apart)
    return row


def token_pieces(
    sample: TrainingSample, decode: Callable[[Sequence[int]], str], apart: Mapping[int, float]
) -> list[Piece]:
    """Return the response in runs of tokens that share block and advantage, as (text, block,
    advantage); the advantage is None if the response was not scored. A token at a place of
    ``apart`` is a run by itself, with |engine - trainer| of its log-prob. Branches are left out.
    """
    begin = sample.response.branch_tokens
    ids = sample.response_ids.tolist()
    if sample.block_ids is None or sample.advantages is None:
        boundary = sample.judgement.boundary
        return [
            (decode(ids[begin:boundary]), "reasoning", None),
            (decode(ids[boundary:]), "confidence", None),
        ]
    ids = ids[begin:]
    names = {index: block for block, index in BLOCKS.items()}
    blocks = [names.get(index, "other") for index in sample.block_ids[begin:].tolist()]
    advantages = np.round(sample.advantages[begin:], 4).tolist()
    places = [place if place in apart else None for place in range(begin, begin + len(ids))]
    marks = zip(blocks, advantages, places, strict=True)
    pieces: list[Piece] = []
    for (block, advantage, place), run in groupby(zip(ids, marks, strict=True), key=itemgetter(1)):
        text = decode([token for token, _ in run])
        if place is None:
            pieces.append((text, block, advantage))
        else:
            pieces.append((text, block, advantage, round(apart[place], 4)))
    return pieces
