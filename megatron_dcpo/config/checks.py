"""What a configuration may not combine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from megatron_dcpo.config.field_types import BUILT_IN
from megatron_dcpo.config.parallel import ParallelConfig
from megatron_dcpo.config.sections import Config, RolloutConfig
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.objectives import find_method, resolve
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.types import REASONING_GYM


def check_compatible(config: Config, source: str) -> None:
    """Raise :class:`UserError` for the first options that do not go together."""
    training = config.training
    for refused, why in (
        *_parallel_rules(config.parallel),
        (
            (config.judging.graded or config.judging.threshold < 1) and not _has_scores(config),
            "judging.graded and judging.threshold are for f1, or a verifier of your own; name it, "
            "or remove them",
        ),
        (
            config.optimizer.min_lr > config.optimizer.lr,
            f"optimizer.min_lr={config.optimizer.min_lr} is above "
            f"optimizer.lr={config.optimizer.lr}",
        ),
        (
            not config.evaluation.interval and bool(training.keep_best or training.early_stop),
            "training.keep_best and training.early_stop need evaluation.interval: every how many "
            "steps to validate",
        ),
        (
            training.early_stop > 0 and not training.keep_best,
            f"training.early_stop={training.early_stop} needs training.keep_best: the metric that "
            "it watches",
        ),
        (
            config.evaluation.interval > 0 and not config.evaluation.benchmarks,
            f"evaluation.interval={config.evaluation.interval} needs evaluation.benchmarks, for "
            "instance math500 or "
            "NAME=PATH",
        ),
    ):
        if refused:
            raise UserError(f"{source}: {why}")
    try:
        objective = resolve(config.objective)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    _check_rollout(config.rollout, objective, source)
    if config.data.prompts_per_step % training.updates_per_rollout:
        raise UserError(
            f"{source}: training.updates_per_rollout={training.updates_per_rollout} does not "
            "divide "
            f"data.prompts_per_step={config.data.prompts_per_step}"
        )


def _has_scores(config: Config) -> bool:
    """Return whether any source is judged by what gives scores between 0 and 1."""
    named = (
        (source.path, source.verifier or config.judging.verifier) for source in config.data.sources
    )
    return any(
        path.startswith(REASONING_GYM) or verifier == "f1" or verifier not in BUILT_IN
        for path, verifier in named
    )


def _parallel_rules(parallel: ParallelConfig) -> tuple[tuple[bool, str], ...]:
    """Return, for every rule of ``parallel``, whether it is broken and what to say."""
    ends = parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage
    counted = (
        parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
    )
    ways = sum(map(bool, (ends, counted, parallel.pipeline_model_parallel_layout)))
    uneven = "num_layers_in_*_pipeline_stage, account_for_*_in_pipeline_split and pipeline_model_parallel_layout"
    return (
        (
            parallel.cp_comm_type != "p2p"
            and (parallel.context_parallel_size == 1 or parallel.sequence_packing),
            f"parallel.megatron.cp_comm_type={parallel.cp_comm_type} needs "
            "parallel.context_parallel_size > 1 and no "
            "sequence_packing",
        ),
        (
            parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1,
            "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1",
        ),
        (
            parallel.virtual_pipeline_model_parallel_size > 1
            and parallel.pipeline_model_parallel_size == 1,
            "parallel.megatron.virtual_pipeline_model_parallel_size > 1 needs "
            "parallel.pipeline_model_parallel_size > 1",
        ),
        (
            ways > 1,
            f"parallel.megatron: {uneven} divide the layers each in its own way; set one of the "
            "three",
        ),
        (
            ways > 0 and parallel.pipeline_model_parallel_size == 1,
            f"parallel.megatron: {uneven} need parallel.pipeline_model_parallel_size > 1",
        ),
        (
            parallel.overlap_param_gather and not parallel.use_distributed_optimizer,
            "parallel.megatron.overlap_param_gather needs parallel.use_distributed_optimizer: "
            "only its parameters are "
            "gathered",
        ),
        (
            parallel.overlap_param_gather and not parallel.overlap_grad_reduce,
            "parallel.megatron.overlap_param_gather needs overlap_grad_reduce (Megatron overlaps "
            "both or the latter alone)",
        ),
        (
            parallel.recompute_granularity != "full"
            and (parallel.recompute_method, parallel.recompute_num_layers) != ("uniform", 1),
            "parallel.megatron.recompute_method and recompute_num_layers need "
            "parallel.recompute_granularity=full",
        ),
        (
            parallel.recompute_granularity != "selective"
            and parallel.recompute_modules != ("core_attn",),
            "parallel.megatron.recompute_modules needs parallel.recompute_granularity=selective",
        ),
    )


def check_passed_on(
    section: str,
    options: Iterable[str],
    decided: Mapping[str, str],
    known: Set[str] | None,
    where: str,
) -> None:
    """Raise :class:`UserError` for an option of ``section``, whose options are passed on by their
    names, that is ``decided`` by something else, or that is not one of the names ``known`` to
    ``where`` (None: not checked).
    """
    for name in options:
        if name in decided:
            raise UserError(f"{section}.{name} is decided by {decided[name]}; remove it")
        if known is not None and name not in known:
            hint = did_you_mean(name, known - decided.keys())
            raise UserError(f"{section}.{name} is unknown to {where}{hint}")


def _check_rollout(rollout: RolloutConfig, objective: ObjectiveConfig, source: str) -> None:
    uncorrected = objective.tis_level == "none" and objective.old_logprobs == "trainer"
    if (rollout.top_p < 1 or rollout.top_k) and uncorrected:
        raise UserError(
            f"{source}: rollout.top_p={rollout.top_p}, top_k={rollout.top_k} sample another "
            "policy than the one trained; "
            "set them to 1 and 0, or correct for it with objective.tis_level=token (or sequence)"
        )
    if rollout.tensor_model_parallel_size > 1 and rollout.engine in ("transformers", "server"):
        raise UserError(
            f"{source}: rollout.tensor_model_parallel_size > 1 needs rollout.engine=vllm (or auto)"
        )
    if rollout.oversample > 1 and not (rollout.filter_groups or rollout.max_staleness):
        raise UserError(
            f"{source}: rollout.oversample={rollout.oversample:g} has no effect without "
            "rollout.filter_groups or "
            "rollout.max_staleness"
        )
    stale = f"{source}: rollout.max_staleness={rollout.max_staleness}"
    for refused, why in (
        (
            not 1 < rollout.oversample <= 2,
            "carries what is unfinished when the batch is full, so more prompts than a batch have "
            "to be sampled, but not "
            "more than two: set rollout.oversample above 1, at most 2",
        ),
        (
            uncorrected,
            "trains on tokens of earlier policies; correct for it with objective.tis_level=token "
            "(or sequence)",
        ),
        (
            rollout.engine == "server",
            "does not go with rollout.engine=server, which gives no tokens of a response it drops",
        ),
        (
            rollout.logprob_diff_alarm > 0,
            "does not go with rollout.logprob_diff_alarm: tokens of earlier policies differ from "
            "the trainer's",
        ),
        (
            rollout.routing_replay,
            "does not go with rollout.routing_replay: what is continued has no experts of its "
            "first tokens",
        ),
    ):
        if rollout.max_staleness and refused:
            raise UserError(f"{stale} {why}")
    ahead = f"{source}: rollout.async_steps={rollout.async_steps}"
    if rollout.async_steps and rollout.engine != "server":
        raise UserError(
            f"{ahead} does not go with rollout.engine={rollout.engine}, which samples in the "
            "trainer's own processes, with "
            "their devices or cores; take rollout.engine=server (dcpo launch N --engines M starts "
            "one)"
        )
    if rollout.async_steps and uncorrected:
        raise UserError(
            f"{ahead} trains on tokens of the policy before; correct for it with "
            "objective.tis_level=token"
        )
    if rollout.filter_groups and find_method(objective.name).needs_old_logprobs:
        raise UserError(
            f"{source}: rollout.filter_groups does not go with objective.name={objective.name}, "
            "whose loss trains on every "
            "group; remove it"
        )
    if (rollout.engine == "server") != bool(rollout.endpoint):
        raise UserError(
            f"{source}: rollout.engine=server and rollout.endpoint=URL go together; set both or "
            "neither"
        )
    if rollout.weight_transfer == "nccl" and rollout.engine != "server":
        raise UserError(
            f"{source}: rollout.weight_transfer=nccl is for rollout.engine=server; remove it"
        )
