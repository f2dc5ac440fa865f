"""What a run leaves behind while it trains: ``metrics.jsonl``, samples, TensorBoard, progress on a terminal."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.calibration import json_ready, summarize
from megatron_dcpo.checkpoints.saver import last_complete
from megatron_dcpo.config import Config, as_dict, to_yaml
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.plan import Machine, make_plan
from megatron_dcpo.planning.traffic import sequence_flops
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import capabilities, peak_tflops
from megatron_dcpo.runtime.distributed import broadcast_object
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.preflight import check_wandb
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.training.sampling import TrainingSample
from megatron_dcpo.training.update import MISMATCH_EDGES, UpdateStatistics, mismatch_histogram, routing_mismatch
from megatron_dcpo.types import BLOCKS, MALFORMED, TokenAdvantages

logger = logging.getLogger(__name__)

COSINES = ("grad_cosine/reasoning_confidence", "grad_cosine_fisher/reasoning_confidence")


class Recorder:
    """Writes on rank 0 only; on the other ranks every call is a no-op. A context manager."""

    def __init__(self, run: TrainingRun, first_step: int) -> None:
        self.run = run
        self.writes = run.topology.rank == 0
        self.tensorboard: Any = None
        self.wandb: Any = None
        self.progress: Any = None
        if not self.writes:
            return
        self.metrics_path = run.directory / "metrics.jsonl"
        self.mismatch_path = run.directory / "mismatch.jsonl"
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            (run.directory / "config.yaml").write_text(to_yaml(run.config))
            for path in (self.metrics_path, self.mismatch_path):
                _keep_steps_before(path, first_step)
        except OSError as refused:
            raise UserError(
                f"cannot write in run_dir {run.directory} ({_why(refused)}); free space or change run_dir"
            ) from None
        self.planned = planned_memory(run.config, run.topology.world_size) if self.writes else {}
        if run.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(run.directory / "tensorboard"), purge_step=first_step)
        if run.config.logging.wandb_project:
            self.wandb = _wandb_run(run)
        if sys.stderr.isatty():
            self.progress = _progress_bar(run.config.training.steps, first_step - 1)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.progress is not None:
            self.progress.stop()

    def log(
        self,
        step: int,
        statistics: UpdateStatistics,
        timers: Timers,
        traffic: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step and clear the timers. Collective. ``traffic``: what rollout and weight synchronisation counted.

        Raises :class:`UserError` on every rank when the disk refuses, after the checkpoint on its way is complete.
        """
        refused: str | None = None
        if self.writes:
            metrics = {"step": step, **step_metrics(statistics, timers), **(traffic or {})}
            metrics |= utilization(self.run.policy, statistics.samples, timers) | self.planned
            metrics |= routing_mismatch(self.run.policy.arch, self.run.config.model.params_dtype, statistics.sums)
            try:
                overlapped = timers.seconds.get("judge_busy", 0.0)
                self._log(step, statistics.samples, metrics, sum(timers.seconds.values()) - overlapped)
                self._write_mismatch(step, mismatch_histogram(statistics.sums))
            except OSError as error:
                refused = _why(error)
        timers.clear()
        self._end_if(refused, step)

    def _end_if(self, refused: str | None, step: int) -> None:
        if (refused := broadcast_object(refused)) is not None:
            self.run.saver.wait()  # says so itself if that one was refused too
            raise UserError(
                f"cannot write the records of step {step} in {self.run.directory} ({refused}); "
                f"{last_complete(self.run.checkpoints)}. Free space, and continue with --resume auto"
            )

    def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """The validation of a step whose training is not recorded now: before the first one, or cut short by a signal.
        Collective; raises as :meth:`log` does."""
        refused: str | None = None
        if self.writes and measured:
            rows = logged_rows(self.metrics_path)
            row: dict[str, Any] = rows.pop() if rows and rows[-1]["step"] == step else {"step": step}
            lines = [json.dumps(json_ready(each)) + "\n" for each in (*rows, {**row, **measured})]
            try:
                write_atomically(self.metrics_path, "".join(lines))
                self._scalars(step, measured)
            except OSError as error:
                refused = _why(error)
        self._end_if(refused, step)

    def _scalars(self, step: int, metrics: Mapping[str, Any]) -> None:
        finite = {k: v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        if self.tensorboard is not None:
            for key, value in finite.items():
                self.tensorboard.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(finite, step=step)
        if held_out := evaluation_line(metrics):
            logger.info("step %d  held out: %s", step, held_out)

    def _log(self, step: int, samples: Sequence[TrainingSample], metrics: Mapping[str, Any], seconds: float) -> None:
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(json_ready(metrics)) + "\n")
        self._scalars(step, metrics)
        interval = self.run.config.logging.samples_interval
        if interval and (step == 1 or step % interval == 0 or step == self.run.config.training.steps):
            self._write_samples(step, samples)
        line = (
            f"acc {metrics['reward/accuracy']:.3f}  conf {metrics['confidence/mean']:.3f}  "
            f"ECE {metrics['calibration/ece']:.3f}  AUROC {metrics['calibration/auroc']:.3f}"
        )
        if self.progress is not None:
            speed = metrics["length/mean"] * len(samples) / max(seconds, 1e-9)
            self.progress.update(self.progress.task_ids[0], completed=step, line=f"{line}  {speed:,.0f} tokens/s")
        else:
            total = self.run.config.training.steps
            logger.info("step %d/%d  %s  loss %+.4f  %.2f s", step, total, line, metrics["loss/policy"], seconds)

    def _write_mismatch(self, step: int, counts: Mapping[str, list[int]]) -> None:
        """Histogram of |engine - trainer| log-probs of the sampled tokens, per block."""
        with self.mismatch_path.open("a") as file:
            file.write(json.dumps({"step": step, "edges": list(MISMATCH_EDGES), **counts}) + "\n")
        if self.tensorboard is not None:
            for block, numbers in counts.items():
                tokens = max(sum(numbers), 1)
                for edge, at_least in zip(MISMATCH_EDGES, np.cumsum(numbers[::-1])[::-1][1:], strict=True):
                    self.tensorboard.add_scalar(f"engine/share_above_{edge:g}_{block}", at_least / tokens, step)

    def _write_samples(self, step: int, samples: Sequence[TrainingSample]) -> None:
        directory = self.run.directory / "samples"
        directory.mkdir(exist_ok=True)
        decode = self.run.tokenizer.decode
        with (directory / f"step_{step:06d}.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples[: self.run.config.logging.samples_per_step]:
                prompt, response, judgement = sample.prompt, sample.response, sample.judgement
                ids = response.token_ids.tolist()
                record = {
                    "step": step,
                    "prompt_id": response.prompt_id,
                    "problem": prompt.messages[-1]["content"],
                    "ground_truth": prompt.ground_truth,
                    "reasoning": decode(ids[: judgement.boundary]),
                    "confidence_block": decode(ids[judgement.boundary :]),
                    "pieces": token_pieces(ids, sample.tokens, decode),
                    "correct": judgement.correct,
                    "confidence": judgement.confidence,
                    "status": judgement.status,
                    "finish_reason": response.finish_reason,
                }
                file.write(json.dumps(json_ready(record), ensure_ascii=False) + "\n")


def token_pieces(
    ids: Sequence[int], tokens: TokenAdvantages | None, decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str, float]]:
    """(text, block, advantage) of the tokens of a response that follow one another and have both in common."""
    if tokens is None:
        return []
    names = {index: block for block, index in BLOCKS.items()}
    marks = zip(tokens.block_ids.tolist(), np.round(tokens.advantages, 4).tolist(), strict=True)
    return [
        (decode([token for token, _ in run]), names.get(block, "other"), advantage)
        for (block, advantage), run in groupby(zip(ids, marks, strict=True), key=itemgetter(1))
    ]


