"""Options that were set and change nothing, because another one switches off what they are of. A
line says so at the start of a run, and the dry run says it too.

They are not refused (``rules.py``), so that an override can switch a validation off, take another
engine or shorten a run without editing the rest of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dcpo.config.sections import (
    Config,
    DataConfig,
    LoopConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.runtime.brought import REASONING_GYM

# what bounds a ratio, which is 1 in the first update on a rollout
_OF_THE_RATIO = ("ratio", "clip", "clip_low", "clip_high", "dual_clip")
# the engine arguments of vLLM that each other engine reads
_READ_OF_VLLM = {"transformers": ("dtype",), "server": ("quantization",)}


def options_without_effect(config: RunConfig) -> list[str]:
    """Return a line for each option that was set and changes nothing in this run; those of a
    supervised training alone are in ``supervised.py``.
    """
    found = [*_of_any_run(config), *_of_micro_batches(config)]
    if isinstance(config, Config):
        for lines in (_of_rollouts, _of_validation, _of_sources, _of_updates):
            found += lines(config)
    return found


def _of_any_run(config: RunConfig) -> Iterator[str]:
    steps = config.training.steps
    warmup = config.optimizer.lr_warmup_iters
    if steps and warmup >= steps:
        yield (
            f"optimizer.lr_warmup_iters={warmup} is not below training.steps={steps}: the rate "
            "does not reach optimizer.lr"
        )
    if config.model.adapter is not None and config.parallel.use_distributed_optimizer:
        yield (
            "parallel.use_distributed_optimizer changes nothing with model.adapter, whose few "
            "parameters every rank updates"
        )


def _of_micro_batches(config: RunConfig) -> Iterator[str]:
    training = config.training
    is_packed = config.parallel.sequence_packing
    if is_packed and training.micro_batch_size != LoopConfig.micro_batch_size:
        yield (
            f"training.micro_batch_size={training.micro_batch_size} changes nothing with "
            "parallel.sequence_packing, where training.max_tokens_per_micro_batch counts"
        )
    most = training.max_tokens_per_micro_batch
    if not is_packed and most != LoopConfig.max_tokens_per_micro_batch:
        yield (
            f"training.max_tokens_per_micro_batch={most} changes nothing without "
            "parallel.sequence_packing, where training.micro_batch_size counts"
        )


def _of_rollouts(config: Config) -> Iterator[str]:
    rollout = config.rollout
    read = _READ_OF_VLLM.get(rollout.engine)
    if read is not None:
        for name in rollout.vllm:
            if name not in read:
                yield f"rollout.vllm.{name} changes nothing with rollout.engine={rollout.engine}"
    is_changed = rollout.gpu_memory_utilization != RolloutConfig.gpu_memory_utilization
    if is_changed and rollout.engine == "transformers":
        yield "rollout.gpu_memory_utilization changes nothing with rollout.engine=transformers"
    refills = rollout.max_refills
    draws_again = rollout.filter_groups != "none" or rollout.runs_agents
    if refills != RolloutConfig.max_refills and not draws_again:
        yield f"rollout.max_refills={refills} changes nothing without rollout.filter_groups"


def _of_validation(config: Config) -> Iterator[str]:
    if config.evaluation.benchmarks and not config.evaluation.interval:
        yield "evaluation.benchmarks: nothing is validated, because evaluation.interval is 0"


def _of_sources(config: Config) -> Iterator[str]:
    if isinstance(config.data.path, str) or config.evaluation.interval:
        return
    sources = config.data.sources
    if config.data.template != DataConfig.template and all(one.template for one in sources):
        yield "data.template changes nothing: every source has its own"
    own_reading = [
        bool(one.columns or one.row) or one.path.startswith(REASONING_GYM)
        for one in config.data.path
    ]
    for name in ("columns", "row"):
        if getattr(config.data, name) and all(own_reading):
            yield f"data.{name} changes nothing: every source has its own, or brings its problems"


def _of_updates(config: Config) -> Iterator[str]:
    training = config.training
    objective = resolve(config.objective)
    if training.updates_per_rollout == 1 and objective.old_logprobs == "trainer":
        usual = resolve(ObjectiveConfig(name=config.objective.name, preset=config.objective.preset))
        for name in _OF_THE_RATIO:
            if getattr(objective, name) != getattr(usual, name):
                yield (
                    f"objective.{name} changes nothing with training.updates_per_rollout=1, where "
                    "the ratio of new to old probability is 1"
                )
    most = training.updates_per_rollout
    if config.generates_ahead and config.rollout.max_staleness > most:
        yield (
            f"rollout.max_staleness={config.rollout.max_staleness} is {most} in effect: a server "
            f"generates one batch ahead, and training.updates_per_rollout={most}"
        )
    late = [step for step in training.profile_steps if step > training.steps]
    if late:
        yield f"training.profile_steps: there is no step {late[0]}, the last is {training.steps}"
    if config.model.adapter is None:
        return
    if training.offload_optimizer_during_rollout:
        yield (
            "training.offload_optimizer_during_rollout changes nothing with model.adapter, whose "
            "state is small"
        )
