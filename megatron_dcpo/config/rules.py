"""All rules on which options of a configuration may not be combined. The rest of the package
assumes what they promise.

A rule is a function of the configuration, and of the model's shape if it needs it. It returns what
is wrong and what to do about it, one line that names the options, or None. ``@rule(WHEN)``
registers it. Rules on the number of processes and on sizes that have to divide others are the
``check_`` functions, which conversion and planning call without a configuration too.

Elsewhere stand: what an option may be by itself (its type, in the sections), options of the
objective among themselves, which are also used without a configuration
(``objectives/options.py``), and what depends on the content of a file, on a tokenizer, or on what
is installed, which is refused by the part that reads or imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, Protocol, get_args

from megatron_dcpo.config.evaluation_sections import EngineConfig, EvaluateConfig
from megatron_dcpo.config.field_types import gives_scores
from megatron_dcpo.config.parallel import ParallelConfig
from megatron_dcpo.config.sections import (
    AgentsConfig,
    Config,
    JudgingConfig,
    RolloutConfig,
    RunConfig,
    SampledProblemsConfig,
)
from megatron_dcpo.errors import UserError, check_world_size, did_you_mean
from megatron_dcpo.objectives import find_method, resolve
from megatron_dcpo.runtime.brought import REASONING_GYM

Problem = str | None  # what is wrong, and what to do about it
# options that only rollouts of agents read
AGENT_OPTIONS = (
    *("agent_sessions", "agent_seconds", "agent_calls"),
    *("asks_confidence", "max_error_rate"),
)
# What vLLM can make of the bf16 weights of linear layers when it loads them, by its names, the
# recommended one first; fp8 is its older name of fp8_per_tensor.
FP8_ROLLOUTS = ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp8")
# values of vLLM's kv_cache_dtype that quantize nothing
_PLAIN_CACHES = ("auto", "bfloat16", "float16")
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it cuts it


class ModelShape(Protocol):
    """What rules read of an architecture (``architectures.architecture.Architecture``)."""

    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def dense_ffn_hidden_size(self) -> int: ...
    @property
    def shared_ffn_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def sliding_window(self) -> object | None: ...
    @property
    def rotary_interleaved(self) -> bool: ...


class LayoutSizes(Protocol):
    """What rules read of a parallel layout (``weights.layout.Layout``)."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...
    @property
    def virtual_pipeline_model_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...
    @property
    def expert_tensor(self) -> int: ...


# When a rule is looked at: as soon as the configuration of any training, of ``dcpo train``, of
# ``dcpo sft`` or of ``dcpo evaluate`` is read, or when ``config.json`` of the model is known too.
When = Literal["run", "run with model", "train", "train with model", "sft", "evaluate"]
Rule = Callable[..., Problem]

RULES: dict[When, list[Rule]] = {when: [] for when in get_args(When)}


def rule(when: When) -> Callable[[Rule], Rule]:
    """Register the decorated function as a rule that is looked at ``when`` the name says."""

    def register(function: Rule) -> Rule:
        RULES[when].append(function)
        return function

    return register


def _problem(when: When, *arguments: object) -> Problem:
    """Return what the first broken rule says, None if all are kept."""
    for one in RULES[when]:
        if problem := one(*arguments):
            return problem
    return None


# ---------------------------------------------------------------------------- when they are checked


def check_configuration(config: RunConfig, source: str) -> None:
    """Raise :class:`UserError` for the first options that may not be combined. ``source`` is the
    file that they come from.
    """
    problem = _problem("run", config)
    if problem is None:
        problem = _problem("train" if isinstance(config, Config) else "sft", config)
    if problem:
        raise UserError(f"{source}: {problem}")