def _why(error: OSError) -> str:
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def _wandb_run(run: TrainingRun) -> Any:
    """A Weights & Biases run that a resumed training continues. Raises :class:`UserError` without the package."""
    check_wandb(run.config)
    import wandb

    name = "-".join(run.directory.absolute().parts[-2:])
    identity = hashlib.sha256(str(run.directory.absolute()).encode()).hexdigest()[:16]
    return wandb.init(
        project=run.config.logging.wandb_project,
        name=name,
        id=identity,
        resume="allow",
        dir=str(run.directory),
        config=as_dict(run.config),
    )


def step_metrics(statistics: UpdateStatistics, timers: Timers) -> dict[str, Any]:
    """The record of one step, under the names of the field. Undefined values are NaN here and null in the file."""
    samples = statistics.samples
    judgements = [sample.judgement for sample in samples]
    summary = summarize(
        [j.confidence for j in judgements], [j.correct for j in judgements], statuses=[j.status for j in judgements]
    )
    lengths = [len(sample.response_ids) for sample in samples]
    r_c = np.array([sample.R_c for sample in samples])
    sums, tokens = statistics.sums, max(statistics.sums.get("engine/tokens", 0.0), 1.0)
    unmeasured = dict.fromkeys(("grad_norm/reasoning", "grad_norm/confidence", *COSINES), math.nan)
    seconds = timers.seconds
    return {
        "reward/accuracy": summary["accuracy"],
        "reward/calibration": float(np.nanmean(r_c)) if np.isfinite(r_c).any() else math.nan,
        "confidence/mean": summary["mean_confidence"],
        "confidence/std": summary["std_confidence"],
        "format/violation_rate": summary["violation_rate"],
        **{f"format/{kind}": summary["violations"][kind] for kind in MALFORMED},
        "format/no_answer": float(np.mean([not j.answered for j in judgements])),
        "calibration/ece": summary["ece"],
        "calibration/pce": summary["pce"],
        "calibration/brier": summary["brier"],
        "calibration/auroc": summary["auroc"],
        "length/mean": float(np.mean(lengths)),
        "length/max": int(max(lengths)),
        "length/truncated": float(np.mean([s.response.finish_reason == "length" for s in samples])),
        "loss/policy": _mean(statistics.losses),
        **_loss_metrics(sums),
        "grad_norm/total": _mean(statistics.grad_norms),
        **(unmeasured | statistics.block_gradients),
        "engine/kl": sums.get("engine/kl", 0.0) / tokens,
        "engine/logprob_diff_mean": sums.get("engine/abs", 0.0) / tokens,
        **{
            f"engine/logprob_diff_mean_{block}": sums.get(f"engine/abs/{block}", 0.0)
            / max(sums.get(f"engine/tokens/{block}", 0.0), 1.0)
            for block in BLOCKS
        },
        **statistics.maxima,
        "learning_rate": statistics.learning_rate,
        "updates/skipped": statistics.skipped,
        **{f"tokens/s/{phase}": sum(lengths) / seconds[phase] for phase in ("rollout", "train") if seconds.get(phase)},
        **{f"time/{phase}": value for phase, value in seconds.items()},
        **{f"memory/{name}": value for name, value in timers.memory.items()},
    }


