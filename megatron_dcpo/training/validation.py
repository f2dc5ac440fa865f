"""Validation while training: held-out problems, sampled by the run's engines with the weights of a
step.

The run stays as it is, bit for bit: random numbers are counted, an engine forgets the prompts,
nothing is trained. What was measured is in ``metrics.jsonl``, from where a resumed run has it; the
best checkpoint and an early stop follow from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_dcpo.checkpoints.manifest import iterations
from megatron_dcpo.config import Config
from megatron_dcpo.evaluation.best_step import improves, value_of
from megatron_dcpo.evaluation.held_out import HeldOut
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.rollout import SamplingConfig
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import (
    Topology,
    all_gather_objects,
    broadcast_object,
    max_over_ranks,
)
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.checkpointer import Checkpointer
from megatron_dcpo.training.recorder import logged_rows
from megatron_dcpo.training.sampler import Sampler, engine_of_rank
from megatron_dcpo.training.weight_sync import WeightSync
from megatron_dcpo.types import Response, ResponseKey

logger = logging.getLogger(__name__)


class Validator:
    """Measures the policy on ``held_out`` problems, when ``idle`` returns, which waits for the
    engine. All methods are collective.

    ``measured``: ``evaluation/BENCHMARK/METRIC`` of the validations so far, by step; ``best_step``:
    of the checkpoint that ``training.keep_best`` keeps.
    """

    def __init__(
        self,
        held_out: HeldOut,
        sampler: Sampler,
        idle: Callable[[], None],
        weight_sync: WeightSync,
        checkpointer: Checkpointer,
        topology: Topology,
        timers: Timers,
        directory: Path,
        config: Config,
    ) -> None:
        self.held_out, self.sampler, self.engine = held_out, sampler, sampler.engine
        self.idle, self.weight_sync, self.checkpointer, self.topology = (
            idle,
            weight_sync,
            checkpointer,
            topology,
        )
        self.timers, self.directory, self.config = timers, directory, config
        self.measured: dict[int, dict[str, float]] = {}
        self.best_step: int | None = None

    def validate(self, step: int) -> dict[str, float]:
        """Return ``evaluation/BENCHMARK/METRIC`` of the policy after ``step``, which the engines
        have; nothing where that is not due, is known, or was cut short by a signal.
        """
        if not self._is_due(step) or step in self.measured:
            return {}
        self.idle()
        with self.timers("evaluation"):
            responses = self._generate(step)
            if max_over_ranks(signals.stop_requested() or 0):
                return {}
            own = self.held_out.judged(responses, self.engine.eos_token_ids)
            samples = [sample for part in all_gather_objects(own) for sample in part]
            self.measured[step] = broadcast_object(self.held_out.metrics(samples))
            self._write(step, samples)
        self._note_best(step)
        return self.measured[step]

    def restore(self, done: int) -> None:
        """Read what a resumed run has measured up to the step ``done``, and which checkpoint is the
        best.
        """
        rows = logged_rows(self.directory / "metrics.jsonl") if self.topology.rank == 0 else ()
        logged: dict[int, dict[str, float]] = {}
        for row in rows:
            values = {
                k: np.nan if v is None else float(v)
                for k, v in row.items()
                if k.startswith("evaluation/")
            }
            if values and row["step"] <= done:
                logged[row["step"]] = values
        saver = self.checkpointer.saver
        self.measured, present = broadcast_object((logged, iterations(saver.directory)))
        for step in present:
            if step in self.measured and step not in saver.damaged:
                self._note_best(step)

    def save_best(self, step: int) -> None:
        """Checkpoint after ``step`` where that is the best so far and the schedule has saved none."""
        if self.best_step == step and self.checkpointer.saved_step != step:
            self.checkpointer.save_now(step)
            self.weight_sync.push(version=step)

    def stop_early(self, done: int) -> bool:
        """Return whether ``training.early_stop`` ends the run after ``done`` steps; its checkpoint
        is then complete.
        """
        patience, word = self.config.training.early_stop, self.config.training.keep_best
        if not patience or done == self.config.training.steps:
            return False
        best, since = None, 0
        for step in sorted(self.measured.keys() - {0}):
            if improves(word, self.measured[step], self.measured[best] if best else None):
                best, since = step, 0
            else:
                since += 1
        if since < patience:
            return False
        self.checkpointer.save_now(done)
        self.checkpointer.saver.wait()
        if self.topology.rank == 0:
            than = (
                f"{value_of(self.measured[best], word):.4g} after step {best}"
                if best
                else "an undefined value"
            )
            logger.info(
                "stopped early after step %d, saved: %s is not better than %s in %d validations "
                "(training.early_stop)",
                *(done, word, than, since),
            )
        return True

    def _is_due(self, step: int) -> bool:
        options = self.config.evaluation
        return step % options.interval == 0 or step == self.config.training.steps

    def _note_best(self, step: int) -> None:
        """Note ``step`` where it is the best of those that have, or get, a checkpoint."""
        word, before = self.config.training.keep_best, self.best_step
        if (
            word
            and step
            and improves(
                word, self.measured[step], self.measured[before] if before is not None else None
            )
        ):
            self.best_step = step
            value = value_of(self.measured[step], word)
            self.checkpointer.saver.best = {"iteration": step, "metric": word, "value": value}

    def _generate(self, step: int) -> list[Response]:
        """Return this rank's share of the responses."""
        options = self.config.evaluation
        sampling = SamplingConfig(
            n=options.samples,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_tokens=options.max_tokens or self.config.rollout.max_response_length,
        )
        size, engine, engines = engine_of_rank(self.engine, self.topology)
        prompts = list(self.held_out.prompts.values())[engine::engines]
        samples = [(prompt, n) for prompt in prompts for n in range(options.samples)]
        responses: dict[ResponseKey, Response] = {}
        self.sampler.generate(samples, sampling, 0, step, responses, lambda finished: None)
        self.engine.forget_prompts()
        share = samples[self.topology.rank % size :: size]
        return [
            responses[prompt.prompt_id, n]
            for prompt, n in share
            if (prompt.prompt_id, n) in responses
        ]

    def _write(self, step: int, samples: Sequence[Sample]) -> None:
        """Write ``evaluation/step_000010.jsonl``, which ``dcpo evaluate --samples`` reads."""
        if self.topology.rank:
            return
        path = self.directory / "evaluation" / f"step_{step:06d}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            write_samples(samples, path)
        except (
            OSError
        ) as refused:  # where the disk is full the records of the step end the run, on all ranks
            logger.warning("cannot write %s (%s)", path, refused.strerror)