def check_model_rules(
    config: RunConfig, model: ModelShape, chunks: Iterable[Sequence[int]]
) -> None:
    """Raise :class:`UserError` for options that are not right for a model. ``chunks`` are the
    layers of every model chunk, as the pipeline divides them.
    """
    problem = _problem("run with model", config, model)
    if problem is None and isinstance(config, Config):
        problem = _problem("train with model", config, model)
    if problem:
        raise UserError(problem)
    for layers in chunks:
        if problem := recomputed_units_divide_a_chunk(config.parallel, len(layers)):
            raise UserError(problem)


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise :class:`UserError` for options that the number of processes does not allow."""
    parallel = config.parallel
    expert_tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    check_world_size(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        processes,
        experts=parallel.expert_model_parallel_size * expert_tensor,
    )
    if isinstance(config, Config):
        _check_engines(config, processes)


def _check_engines(config: Config, processes: int) -> None:
    size = config.rollout.ranks_of_an_engine
    if processes % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {processes} "
            "process(es) started"
        )
    check_servers(config, processes)


def check_servers(config: Config, processes: int) -> None:
    """Raise :class:`UserError` if there are servers that no process would ask."""
    servers = len(config.rollout.endpoint)
    if servers > processes:
        raise UserError(
            f"rollout.endpoint names {servers} servers for {processes} process(es), each of which "
            "asks one; leave servers out, or start more processes"
        )


def check_evaluation(config: EvaluateConfig, source: str) -> None:
    """Raise :class:`UserError` for options of ``dcpo evaluate`` that may not be combined."""
    if problem := _problem("evaluate", config):
        raise UserError(f"{source}: {problem}")


def check_passed_on(
    section: str,
    options: Iterable[str],
    decided: Mapping[str, str],
    known: Set[str] | None,
    where: str,
) -> None:
    """Raise :class:`UserError` for an option of a section whose options are passed on by name.

    ``decided`` says what else decides an option, ``known`` are the names that ``where`` knows
    (None: they are not checked).
    """
    for name in options:
        if name in decided:
            raise UserError(f"{section}.{name} is decided by {decided[name]}; remove it")
        if known is not None and name not in known:
            hint = did_you_mean(name, known - decided.keys())
            raise UserError(f"{section}.{name} is unknown to {where}{hint}")


# -------------------------------------------------------------------------------------- parallelism


@rule("run")
def cp_comm_type_is_of_context_parallelism(config: RunConfig) -> Problem:
    parallel = config.parallel
    without = parallel.context_parallel_size == 1 or parallel.sequence_packing
    if parallel.cp_comm_type != "p2p" and without:
        return (
            f"parallel.megatron.cp_comm_type={parallel.cp_comm_type} needs "
            "parallel.context_parallel_size > 1 and no sequence_packing"
        )
    return None


@rule("run")
def sequence_parallel_needs_tensor_parallel(config: RunConfig) -> Problem:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        return "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1"
    return None


@rule("run")
def virtual_stages_need_a_pipeline(config: RunConfig) -> Problem:
    return _virtual_without_pipeline(config.parallel)


def _virtual_without_pipeline(layout: ParallelConfig | LayoutSizes) -> Problem:
    virtual = layout.virtual_pipeline_model_parallel_size > 1
    if virtual and layout.pipeline_model_parallel_size == 1:
        return (
            "parallel.megatron.virtual_pipeline_model_parallel_size > 1 needs "
            "parallel.pipeline_model_parallel_size > 1"
        )
    return None


_UNEVEN = (
    "num_layers_in_*_pipeline_stage, account_for_*_in_pipeline_split and "
    "pipeline_model_parallel_layout"
)


def _uneven_ways(parallel: ParallelConfig) -> int:
    """Return in how many ways the options divide the layers unevenly."""
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    ways = (first or last, embedding or loss, parallel.pipeline_model_parallel_layout)
    return sum(bool(way) for way in ways)


@rule("run")
def layers_are_divided_in_one_way(config: RunConfig) -> Problem:
    if _uneven_ways(config.parallel) > 1:
        return (
            f"parallel.megatron: {_UNEVEN} divide the layers each in its own way; set one of the "
            "three"
        )
    return None


@rule("run")
def an_uneven_division_needs_a_pipeline(config: RunConfig) -> Problem:
    parallel = config.parallel
    if _uneven_ways(parallel) and parallel.pipeline_model_parallel_size == 1:
        return f"parallel.megatron: {_UNEVEN} need parallel.pipeline_model_parallel_size > 1"
    return None


@rule("run")
def overlap_param_gather_needs_the_distributed_optimizer(config: RunConfig) -> Problem:
    parallel = config.parallel
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        return (
            "parallel.megatron.overlap_param_gather needs parallel.use_distributed_optimizer: "
            "only its parameters are gathered"
        )
    return None


@rule("run")
def overlap_param_gather_needs_overlap_grad_reduce(config: RunConfig) -> Problem:
    parallel = config.parallel
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        return (
            "parallel.megatron.overlap_param_gather needs overlap_grad_reduce (Megatron overlaps "
            "both, or gradients alone)"
        )
    return None


@rule("run")
def recomputed_layers_need_full_recomputation(config: RunConfig) -> Problem:
    parallel = config.parallel
    chosen = (parallel.recompute_method, parallel.recompute_num_layers) != ("uniform", 1)
    if parallel.recompute_granularity != "full" and chosen:
        return (
            "parallel.megatron.recompute_method and recompute_num_layers need "
            "parallel.recompute_granularity=full"
        )
    return None


@rule("run")
def recomputed_modules_need_selective_recomputation(config: RunConfig) -> Problem:
    parallel = config.parallel
    chosen = parallel.recompute_modules != ("core_attn",)
    if parallel.recompute_granularity != "selective" and chosen:
        return "parallel.megatron.recompute_modules needs parallel.recompute_granularity=selective"
    return None


@rule("run")
def tensor_parallel_messages_are_not_overlapped(config: RunConfig) -> Problem:
    """Transformer Engine overlaps them in buffers that Megatron's own training script sets up."""
    if config.parallel.megatron.get("tp_comm_overlap"):
        return (
            "parallel.megatron.tp_comm_overlap is not supported in this version: nothing sets up "
            "Transformer Engine's buffers for it; remove it"
        )
    return None


