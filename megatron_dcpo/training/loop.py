"""The training loop, which reads as the method: generate and judge, score and update, hand the new
weights to the engine.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from megatron_dcpo.config import Config
from megatron_dcpo.judging.function_verifier import VerifierFailed
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import profile
from megatron_dcpo.runtime.run_lock import lock_run_dir
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.text import counted
from megatron_dcpo.training import provenance
from megatron_dcpo.training.run import Run, build
from megatron_dcpo.training.weight_sync import export_policy
from megatron_dcpo.weights.table import number_of_parameters

logger = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Train as ``config`` says; collective over all processes of ``torchrun``.

    Leaves ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``samples/``, ``evaluation/``,
    TensorBoard events and the trained policy as a Hugging Face directory ``policy/`` in
    ``run_dir``. Raises :class:`UserError` on bad input, and :class:`Stopped` after a signal, when
    everything done is saved.
    """
    with build(config) as run, lock_run_dir(run.directory, run.policy.topology.rank):
        provenance.prepare(run.directory, config, run.policy.topology.rank)
        done = run.checkpointer.resume()
        if run.validator:
            run.validator.restore(done)
        with run.recorder.from_step(done + 1):
            _start(run, done)
            for step in range(done + 1, config.training.steps + 1):
                if run.validator and run.validator.stop_early(done=step - 1):
                    break
                run.timers.step = step
                with _traced(run, step):
                    train_step(run, step)
                run.checkpointer.stop_if_asked(done=step)
                run.checkpointer.stop_if_warned(run.recorder.warned, done=step)
        if config.training.export_hf:
            with run.timers("export"):
                export_policy(run.directory, config.model, run.optimizer)
        distributed.barrier()


def train_step(run: Run, step: int) -> None:
    """Generate, judge, update, synchronize, record. Collective."""
    try:
        samples = run.ahead.take(step)
    except RolloutAbandoned:  # by a signal
        run.checkpointer.stop_if_asked(done=step - 1)
        raise
    except VerifierFailed as failed:
        run.checkpointer.save_and_end(failed, done=step - 1)
    run.ahead.start(step + 1)  # with rollout.async_steps: beside the training
    with run.timers("train"), run.checkpointer.completing():
        run.engine.sleep()
        run.offload.reload()
        samples, statistics = run.updater.update(samples, step)
    with run.timers("save"):  # while the engine sleeps
        run.checkpointer.save(step)
    run.ahead.wait()
    with run.timers("reshard"):
        run.offload.offload()
        traffic = run.weight_sync.push(version=step)
    validated = run.validator.validate(step) if run.validator else {}
    run.recorder.log(step, samples, statistics, traffic | run.sampler.metrics | validated)
    with run.timers("save"):  # announced when its records are written
        if run.validator:
            run.validator.save_best(step)
        run.checkpointer.announce(step)


def _start(run: Run, done: int) -> None:
    """Give the engines the policy after ``done`` steps, and validate it. The first rank says so: a
    large model takes minutes before its first step is logged.
    """
    first, rollout = run.policy.topology.rank == 0, run.config.rollout
    if first:
        parameters, engine = number_of_parameters(run.policy.arch), type(run.engine).__name__
        logger.info(
            "%s parameters, sampled by %s; handing over the weights", counted(parameters), engine
        )
    run.weight_sync.check_plan()
    run.weight_sync.push(version=done)
    run.recorder.log_evaluation(done, run.validator.validate(done) if run.validator else {})
    run.timers.clear()
    if first and done < run.config.training.steps:
        sizes = run.config.data.prompts_per_step * rollout.group_size, rollout.max_response_length
        logger.info("step %d begins: %d responses of at most %d tokens", done + 1, *sizes)


def _traced(run: Run, step: int) -> AbstractContextManager[None]:
    """Return a profiler around the steps of ``training.profile_steps``, on the first rank."""
    if step not in run.config.training.profile_steps or run.policy.topology.rank:
        return nullcontext()
    return profile(run.directory / "profile" / f"step_{step:06d}.json.gz")
