"""The training loop, which reads as the method: roll out, judge, score, update, hand the new weights to the engine."""

from __future__ import annotations

from megatron_dcpo.config import Config
from megatron_dcpo.runtime import distributed
from megatron_dcpo.training.finish import export_policy
from megatron_dcpo.training.prompt_stream import prompts_of_step
from megatron_dcpo.training.recorder import Recorder
from megatron_dcpo.training.recovery import resume, save, stop_if_asked
from megatron_dcpo.training.rollouts import gather_judged, roll_out
from megatron_dcpo.training.setup import Run, build_run
from megatron_dcpo.training.timers import Timers
from megatron_dcpo.training.update import update_policy
from megatron_dcpo.weights.reshard import export_pieces


def train(config: Config) -> None:
    """Train as ``config`` says; collective over all processes of ``torchrun``.

    Leaves ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``samples/``, TensorBoard events and the trained policy
    as a Hugging Face directory ``policy/`` in ``run_dir``. Raises :class:`UserError` on bad input, and :class:`Stopped`
    after a signal, when everything done is saved.
    """
    run = build_run(config)
    with run.watch:
        _train(run)


def _train(run: Run) -> None:
    config = run.config
    first = resume(run) + 1
    timers = Timers(run.watch)
    with Recorder(run, first) as recorder:
        synchronise_engine(run, version=first - 1)
        for step in range(first, config.training.steps + 1):
            timers.step = step
            prompts = prompts_of_step(
                run.prompts, step, config.data.prompts_per_step, seed=config.seed, shuffle=config.data.shuffle
            )
            with timers("rollout"):
                judged = roll_out(run, prompts, step, timers)
            stop_if_asked(run, done=step - 1)
            with timers("judge"):
                rollout = gather_judged(run, prompts, judged)
            with timers("train"):
                statistics = update_policy(run, rollout, step)
            with timers("reshard"):
                synchronise_engine(run, version=step)
            recorder.log(step, rollout, statistics, timers)
            with timers("save"):
                save(run, step)
            stop_if_asked(run, done=step)
    if config.training.export_hf:
        export_policy(run)
    distributed.barrier()


def synchronise_engine(run: Run, version: int) -> None:
    """Push the policy's weights into the engine; from then on its responses carry ``version``."""
    run.engine.update_weights(export_pieces(run.policy), version)
