"""Rules on which options of a configuration may not be combined. The rest of the package assumes
what they promise.

Most are rows of :data:`CONFLICTS`. A rule of another form is a function of the configuration, and
of the model's shape if it needs it, which ``@rule(WHEN)`` registers; it returns what is wrong and
what to do about it, one line that names the options, or None. Rules on the number of processes and
on sizes that have to divide others are the ``check_`` functions, which conversion and planning call
without a configuration too.

Elsewhere stand: what an option may be by itself (its type, in the sections), options of the
objective among themselves, which are also used without a configuration
(``objectives/options.py``), what depends on the content of a file, on a tokenizer, or on what is
installed, which is refused by the part that reads or imports it, and flags of the command line,
which their verb checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.config.field_types import gives_scores
from megatron_dcpo.config.parallel import ParallelConfig
from megatron_dcpo.config.sections import (
    AgentsConfig,
    Config,
    JudgingConfig,
    RunConfig,
    SampledProblemsConfig,
)
from megatron_dcpo.errors import UserError, check_world_size, did_you_mean
from megatron_dcpo.objectives import build_method, find_method, resolve
from megatron_dcpo.objectives.options import normalization_of_the_confidence
from megatron_dcpo.runtime.brought import REASONING_GYM
from megatron_dcpo.types import BLOCKS

Problem = str | None  # what is wrong, and what to do about it
# options that only rollouts of agents read
AGENT_OPTIONS = (
    *("agent_sessions", "agent_seconds", "agent_calls"),
    "asks_confidence",
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
# ``dcpo sft`` or of ``dcpo evaluate`` is read, of either verb that runs agents, or when
# ``config.json`` of the model is known too.
When = Literal["run", "run with model", "train", "train with model", "sft", "evaluate", "agents"]
Rule = Callable[..., Problem]

RULES: dict[When, list[Rule]] = {when: [] for when in get_args(When)}


def rule(when: When) -> Callable[[Rule], Rule]:
    """Register the decorated function as a rule that is looked at ``when`` the name says."""

    def register(function: Rule) -> Rule:
        RULES[when].append(function)
        return function

    return register


def _problem(when: When, *arguments: Any) -> Problem:  # noqa: ANN401 - what the rule takes
    """Return what the first broken rule says, None if all are kept."""
    of_the_table = [conflict.problem for conflict in CONFLICTS if conflict.when == when]
    for one in (*RULES[when], *of_the_table):
        if problem := one(*arguments):
            return problem
    return None


# ---------------------------------------------------------------------------- when they are checked


def check_configuration(config: RunConfig, source: str) -> None:
    """Raise :class:`UserError` for the first options that may not be combined. ``source`` is the
    file that they come from.
    """
    looked_at: tuple[When, ...] = ("run", "sft")
    if isinstance(config, Config):
        looked_at = ("run", "train", "agents")
    for when in looked_at:
        if problem := _problem(when, config):
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
    if problem := _problem("evaluate", config) or _problem("agents", config):
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


# ------------------------------------------------------------------------- the table of conflicts


@dataclass(frozen=True)
class Conflict:
    """Options that may not be combined: ``holds(c)``, or ``holds(c, m)`` where the model is known
    too, says whether they are, and ``says`` what is wrong, with values of the configuration ``c``
    and of the model's shape ``m``.
    """

    when: When
    holds: Callable[..., object]
    says: str

    def problem(self, c: Any, m: ModelShape | None = None) -> Problem:  # noqa: ANN401 - of any verb
        arguments = (c,) if m is None else (c, m)
        return self.says.format(c=c, m=m) if self.holds(*arguments) else None


CONFLICTS = (
    Conflict(
        "run",
        lambda c: (
            c.parallel.cp_comm_type != "p2p"
            and (c.parallel.context_parallel_size == 1 or c.parallel.sequence_packing)
        ),
        "parallel.megatron.cp_comm_type={c.parallel.cp_comm_type} needs "
        "parallel.context_parallel_size > 1 and no sequence_packing",
    ),
    Conflict(
        "run",
        lambda c: c.parallel.sequence_parallel and c.parallel.tensor_model_parallel_size == 1,
        "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1",
    ),
    Conflict(
        "run",
        lambda c: c.parallel.overlap_param_gather and not c.parallel.use_distributed_optimizer,
        "parallel.megatron.overlap_param_gather needs parallel.use_distributed_optimizer: "
        "only its parameters are gathered",
    ),
    Conflict(
        "run",
        lambda c: c.parallel.overlap_param_gather and not c.parallel.overlap_grad_reduce,
        "parallel.megatron.overlap_param_gather needs overlap_grad_reduce (Megatron "
        "overlaps both, or gradients alone)",
    ),
    Conflict(
        "run",
        lambda c: (
            c.parallel.recompute_granularity != "full"
            and (c.parallel.recompute_method, c.parallel.recompute_num_layers) != ("uniform", 1)
        ),
        "parallel.megatron.recompute_method and recompute_num_layers need "
        "parallel.recompute_granularity=full",
    ),
    Conflict(
        "run",
        lambda c: (
            c.parallel.recompute_granularity != "selective"
            and c.parallel.recompute_modules != ("core_attn",)
        ),
        "parallel.megatron.recompute_modules needs parallel.recompute_granularity=selective",
    ),
    # Transformer Engine overlaps them in buffers that Megatron's own training script sets up.
    Conflict(
        "run",
        lambda c: c.parallel.megatron.get("tp_comm_overlap"),
        "parallel.megatron.tp_comm_overlap is not supported in this version: nothing sets "
        "up Transformer Engine's buffers for it; remove it",
    ),
    Conflict(
        "train",
        lambda c: (c.judging.graded or c.judging.threshold < 1) and not _has_scores(c),
        "judging.graded and judging.threshold are for f1, a verifier or an agent of yours, or "
        "several with weights; name it, or remove them",
    ),
    Conflict(
        "run",
        lambda c: c.optimizer.min_lr > c.optimizer.lr,
        "optimizer.min_lr={c.optimizer.min_lr} is above optimizer.lr={c.optimizer.lr}",
    ),
    Conflict(
        "run",
        lambda c: c.optimizer.min_lr and c.optimizer.lr_decay_style == "constant",
        "optimizer.min_lr={c.optimizer.min_lr} has no effect with "
        "optimizer.lr_decay_style=constant; set linear or cosine, or remove it",
    ),
    Conflict(
        "train",
        lambda c: not c.evaluation.interval and (c.training.keep_best or c.training.early_stop),
        "training.keep_best and training.early_stop need evaluation.interval: every how "
        "many steps to validate",
    ),
    Conflict(
        "train",
        lambda c: c.training.early_stop > 0 and not c.training.keep_best,
        "training.early_stop={c.training.early_stop} needs training.keep_best: the metric "
        "that it watches",
    ),
    Conflict(
        "train",
        lambda c: c.evaluation.interval > 0 and not c.evaluation.benchmarks,
        "evaluation.interval={c.evaluation.interval} needs evaluation.benchmarks, for "
        "instance math500 or NAME=PATH",
    ),
    Conflict(
        "train",
        lambda c: (c.rollout.top_p < 1 or c.rollout.top_k) and _is_uncorrected(c),
        "rollout.top_p={c.rollout.top_p}, top_k={c.rollout.top_k} sample another policy "
        "than the one trained; set them to 1 and 0, or correct for it with "
        "objective.tis_level=token (or sequence)",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.tensor_model_parallel_size > 1 and c.rollout.engine == "transformers",
        "rollout.tensor_model_parallel_size > 1 needs rollout.engine=vllm, auto or server",
    ),
    Conflict(
        "train",
        lambda c: 0 < c.rollout.max_staleness < c.training.updates_per_rollout,
        "rollout.max_staleness={c.rollout.max_staleness} allows nothing, because the engines get "
        "weights after training.updates_per_rollout={c.training.updates_per_rollout} updates; set "
        "it to that or more, or to 0",
    ),
    Conflict(
        "train",
        lambda c: (
            c.rollout.oversample > 1 and c.rollout.filter_groups == "none" and not c.carries_over
        ),
        "rollout.oversample={c.rollout.oversample:g} has no effect without "
        "rollout.filter_groups, or rollout.max_staleness with an engine in the trainer's processes",
    ),
    Conflict(
        "train",
        lambda c: c.carries_over and not 1 < c.rollout.oversample <= 2,
        "rollout.max_staleness={c.rollout.max_staleness} carries what is unfinished when "
        "the batch is full, so more prompts than a batch have to be sampled, but not more "
        "than two: set rollout.oversample above 1, at most 2",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.max_staleness and _is_uncorrected(c),
        "rollout.max_staleness={c.rollout.max_staleness} trains on tokens of earlier "
        "policies; correct for it with objective.tis_level=token (or sequence)",
    ),
    Conflict(
        "train",
        lambda c: c.carries_over and c.rollout.logprob_diff_alarm > 0,
        "rollout.max_staleness={c.rollout.max_staleness} does not go with "
        "rollout.logprob_diff_alarm: tokens of earlier policies differ from the trainer's",
    ),
    Conflict(
        "agents",
        lambda c: c.rollout.agent and c.rollout.command,
        "rollout.agent and rollout.command both make the responses; remove one",
    ),
    Conflict(
        "agents",
        lambda c: c.rollout.agent_python and not c.rollout.agent,
        "rollout.agent_python={c.rollout.agent_python} is where rollout.agent runs; name that, "
        "or remove it",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.runs_agents and c.rollout.ranks_of_an_engine > 1,
        "rollout.agent and rollout.command need rollout.tensor_model_parallel_size=1, "
        "because the ranks of an engine would have to take each call together; or take "
        "rollout.engine=server",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.runs_agents and c.carries_over,
        "rollout.max_staleness={c.rollout.max_staleness} does not go with rollout.agent and"
        " rollout.command, whose sessions cannot be carried over; remove one of them, or take "
        "rollout.engine=server",
    ),
    Conflict(
        "train",
        lambda c: (
            c.rollout.asks_confidence == "turns" and not build_method(c.objective).scores_confidence
        ),
        "rollout.asks_confidence=turns does not go with objective.name={c.objective.name}, which "
        "has no reward of a confidence; take dcpo, or remove it",
    ),
    Conflict(
        "train",
        lambda c: (
            c.rollout.asks_confidence == "turns" and not build_method(c.objective).loss_is_separable
        ),
        "rollout.asks_confidence=turns does not go with a ratio or a weight of a whole response, "
        "which the confidences of earlier turns would be in; take objective.ratio=token, and "
        "objective.tis_level=token or none",
    ),
    Conflict(
        "train",
        lambda c: (
            c.rollout.filter_groups != "none" and find_method(c.objective.name).needs_old_logprobs
        ),
        "rollout.filter_groups does not go with objective.name={c.objective.name}, whose "
        "loss trains on every group; remove it",
    ),
    Conflict(
        "run",
        lambda c: (
            c.model.adapter is not None
            and c.model.adapter.layers is not None
            and c.parallel.pipeline_model_parallel_size > 1
        ),
        "model.adapter.layers={c.model.adapter.layers} with "
        "parallel.pipeline_model_parallel_size={c.parallel.pipeline_model_parallel_size} "
        "would leave stages without anything to train; remove one of them",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.quantization and c.rollout.engine == "transformers",
        "rollout.vllm.quantization={c.rollout.quantization} needs rollout.engine=vllm, auto"
        " or server; set one of them, or remove it",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.quantization and c.model.params_dtype != "bf16",
        "rollout.vllm.quantization={c.rollout.quantization} needs model.params_dtype=bf16, "
        "not {c.model.params_dtype}; set it, or remove the quantization",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.quantization and _is_uncorrected(c),
        "rollout.vllm.quantization={c.rollout.quantization} samples another policy than the"
        " one trained; correct for it with objective.tis_level=token (or sequence)",
    ),
    Conflict(
        "train",
        lambda c: c.rollout.weight_transfer == "nccl" and c.rollout.engine != "server",
        "rollout.weight_transfer=nccl is for rollout.engine=server; remove it",
    ),
    Conflict(
        "train",
        lambda c: c.data.prompts_per_step % c.training.updates_per_rollout,
        "training.updates_per_rollout={c.training.updates_per_rollout} does not divide "
        "data.prompts_per_step={c.data.prompts_per_step}",
    ),
    Conflict(
        "run with model",
        lambda c, m: m.num_experts and c.frozen,
        "model.adapter: no factors for experts; remove it for a mixture of experts",
    ),
    # Updates in FP8 of models with experts have not been tried.
    Conflict(
        "train with model",
        lambda c, m: c.rollout.quantization and m.num_experts,
        "rollout.vllm.quantization={c.rollout.quantization} is not supported for "
        "{c.model.path}, which has experts; remove it",
    ),
    # Megatron-core 0.16 does not tell the kernel for packed sequences that pairs are
    # neighbors (``fused_apply_rotary_pos_emb_thd``), which would rotate other pairs. With a
    # later release the kernel is used without the option (``policy/rotary.py``).
    Conflict(
        "run with model",
        lambda c, m: (
            m.rotary_interleaved
            and c.parallel.sequence_packing
            and c.parallel.megatron.get("apply_rope_fusion")
        ),
        "parallel.megatron.apply_rope_fusion: with parallel.sequence_packing the fused "
        "kernel rotates halves, and {c.model.path} has rotations of neighbors; remove one "
        "of the two",
    ),
    Conflict(
        "run with model",
        lambda c, m: (
            m.num_experts
            and c.parallel.tensor_model_parallel_size > 1
            and not c.parallel.sequence_parallel
        ),
        "parallel.tensor_model_parallel_size={c.parallel.tensor_model_parallel_size} needs "
        "parallel.sequence_parallel=true with a mixture of experts",
    ),
    Conflict(
        "run with model",
        lambda c, m: (
            m.num_experts
            and c.parallel.expert_model_parallel_size > 1
            and not c.parallel.use_distributed_optimizer
        ),
        "parallel.expert_model_parallel_size={c.parallel.expert_model_parallel_size} needs "
        "parallel.use_distributed_optimizer=true",
    ),
    Conflict(
        "run with model",
        lambda c, m: (
            m.num_experts
            and c.parallel.recompute_granularity == "selective"
            and ("mlp" in c.parallel.recompute_modules)
        ),
        "parallel.megatron.recompute_modules=mlp recomputes nothing with a mixture of "
        "experts; take core_attn, or parallel.recompute_granularity=full",
    ),
    Conflict(
        "train with model",
        lambda c, m: m.num_experts and c.rollout.engine == "server",
        "with a mixture of experts rollout.engine=server does not get the policy's weights "
        "in this version; take vllm or transformers",
    ),
    Conflict(
        "train with model",
        lambda c, m: c.rollout.routing_replay and not m.num_experts,
        "rollout.routing_replay=true: {c.model.path} has no experts; remove it",
    ),
    Conflict(
        "train with model",
        lambda c, m: c.rollout.routing_replay and c.parallel.megatron.get("moe_router_fusion"),
        "rollout.routing_replay does not go with parallel.megatron.moe_router_fusion; "
        "remove one of them",
    ),
    Conflict(
        "sft",
        lambda c: bool(c.evaluation.path) != bool(c.evaluation.interval),
        "evaluation.path and evaluation.interval go together; set both or neither",
    ),
    Conflict(
        "evaluate",
        lambda c: c.model.adapter_path and not c.model.path,
        "model.adapter_path (--adapter) is added to model.path (--model); name the model it"
        " was trained on",
    ),
    Conflict(
        "evaluate",
        lambda c: c.model.path and c.endpoint.url,
        "model.path and endpoint.url: evaluate one of them; remove the other",
    ),
    Conflict(
        "evaluate",
        lambda c: c.endpoint.tokenizer and c.endpoint.api == "chat",
        "endpoint.tokenizer sends token ids, which only endpoint.api=completions takes; "
        "leave out --tokenizer or --api",
    ),
    Conflict(
        "evaluate",
        lambda c: c.endpoint.url and c.data.thinking == "on" and not c.endpoint.tokenizer,
        "data.thinking=on needs endpoint.tokenizer (--tokenizer DIR), which renders the "
        "prompts here; or leave it out, and switch the server with --extra-body "
        '\'{{"chat_template_kwargs": {{"enable_thinking": true}}}}\'',
    ),
)


# ------------------------------------------------------------ rules of another form: parallelism


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


# ---------------------------------------------------------------------------- judging, optimization


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


# ------------------------------------------------------------------------------- objective, rollout
@rule("train")
def a_forecast_is_rewarded_by_a_proper_score(config: Config) -> Problem:
    """All responses to a forecast have one outcome, and dividing by the spread of their scores
    drives what they state to 0 or 1.
    """
    sources = config.data.sources
    templates = {source.template or config.data.template for source in sources}
    verifiers = {source.verifier or config.judging.verifier for source in sources}
    if "forecast" in templates:
        forecasts = "data.template=forecast"
    elif "forecast" in verifiers:
        forecasts = "judging.verifier=forecast"
    else:
        return None
    method = find_method(config.objective.name)
    options = resolve(config.objective)
    normalization = normalization_of_the_confidence(options, method.reads)
    if normalization is None:
        return (
            f"objective.name={config.objective.name} rewards no stated confidence, which is all "
            f"that {forecasts} is about; take rlcr or dcpo"
        )
    name, value = normalization
    if value == "std" and "forecast" in templates:
        return (
            f"objective.{name}=std with data.template=forecast drives what is stated to 0 or 1: "
            "all responses to a problem have one outcome; set mean "
            "(docs/bring_your_own.md#forecasts)"
        )
    if "calibration_loss" in method.reads and options.calibration_loss == "l1":
        return (
            f"objective.calibration_loss=l1 with {forecasts} drives what is stated to 0 or 1, its "
            "median: take brier, log or spherical"
        )
    return None


@rule("train")
def the_objective_reads_its_options(config: Config) -> Problem:
    try:
        resolve(config.objective)
    except UserError as error:
        return str(error)
    return None


@rule("train")
def a_coefficient_of_distillation_needs_a_teacher(config: Config) -> Problem:
    """And the other way round: ``objectives.resolve``."""
    for block, coef in zip(BLOCKS, config.objective.blocks("distill_coef"), strict=True):
        if coef and not config.objective.teacher:
            return (
                f"objective.distill_coef_{block}={coef:g} needs objective.teacher, the directory "
                "of the model that is distilled; name it, or remove the coefficient"
            )
    return None


@rule("train")
def a_served_teacher_reads_at_temperature_one(config: Config) -> Problem:
    """A server takes the log-probs of a prompt from the logits as they are."""
    temperature = config.rollout.temperature
    if config.objective.teacher_is_served and temperature != 1:
        return (
            f"objective.teacher={config.objective.teacher} is a server, whose log-probs of what "
            f"was sampled are at temperature 1; rollout.temperature={temperature:g} needs a "
            "teacher in a directory"
        )
    return None


@rule("train")
def a_source_with_a_teacher_needs_a_server_for_the_others(config: Config) -> Problem:
    """The samples of every source have a teacher, or none do."""
    named = [source.teacher for source in config.data.sources if source.teacher]
    if named and not config.objective.teacher_is_served:
        return (
            f"data.path: a source has the teacher {named[0]}, and objective.teacher="
            f"{config.objective.teacher or '(not set)'} is no server; name the server that reads "
            "the other sources"
        )
    return None


def _is_uncorrected(config: Config) -> bool:
    """Return whether the loss takes sampled tokens as the trained policy's own."""
    objective = resolve(config.objective)
    return objective.tis_level == "none" and objective.old_logprobs == "trainer"


