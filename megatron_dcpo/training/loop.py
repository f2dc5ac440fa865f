"""The training loop, which reads as the method: sample and judge, score and update, hand the new weights to the engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from megatron_dcpo.config import Config
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import profile
from megatron_dcpo.runtime.run_lock import lock_run_dir
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.recorder import Recorder
from megatron_dcpo.training.recovery import begin_save, finish_save, resume, stop_if_asked
from megatron_dcpo.training.run import TrainingRun, build_run
from megatron_dcpo.training.sampling import sample_step
from megatron_dcpo.training.update import update_policy
from megatron_dcpo.training.validation import restore, save_best, stop_early, validate
from megatron_dcpo.training.weight_sync import check_plan, export_policy, synchronise_engine


def train(config: Config) -> None:
    """Train as ``config`` says; collective over all processes of ``torchrun``.

    Leaves ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``samples/``, ``evaluation/``, TensorBoard events and the
    trained policy as a Hugging Face directory ``policy/`` in ``run_dir``. Raises :class:`UserError` on bad input, and
    :class:`Stopped` after a signal, when everything done is saved.
    """
    run = build_run(config)
    with run.watch, lock_run_dir(run.directory, run.topology.rank):
        _train(run)


def _train(run: TrainingRun) -> None:
    config = run.config
    first = resume(run) + 1
    restore(run, done=first - 1)
    timers = Timers(run.watch)
    with Recorder(run, first) as recorder:
        check_plan(run)
        synchronise_engine(run, version=first - 1)
        recorder.log_evaluation(first - 1, validate(run, first - 1, timers))
        timers.clear()
        for step in range(first, config.training.steps + 1):
            if stop_early(run, done=step - 1):
                break
            timers.step = step
            with _traced(run, step):
                samples = sample_step(run, step, timers)
                with timers("train"):
                    run.engine.sleep()
                    run.offload.reload()
                    statistics = update_policy(run, samples, step)
                with timers("save"):  # the engine sleeps
                    begin_save(run, step)
                with timers("reshard"):
                    run.offload.offload()
                    traffic = synchronise_engine(run, version=step)
                measured = validate(run, step, timers)
                recorder.log(step, statistics, timers, traffic | run.progress.rollout | measured)
            with timers("save"):  # announced when its records are written
                save_best(run, step)
                finish_save(run, step)
            stop_if_asked(run, done=step)
    if config.training.export_hf:
        with timers("export"):
            export_policy(run)
    distributed.barrier()


def _traced(run: TrainingRun, step: int) -> AbstractContextManager[None]:
    """A profiler around the steps of ``training.profile_steps``, on the first rank."""
    if step not in run.config.training.profile_steps or run.topology.rank:
        return nullcontext()
    return profile(run.directory / "profile" / f"step_{step:06d}.json.gz")