# ---------------------------------------------------------------------------- judging, optimization


@rule("train")
def scores_need_a_verifier_that_gives_them(config: Config) -> Problem:
    judging = config.judging
    if (judging.graded or judging.threshold < 1) and not _has_scores(config):
        return (
            "judging.graded and judging.threshold are for f1, a verifier or an agent of yours, or "
            "several with weights; name it, or remove them"
        )
    return None


@rule("train")
def a_verifier_has_responses_to_judge(config: Config) -> Problem:
    """Reasoning Gym judges its tasks; a validation may have other benchmarks."""
    if config.judging.verifier == JudgingConfig.verifier or config.evaluation.interval:
        return None
    for source in config.data.sources:
        if not source.verifier and not source.path.startswith(REASONING_GYM):
            return None
    return (
        "judging.verifier would judge nothing: every source of data.path has its own verifier, or "
        "is of Reasoning Gym; remove it, or name it as the verifier of a source"
    )


def _has_scores(config: Config) -> bool:
    """Return whether agents, or a verifier of any source, give scores between 0 and 1."""
    if config.rollout.runs_agents:
        return True
    for source in config.data.sources:
        verifier = source.verifier or config.judging.verifier
        if source.path.startswith(REASONING_GYM) or gives_scores(verifier):
            return True
    return False


@rule("run")
def min_lr_is_not_above_lr(config: RunConfig) -> Problem:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        return f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}"
    return None


@rule("run")
def a_least_rate_needs_a_decay(config: RunConfig) -> Problem:
    optimizer = config.optimizer
    if optimizer.min_lr and optimizer.lr_decay_style == "constant":
        return (
            f"optimizer.min_lr={optimizer.min_lr} has no effect with "
            "optimizer.lr_decay_style=constant; set linear or cosine, or remove it"
        )
    return None


# --------------------------------------------------------------------------------------- validation


@rule("train")
def the_best_checkpoint_needs_a_validation(config: Config) -> Problem:
    training = config.training
    if not config.evaluation.interval and (training.keep_best or training.early_stop):
        return (
            "training.keep_best and training.early_stop need evaluation.interval: every how many "
            "steps to validate"
        )
    return None


@rule("train")
def an_early_stop_needs_a_metric(config: Config) -> Problem:
    training = config.training
    if training.early_stop > 0 and not training.keep_best:
        return (
            f"training.early_stop={training.early_stop} needs training.keep_best: the metric that "
            "it watches"
        )
    return None


@rule("train")
def a_validation_needs_benchmarks(config: Config) -> Problem:
    evaluation = config.evaluation
    if evaluation.interval > 0 and not evaluation.benchmarks:
        return (
            f"evaluation.interval={evaluation.interval} needs evaluation.benchmarks, for instance "
            "math500 or NAME=PATH"
        )
    return None


# ------------------------------------------------------------------------------- objective, rollout


@rule("train")
def the_objective_reads_its_options(config: Config) -> Problem:
    try:
        resolve(config.objective)
    except UserError as error:
        return str(error)
    return None


def _is_uncorrected(config: Config) -> bool:
    """Return whether the loss takes sampled tokens as the trained policy's own."""
    objective = resolve(config.objective)
    return objective.tis_level == "none" and objective.old_logprobs == "trainer"


@rule("train")
def truncated_sampling_needs_a_correction(config: Config) -> Problem:
    rollout = config.rollout
    if (rollout.top_p < 1 or rollout.top_k) and _is_uncorrected(config):
        return (
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k} sample another policy than the "
            "one trained; set them to 1 and 0, or correct for it with objective.tis_level=token "
            "(or sequence)"
        )
    return None