def utilization(policy: Policy, samples: Sequence[TrainingSample], timers: Timers) -> dict[str, float]:
    """Of the training phase on a GPU of known speed: ``mfu/train``, model arithmetic (forward and backward of every
    token once, without recomputation) per second and GPU over the card's dense bf16 peak, and ``tflops/train``."""
    peak, seconds = peak_tflops(), timers.seconds.get("train")
    if peak is None or not seconds:
        return {}
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    forward = sum(sequence_flops(policy.arch, policy.layout, length, length) for length in lengths)
    reached = 3 * forward / seconds / policy.topology.world_size / 1e12
    return {"tflops/train": reached, "mfu/train": reached / peak}


def planned_memory(config: Config, gpus: int) -> dict[str, float]:
    """``memory/planned/PHASE`` in GB on a GPU: what ``dcpo plan`` says of the fullest, beside the measured
    ``memory/PHASE/device``."""
    if not capabilities().separate_memory:
        return {}
    plan = make_plan(config, Machine(gpus=gpus))
    peaks = {"train": plan.largest.total, "save": plan.saving_bytes, "rollout": plan.rollout_bytes}
    return {f"memory/planned/{phase}": peak / 1e9 for phase, peak in peaks.items()}


def _mean(values: list[float]) -> float:
    """Of the updates that were taken; undefined when all were skipped."""
    return float(np.mean(values)) if values else math.nan


def _loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means of the objective's statistics over all tokens and per block."""
    tokens = {block: max(sums.get(f"tokens/{block}", 0.0), 1.0) for block in BLOCKS}

    def mean(name: str) -> dict[str, float]:
        total = sum(sums.get(f"{name}/{block}", 0.0) for block in tokens) / sum(tokens.values())
        return {"": total} | {f"_{block}": sums.get(f"{name}/{block}", 0.0) / count for block, count in tokens.items()}

    measured = {"clipped": "loss/clip_fraction", "ratio": "loss/ratio", "entropy": "entropy", "kl": "loss/kl"}
    present = [name for name in (*measured, "tis_weight") if any(f"{name}/{block}" in sums for block in tokens)]
    return {measured.get(name, name) + suffix: value for name in present for suffix, value in mean(name).items()}


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Drop the records of steps that will be done again: a killed run has usually logged past its last checkpoint."""
    if path.exists():
        kept = [row for row in logged_rows(path) if row["step"] < first_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def logged_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` or ``mismatch.jsonl`` that have a step; without the line that a kill cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            row = parse_json(line)
            rows.append(row | {"step": int(row["step"])})
    return rows


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """Accuracy and ECE of every benchmark that was validated, in words."""
    names = [key.split("/")[1] for key in metrics if key.startswith("evaluation/") and key.endswith("/accuracy")]
    shown = (("acc", "accuracy"), ("ECE", "ece"))
    return "; ".join(
        f"{name} " + "  ".join(f"{label} {metrics[f'evaluation/{name}/{key}']:.3f}" for label, key in shown)
        for name in names
    )


def _progress_bar(total: int, completed: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