@rule("agents")
def options_of_agents_need_an_agent(config: Config | EvaluateConfig) -> Problem:
    rollout: AgentsConfig = config.rollout
    defaults = type(rollout)()
    for name in () if rollout.runs_agents else AGENT_OPTIONS:
        if getattr(rollout, name, None) != getattr(defaults, name, None):
            return f"rollout.{name} has no effect without rollout.agent or rollout.command"
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
def a_server_has_an_address(config: Config) -> Problem:
    rollout = config.rollout
    if (rollout.engine == "server") != bool(rollout.endpoint):
        return "rollout.engine=server and rollout.endpoint=URL go together; set both or neither"
    servers = [url.rstrip("/").removesuffix("/v1") for url in rollout.endpoint]
    for server in servers:
        if servers.count(server) > 1:
            return f"rollout.endpoint names {server} twice; name every server once"
    return None


# ----------------------------------------------------------------------------------- with the model


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


@rule("evaluate")
def agents_need_a_model_in_this_process(config: EvaluateConfig) -> Problem:
    if config.rollout.runs_agents and config.endpoint.url:
        return (
            "rollout.agent and rollout.command (--agent, --command) make responses with a model in "
            "this process; name it as model.path (--model)"
        )
    return None


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


# what a request has from other options, and which
_OF_REQUESTS = {
    "model": "endpoint.model (--model-name)",
    "temperature": "evaluation.temperature (--temperature)",
    "top_p": "evaluation.top_p (--top-p)",
    "top_k": "evaluation.top_k (--top-k)",
    "max_tokens": "evaluation.max_tokens (--max-tokens)",
    "seed": "evaluation.seed (--seed), of which each repeat gets another",
}


@rule("evaluate")
def what_is_added_to_requests_is_no_other_option(config: EvaluateConfig) -> Problem:
    for name, option in _OF_REQUESTS.items():
        if config.endpoint.extra_body.get(name) is not None:
            return f"endpoint.extra_body.{name} (--extra-body) would replace {option}; set that"
    return None