@rule("train")
def an_engine_of_several_gpus_is_vllm(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.tensor_model_parallel_size > 1 and rollout.engine == "transformers":
        return "rollout.tensor_model_parallel_size > 1 needs rollout.engine=vllm, auto or server"
    return None


@rule("train")
def oversampling_needs_a_use(config: Config) -> Problem:
    rollout = config.rollout
    filters = rollout.filter_groups != "none"
    if rollout.oversample > 1 and not (filters or rollout.max_staleness):
        return (
            f"rollout.oversample={rollout.oversample:g} has no effect without "
            "rollout.filter_groups or rollout.max_staleness"
        )
    return None


@rule("train")
def partial_rollouts_need_a_little_oversampling(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.max_staleness and not 1 < rollout.oversample <= 2:
        return (
            f"rollout.max_staleness={rollout.max_staleness} carries what is unfinished when the "
            "batch is full, so more prompts than a batch have to be sampled, but not more than "
            "two: set rollout.oversample above 1, at most 2"
        )
    return None


@rule("train")
def partial_rollouts_need_a_correction(config: Config) -> Problem:
    staleness = config.rollout.max_staleness
    if staleness and _is_uncorrected(config):
        return (
            f"rollout.max_staleness={staleness} trains on tokens of earlier policies; correct for "
            "it with objective.tis_level=token (or sequence)"
        )
    return None


@rule("train")
def a_server_has_no_partial_rollouts(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.max_staleness and rollout.engine == "server":
        return (
            f"rollout.max_staleness={rollout.max_staleness} does not go with "
            "rollout.engine=server, which gives no tokens of a response it drops"
        )
    return None


@rule("train")
def partial_rollouts_have_no_log_prob_alarm(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.max_staleness and rollout.logprob_diff_alarm > 0:
        return (
            f"rollout.max_staleness={rollout.max_staleness} does not go with "
            "rollout.logprob_diff_alarm: tokens of earlier policies differ from the trainer's"
        )
    return None


@rule("train")
def partial_rollouts_have_no_routing_replay(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.max_staleness and rollout.routing_replay:
        return (
            f"rollout.max_staleness={rollout.max_staleness} does not go with "
            "rollout.routing_replay: a response that is continued has no experts of its first "
            "tokens"
        )
    return None


@rule("train")
def generation_alongside_training_needs_a_server(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.async_steps and rollout.engine != "server":
        return (
            f"rollout.async_steps={rollout.async_steps} does not go with "
            f"rollout.engine={rollout.engine}, which samples in the trainer's own processes, with "
            "their devices or cores; take rollout.engine=server (dcpo launch N --engines M starts "
            "one)"
        )
    return None


@rule("train")
def one_thing_makes_the_responses(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.agent and rollout.command:
        return "rollout.agent and rollout.command both make the responses; remove one"
    return _python_without_an_agent(rollout)


def _python_without_an_agent(rollout: AgentsConfig) -> Problem:
    if rollout.agent_python and not rollout.agent:
        return (
            f"rollout.agent_python={rollout.agent_python} is where rollout.agent runs; name that, "
            "or remove it"
        )
    return None


@rule("train")
def options_of_agents_need_an_agent(config: Config) -> Problem:
    rollout = config.rollout
    return None if rollout.runs_agents else _options_without_agents(rollout, RolloutConfig())


def _options_without_agents(rollout: AgentsConfig, defaults: AgentsConfig) -> Problem:
    for name in AGENT_OPTIONS:
        if getattr(rollout, name, None) != getattr(defaults, name, None):
            return f"rollout.{name} has no effect without rollout.agent or rollout.command"
    return None


@rule("train")
def agents_ask_an_engine_of_one_rank(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.runs_agents and rollout.ranks_of_an_engine > 1:
        return (
            "rollout.agent and rollout.command need rollout.tensor_model_parallel_size=1, because "
            "the ranks of an engine would have to take each call together; or take "
            "rollout.engine=server"
        )
    return None


@rule("train")
def sessions_of_agents_are_not_continued(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.runs_agents and rollout.max_staleness:
        return (
            f"rollout.max_staleness={rollout.max_staleness} does not go with rollout.agent and "
            "rollout.command, whose sessions cannot be continued; remove one of them"
        )
    return None


@rule("train")
def sessions_of_agents_have_no_routing_replay(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.runs_agents and rollout.routing_replay:
        return (
            "rollout.routing_replay does not go with rollout.agent and rollout.command: nobody "
            "chose experts for tokens that were not sampled; remove one of them"
        )
    return None


@rule("train")
def generation_alongside_training_needs_a_correction(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.async_steps and _is_uncorrected(config):
        return (
            f"rollout.async_steps={rollout.async_steps} trains on tokens of the previous policy; "
            "correct for it with objective.tis_level=token"
        )
    return None


@rule("train")
def filtered_groups_need_a_method_that_skips_them(config: Config) -> Problem:
    name = config.objective.name
    if config.rollout.filter_groups != "none" and find_method(name).needs_old_logprobs:
        return (
            f"rollout.filter_groups does not go with objective.name={name}, whose loss trains on "
            "every group; remove it"
        )
    return None


@rule("train")
def a_filter_by_the_reasoning_needs_a_reward_for_correctness(config: Config) -> Problem:
    if config.rollout.filter_groups != "reasoning":
        return None
    objective = config.objective
    if "block_groups" not in find_method(objective.name).reads:
        return (
            f"rollout.filter_groups=reasoning does not go with objective.name={objective.name}, "
            "whose reasoning has no reward for correctness (or whose reads lack block_groups); "
            "set rollout.filter_groups=any, or remove it"
        )
    resolved = resolve(objective)
    if resolved.weight_reasoning == 0:
        return (
            "rollout.filter_groups=reasoning waits for groups that train the reasoning, and "
            "objective.weight_reasoning=0 trains none; set rollout.filter_groups=any, or remove it"
        )
    if resolved.block_groups == "all":
        return (
            "rollout.filter_groups=reasoning draws groups that train the confidence alone, and "
            "objective.block_groups=all trains both blocks on every group; remove one of them"
        )
    return None


@rule("run")
def weights_have_sixteen_bits_or_more(config: RunConfig) -> Problem:
    """The local layers ignore ``fp8`` without a word; with Transformer Engine's nothing pads a
    micro-batch to the multiples of tokens that its FP8 kernels ask for.
    """
    for name, value in config.parallel.megatron.items():
        if value and ("fp8" in name or "fp4" in name or name == "quant_recipe"):
            return (
                f"parallel.megatron.{name}: FP8 and FP4 are not supported in this version "
                "(micro-batches are not padded for it, and engines get weights as they are); "
                "remove it"
            )
    return None


@rule("run")
def adapted_layers_are_on_one_stage(config: RunConfig) -> Problem:
    adapter = config.model.adapter
    stages = config.parallel.pipeline_model_parallel_size
    if adapter is None or adapter.layers is None or stages == 1:
        return None
    return (
        f"model.adapter.layers={adapter.layers} with parallel.pipeline_model_parallel_size="
        f"{stages} would leave stages without anything to train; remove one of them"
    )


@rule("train")
def an_engine_quantizes_to_fp8_alone(config: Config) -> Problem:
    quantization = config.rollout.quantization
    if quantization is None or quantization in FP8_ROLLOUTS:
        return None
    return (
        f"rollout.vllm.quantization={quantization} is not supported; set it to "
        f"{' or '.join(FP8_ROLLOUTS[:2])}, which vLLM makes of bf16 weights, or remove it"
    )


@rule("train")
def layers_and_cache_are_quantized_by_no_other_option(config: Config) -> Problem:
    """Quantized keys and values would need scales that follow the policy from update to update."""
    vllm = config.rollout.vllm
    if vllm.get("quantization_config"):
        return (
            "rollout.vllm.quantization_config is not supported; set "
            f"rollout.vllm.quantization={FP8_ROLLOUTS[0]}, or remove it"
        )
    cache = vllm.get("kv_cache_dtype") or "auto"
    if cache not in _PLAIN_CACHES:
        return (
            f"rollout.vllm.kv_cache_dtype={cache} is not supported: nothing computes its scales "
            "again when the policy has changed; remove it"
        )
    return None


@rule("train")
def fp8_rollouts_are_vllms(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.quantization and rollout.engine == "transformers":
        return (
            f"rollout.vllm.quantization={rollout.quantization} needs rollout.engine=vllm, auto or "
            "server; set one of them, or remove it"
        )
    return None


@rule("train")
def fp8_rollouts_are_of_a_policy_in_bf16(config: Config) -> Problem:
    quantization = config.rollout.quantization
    if quantization and config.model.params_dtype != "bf16":
        return (
            f"rollout.vllm.quantization={quantization} needs model.params_dtype=bf16, not "
            f"{config.model.params_dtype}; set it, or remove the quantization"
        )
    return None


@rule("train")
def fp8_rollouts_need_a_correction(config: Config) -> Problem:
    quantization = config.rollout.quantization
    if quantization and _is_uncorrected(config):
        return (
            f"rollout.vllm.quantization={quantization} samples another policy than the one "
            "trained; correct for it with objective.tis_level=token (or sequence)"
        )
    return None


@rule("train")
def a_server_has_an_address(config: Config) -> Problem:
    rollout = config.rollout
    if (rollout.engine == "server") != bool(rollout.endpoint):
        return "rollout.engine=server and rollout.endpoint=URL go together; set both or neither"
    servers = [url.rstrip("/").removesuffix("/v1") for url in rollout.endpoint]
    for server in servers:
        if servers.count(server) > 1:
            return f"rollout.endpoint names {server} twice; name every server once"
    return None


@rule("train")
def nccl_transfer_needs_a_server(config: Config) -> Problem:
    rollout = config.rollout
    if rollout.weight_transfer == "nccl" and rollout.engine != "server":
        return "rollout.weight_transfer=nccl is for rollout.engine=server; remove it"
    return None


@rule("train")
def mini_batches_divide_a_step(config: Config) -> Problem:
    updates = config.training.updates_per_rollout
    prompts = config.data.prompts_per_step
    if prompts % updates:
        return (
            f"training.updates_per_rollout={updates} does not divide "
            f"data.prompts_per_step={prompts}"
        )
    return None


# ----------------------------------------------------------------------------------- with the model


@rule("run with model")
def an_adapter_has_no_experts(config: RunConfig, model: ModelShape) -> Problem:
    if model.num_experts and config.frozen:
        return "model.adapter: no factors for experts; remove it for a mixture of experts"
    return None


@rule("train with model")
def fp8_rollouts_are_of_plain_layers(config: Config, model: ModelShape) -> Problem:
    """Updates in FP8 of models with experts have not been tried."""
    quantization = config.rollout.quantization
    if not quantization or not model.num_experts:
        return None
    return (
        f"rollout.vllm.quantization={quantization} is not supported for {config.model.path}, which "
        "has experts; remove it"
    )


@rule("run with model")
def windows_in_context_parallelism(config: RunConfig, model: ModelShape) -> Problem:
    """As Transformer Engine has them. The local layers gather the keys whatever the option says."""
    parallel = config.parallel
    if model.sliding_window is None or parallel.context_parallel_size == 1:
        return None
    gathers = parallel.cp_comm_type == "all_gather" and not parallel.sequence_packing
    if gathers or config.model.transformer_impl == "local":
        return None
    return (
        f"parallel.context_parallel_size={parallel.context_parallel_size}: some layers of "
        f"{config.model.path} have a sliding window, with which Transformer Engine needs "
        "parallel.megatron.cp_comm_type=all_gather and parallel.sequence_packing=false; set them, "
        "or take tensor or pipeline parallelism instead"
    )


@rule("run with model")
def fused_rotations_of_packed_sequences_are_of_halves(
    config: RunConfig, model: ModelShape
) -> Problem:
    """Megatron-core 0.16 does not tell the kernel for packed sequences that pairs are neighbors
    (``fused_apply_rotary_pos_emb_thd``), which would rotate other pairs. With a later release the
    kernel is used without the option (``policy/rotary.py``).
    """
    parallel = config.parallel
    fused = parallel.megatron.get("apply_rope_fusion") and parallel.sequence_packing
    if not (model.rotary_interleaved and fused):
        return None
    return (
        f"parallel.megatron.apply_rope_fusion: with parallel.sequence_packing the fused kernel "
        f"rotates halves, and {config.model.path} has rotations of neighbors; remove one of the two"
    )


@rule("run with model")
def experts_need_sequence_parallel(config: RunConfig, model: ModelShape) -> Problem:
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size
    if model.num_experts and size > 1 and not parallel.sequence_parallel:
        return (
            f"parallel.tensor_model_parallel_size={size} needs parallel.sequence_parallel=true "
            "with a mixture of experts"
        )
    return None


@rule("run with model")
def divided_experts_need_the_distributed_optimizer(config: RunConfig, model: ModelShape) -> Problem:
    parallel = config.parallel
    size = parallel.expert_model_parallel_size
    if model.num_experts and size > 1 and not parallel.use_distributed_optimizer:
        return (
            f"parallel.expert_model_parallel_size={size} needs "
            "parallel.use_distributed_optimizer=true"
        )
    return None


@rule("run with model")
def experts_are_not_recomputed_as_mlp(config: RunConfig, model: ModelShape) -> Problem:
    parallel = config.parallel
    selective = parallel.recompute_granularity == "selective"
    if model.num_experts and selective and "mlp" in parallel.recompute_modules:
        return (
            "parallel.megatron.recompute_modules=mlp recomputes nothing with a mixture of "
            "experts; take core_attn, or parallel.recompute_granularity=full"
        )
    return None


@rule("train with model")
def a_server_gets_no_experts(config: Config, model: ModelShape) -> Problem:
    if model.num_experts and config.rollout.engine == "server":
        return (
            "with a mixture of experts rollout.engine=server does not get the policy's weights in "
            "this version; take vllm or transformers"
        )
    return None


@rule("train with model")
def routing_replay_needs_experts(config: Config, model: ModelShape) -> Problem:
    if config.rollout.routing_replay and not model.num_experts:
        return f"rollout.routing_replay=true: {config.model.path} has no experts; remove it"
    return None


@rule("train with model")
def routing_replay_needs_megatrons_own_router(config: Config, model: ModelShape) -> Problem:
    if config.rollout.routing_replay and config.parallel.megatron.get("moe_router_fusion"):
        return (
            "rollout.routing_replay does not go with parallel.megatron.moe_router_fusion; remove "
            "one of them"
        )
    return None


def recomputed_units_divide_a_chunk(parallel: ParallelConfig, layers: int) -> Problem:
    unit = parallel.recompute_num_layers
    if parallel.recompute_method == "uniform" and layers % unit:
        return (
            f"parallel.megatron.recompute_num_layers={unit} does not divide the {layers} layers "
            "of a pipeline stage's chunk; choose a divisor, or "
            "parallel.megatron.recompute_method=block"
        )
    return None


def check_layout_sizes(model: ModelShape, layout: LayoutSizes) -> None:
    """Raise :class:`UserError` if the ranks of a layout cannot divide the model."""
    _check_expert_sizes(model, layout)
    tp = layout.tensor_model_parallel_size
    sizes = {
        "attention heads": model.num_attention_heads,
        "query groups (key/value heads)": model.num_query_groups,
        "ffn_hidden_size of a shared expert": model.shared_ffn_hidden_size,
        "ffn_hidden_size of a layer without experts": model.dense_ffn_hidden_size,
    }
    if not model.num_experts or layout.expert_tensor > 1:
        sizes["ffn_hidden_size"] = model.ffn_hidden_size
    for what, size in sizes.items():
        if size % tp:
            raise UserError(
                f"parallel.tensor_model_parallel_size={tp} does not divide the model's {size} "
                f"{what}; choose a divisor of {size}"
            )
    if problem := _virtual_without_pipeline(layout):
        raise UserError(problem)


def _check_expert_sizes(model: ModelShape, layout: LayoutSizes) -> None:
    tp = layout.tensor_model_parallel_size
    ep = layout.expert_model_parallel_size
    etp = layout.expert_tensor
    divided = ep > 1 or layout.expert_tensor_parallel_size is not None
    if divided and not model.num_experts:
        raise UserError(
            "parallel.expert_model_parallel_size and expert_tensor_parallel_size are for mixtures "
            f"of experts; {model.name} has no experts"
        )
    if model.num_experts % ep:
        raise UserError(
            f"parallel.expert_model_parallel_size={ep} does not divide the model's "
            f"{model.num_experts} experts; choose a divisor of {model.num_experts}"
        )
    # without expert parallelism, Megatron's gradients of the experts would be wrong
    if etp not in (1, tp) or (ep == 1 and etp != tp):
        raise UserError(
            f"parallel.expert_tensor_parallel_size={etp} must be "
            f"parallel.tensor_model_parallel_size={tp} or, with "
            "parallel.expert_model_parallel_size > 1, be 1"
        )
    if max(tp, ep * etp) % min(tp, ep * etp):
        raise UserError(
            f"parallel.expert_model_parallel_size={ep} x expert_tensor_parallel_size={etp} and "
            f"parallel.tensor_model_parallel_size={tp}: one must divide the other"
        )


def check_engine_gpus(config: Config, gpus: int, option: str) -> None:
    """Raise :class:`UserError` if the GPUs of a server, which ``option`` gives, are not whole
    engines.
    """
    size = config.rollout.tensor_model_parallel_size
    if gpus % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {gpus} GPUs of "
            f"{option}; every engine of a server has {size}"
        )


def check_engine_size(model: ModelShape, tensor_model_parallel_size: int) -> None:
    """Raise :class:`UserError` if the ranks of an engine cannot divide the model."""
    size = tensor_model_parallel_size
    option = f"rollout.tensor_model_parallel_size={size}"
    if model.num_experts and size > model.num_experts:
        raise UserError(f"{option} is more than the model's {model.num_experts} experts")
    heads_and_width = {
        "attention heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "ffn_hidden_size of a shared expert": model.shared_ffn_hidden_size,
        "ffn_hidden_size of a layer without experts": model.dense_ffn_hidden_size,
    }
    for what, number in heads_and_width.items():
        if number % size:
            raise UserError(
                f"{option} does not divide the model's {number} {what}; choose a divisor of "
                f"{number}"
            )
    groups = model.num_query_groups
    if max(size, groups) % min(size, groups):
        raise UserError(
            f"{option} neither divides the model's {groups} key/value heads nor is a multiple of "
            "them"
        )
    padded = -(-model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % size:
        raise UserError(f"{option} does not divide the padded vocabulary of {padded}")


# ----------------------------------------------------------------------- of dcpo sft, dcpo evaluate


@rule("train")
def a_greedy_validation_has_one_response(config: Config) -> Problem:
    return _greedy_repeats(config.evaluation)


@rule("evaluate")
def a_greedy_evaluation_has_one_response(config: EvaluateConfig) -> Problem:
    return _greedy_repeats(config.evaluation)


def _greedy_repeats(options: SampledProblemsConfig) -> Problem:
    if options.temperature == 0 and options.samples > 1:
        return (
            f"evaluation.samples={options.samples} with evaluation.temperature=0 would be the same "
            "greedy response several times; set evaluation.samples=1 (--repeats 1)"
        )
    return None


@rule("sft")
def a_held_out_file_has_an_interval(config: Any) -> Problem:  # noqa: ANN401 - SupervisedConfig
    validation = config.evaluation
    if bool(validation.path) != bool(validation.interval):
        return "evaluation.path and evaluation.interval go together; set both or neither"
    return None


@rule("evaluate")
def an_adapter_is_added_to_a_model(config: EvaluateConfig) -> Problem:
    if config.model.adapter_path and not config.model.path:
        return (
            "model.adapter_path (--adapter) is added to model.path (--model); name the model it "
            "was trained on"
        )
    return None


@rule("evaluate")
def a_model_or_a_server_is_evaluated(config: EvaluateConfig) -> Problem:
    if config.model.path and config.endpoint.url:
        return "model.path and endpoint.url: evaluate one of them; remove the other"
    return None


@rule("evaluate")
def agents_need_a_model_in_this_process(config: EvaluateConfig) -> Problem:
    rollout = config.rollout
    if rollout.agent and rollout.command:
        return "rollout.agent and rollout.command both make the responses; remove one"
    if rollout.agent_python and not rollout.agent:
        return _python_without_an_agent(rollout)
    if rollout.runs_agents:
        if config.endpoint.url:
            return (
                "rollout.agent and rollout.command (--agent, --command) make responses with a "
                "model in this process; name it as model.path (--model)"
            )
        return None
    return _options_without_agents(rollout, EngineConfig())


@rule("evaluate")
def of_agents_only_the_sampled_log_probs_are_kept(config: EvaluateConfig) -> Problem:
    options = config.evaluation
    if not config.rollout.runs_agents:
        return None
    if options.features:
        return "evaluation.features does not go with rollout.agent or rollout.command; remove it"
    if "token_entropy" in options.confidence:
        return (
            "evaluation.confidence=token_entropy does not go with rollout.agent or "
            "rollout.command; remove it"
        )
    return None


@rule("evaluate")
def token_ids_go_to_completions(config: EvaluateConfig) -> Problem:
    if config.endpoint.tokenizer and config.endpoint.api == "chat":
        return (
            "endpoint.tokenizer sends token ids, which only endpoint.api=completions takes; leave "
            "out --tokenizer or --api"
        )
    return None


# what a request has from other options, and which
_OF_REQUESTS = {
    "model": "endpoint.model (--model-name)",
    "temperature": "evaluation.temperature (--temperature)",
    "top_p": "evaluation.top_p (--top-p)",
    "top_k": "evaluation.top_k (--top-k)",
    "max_tokens": "evaluation.max_tokens (--max-tokens)",
    "seed": "evaluation.seed (--seed), of which every repeat gets its own",
}


@rule("evaluate")
def what_is_added_to_requests_is_no_other_option(config: EvaluateConfig) -> Problem:
    for name, option in _OF_REQUESTS.items():
        if config.endpoint.extra_body.get(name) is not None:
            return f"endpoint.extra_body.{name} (--extra-body) would replace {option}; set that"
    return None


@rule("evaluate")
def thinking_at_a_server_needs_a_tokenizer(config: EvaluateConfig) -> Problem:
    endpoint = config.endpoint
    if endpoint.url and config.data.thinking == "on" and not endpoint.tokenizer:
        return (
            "data.thinking=on needs endpoint.tokenizer (--tokenizer DIR), which renders the "
            "prompts here; or leave it out, and switch the server with --extra-body "
            """'{"chat_template_kwargs": {"enable_thinking": true}}'"""
        )
    return None
