"""The sections of a configuration: frozen dataclasses whose types, ranges and defaults pydantic
checks.

The text below an option is its meaning, in ``docs/options.md`` and for ``dcpo config``
(``config/reference.py``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from megatron_dcpo.config.field_types import (
    STRICT,
    Columns,
    FilterGroups,
    Names,
    NonNegative,
    Positive,
    RowFunction,
    Share,
    Thinking,
    Unread,
    VerifierChoice,
    check_row_function,
)
from megatron_dcpo.config.parallel import ParallelConfig
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.runtime.brought import REASONING_GYM
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.types import CONFIDENCE_TAG

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, config=STRICT)
class AdapterConfig:
    """A low-rank adapter: (alpha / rank) B A x is added to the projections ``targets`` of every
    layer.
    """

    rank: Positive | None = None
    """Rank of the factors A and B; 16 if it is not set."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of the adapter: it adds (alpha / rank) B A x; 32 if it is not set."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] | None = None
    """Projections of every layer that get factors; all of them if it is not set."""
    layers: Annotated[str, Field(pattern=r"^last [1-9]\d*$")] | None = None
    """Layers that get factors: ``last 6`` for the six on top, all if it is not set. Nothing is
    propagated back through the layers below, which takes less time and memory.
    """
    path: str = ""
    """Directory of an adapter in PEFT's format to go on from, a run's adapter/ for instance; it
    brings its own rank, alpha, targets and layers.
    """

    def __post_init__(self) -> None:
        names = ("rank", "alpha", "targets", "layers")
        is_set = [name for name in names if getattr(self, name) is not None]
        if self.path and is_set:
            raise ValueError(
                f"model.adapter.path has its own {is_set[0]}; remove model.adapter.{is_set[0]}"
            )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The policy that a run starts from, and what its layers compute in."""

    path: str
    """Directory of a Hugging Face checkpoint, of a family that docs/models.md has, or its name on
    the hub, OWNER/NAME or OWNER/NAME@REVISION.
    """
    adapter: AdapterConfig | None = None
    """Train low-rank factors (LoRA) and keep the model's own parameters as they are; not set: train
    all parameters.
    """
    params_dtype: Literal["fp32", "bf16"] = "bf16"
    """Element type of the parameters and activations; the optimizer has fp32 copies."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Whose layers: Transformer Engine's, Megatron's own (local), or the former on a GPU (auto)."""
    head_dtype: Literal["auto", "fp32", "model"] = "auto"
    """What trainer and engine compute logits in: fp32, params_dtype (model), or fp32 on a GPU
    (auto).
    """


@dataclass(frozen=True, config=STRICT)
class SourceConfig:
    """One source of ``data.path``, if it is a list."""

    path: Annotated[str, Field(min_length=1)]
    """As data.path: a file, a hub data set, reasoning_gym:TASK."""
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """What the source is called in the metrics; empty: as its file."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of every step, of the sum of all weights."""
    verifier: VerifierChoice | None = None
    """Used instead of judging.verifier."""
    template: str | None = None
    """Used instead of data.template."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task of Reasoning Gym, by its own names."""
    size: Positive | None = None
    """Problems that Reasoning Gym makes of the task."""
    seed: NonNegative | None = None
    """Seed of the problems that Reasoning Gym makes."""
    columns: Columns = dataclasses.field(default_factory=dict)
    """Used instead of data.columns and data.row."""
    row: RowFunction = ""
    """Used instead of data.columns and data.row."""
    teacher: Annotated[str, Field(pattern="^(https?://.*)?$")] = ""
    """A vLLM server, used instead of objective.teacher, which is one as well."""

    def __post_init__(self) -> None:
        is_set = self.options or self.size is not None or self.seed is not None
        if is_set and not self.path.startswith(REASONING_GYM):
            raise ValueError("options, size and seed are for path: reasoning_gym:TASK; remove them")
        for name in _set_twice(self):
            raise ValueError(f"{name} is set here and in the path, {self.path}; remove one of them")
        if (self.columns or self.row) and self.path.startswith(REASONING_GYM):
            raise ValueError("columns and row are for files and hub data sets; remove them")
        check_row_function(self.columns, self.row)


def _set_twice(source: SourceConfig) -> list[str]:
    """Return the options of a source that the query of its path sets as well."""
    query = parse_qs(source.path.partition("?")[2], keep_blank_values=True)
    named = set(source.options)
    named |= {name for name in ("size", "seed") if getattr(source, name) is not None}
    return sorted(named & set(query))


def _with_reading(source: SourceConfig, data: DataConfig) -> SourceConfig:
    """Return a source that is read as ``data`` says, unless it says it itself or is no file or hub
    data set.
    """
    if source.columns or source.row or source.path.startswith(REASONING_GYM):
        return source
    return dataclasses.replace(source, columns=data.columns, row=data.row)


def _as_sources(value: object) -> object:
    """Return one mapping as a list of it, and paths in a list as mappings."""
    if isinstance(value, list | tuple):
        return [{"path": one} if isinstance(one, str) else one for one in value]
    return [value] if isinstance(value, dict | SourceConfig) else value


Sources = Annotated[
    Annotated[str, Tag("(path)")]
    | Annotated[tuple[SourceConfig, ...], Field(min_length=1), Tag("(sources)")],
    Discriminator(lambda value: "(sources)" if isinstance(value, list | tuple) else "(path)"),
    BeforeValidator(_as_sources),
]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The problems, and how they become prompts."""

    path: Sources
    """A file of JSON lines, JSON, CSV, parquet or Arrow, several by a pattern (train-*.parquet), a
    folder of save_to_disk, a hub data set, reasoning_gym:TASK, or a list of sources that are mixed
    by weight (docs/bring_your_own.md#data).
    """
    columns: Columns = dataclasses.field(default_factory=dict)
    """Columns of the file by the names of the schema, {problem: prompt, answer: solution}, where it
    has others; with dots a field, extra_info.answer. An empty name leaves out what has that name
    (docs/bring_your_own.md#rows).
    """
    row: RowFunction = ""
    """Function of yours that reads a row, my_rows.py:row, for any shape of rows: it gets the row
    and returns what it is by the names of the schema, or None to leave it out (examples/rows).
    """
    unread: Unread = "say"
    """What becomes of columns with content that are not read: say lists them at the start with
    their shares, refuse is an error.
    """
    template: str = "paper"
    """How a problem becomes a prompt: paper, abstain, grpo, chat, raw, or a function of yours,
    my_prompt.py:render.
    """
    thinking: Thinking = "off"
    """Whether the chat template asks for thinking, if it has that switch: off, on, or as the
    template has it (auto); answer and confidence are read after the end-of-thinking token
    (docs/bring_your_own.md#thinking-models).
    """
    prompts_per_step: Positive = 256
    """Prompts of a step; each gets rollout.group_size responses."""
    max_prompt_length: Positive = 1024
    """Longest prompt in tokens; problems with a longer one are left out."""
    limit: NonNegative = 0
    """Only the first problems of each source (0: all)."""
    shuffle: bool = True
    """Shuffle the problems in every epoch; otherwise take them in the order of the file."""
    order: str = ""
    """Column that each source is sorted by, the least first (a curriculum); shuffle is then about
    equal ones.
    """

    def __post_init__(self) -> None:
        check_row_function(self.columns, self.row)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources of ``path``, of one path too, each with how its rows are read."""
        if isinstance(self.path, str):
            return (_with_reading(SourceConfig(self.path), self),)
        return tuple(_with_reading(source, self) for source in self.path)


# The longest that a server may take for one response, the wait in its queue included. Only a server
# that hangs should reach it: one that ends closes its connections, and a host that is lost is
# noticed in two minutes (runtime/http_json.py). 2,048 responses of 32,768 tokens of an 8B model
# take eight GPUs three hours by dcpo plan, which says when a rollout takes longer than this.
REQUEST_SECONDS = 6 * 3600.0


@dataclass(frozen=True, config=STRICT)
class AgentsConfig:
    """The agents that make responses, in a training and in ``dcpo evaluate``."""

    agent: str = ""
    """Function of yours that is an agent, my_agent.py:run: it gets a problem and an OpenAI client
    of the policy, and may give a verdict (docs/agents.md).
    """
    agent_python: str = ""
    """Python in which rollout.agent runs, venv/bin/python, with libraries of its own; empty: the
    one that runs dcpo.
    """
    command: str = ""
    """Program that is an agent: it finds the policy at OPENAI_BASE_URL and the problem on its
    standard input (docs/agents.md).
    """
    agent_sessions: Positive = 64
    """Agents that run at once for each engine, each in a process of its own."""
    agent_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds of a session, the policy's answers included, before its agent is ended."""
    agent_calls: Positive = 64
    """Calls of a session; the next one is refused."""
    asks_confidence: bool | Literal["turns"] = True
    """Ask the policy for the confidence that it has not stated at the end of a session; turns:
    after each earlier answer of it too, where the agent does not see it.
    """

    @property
    def runs_agents(self) -> bool:
        """Return whether agents make the responses."""
        return bool(self.agent or self.command)


@dataclass(frozen=True, config=STRICT)
class RolloutConfig(AgentsConfig):
    """How responses are sampled, and how the engine gets the weights."""

    engine: Literal["auto", "vllm", "transformers", "server"] = "auto"
    """What samples: vLLM if it can run the model on a GPU, else transformers (auto); server is
    vLLM at endpoint.
    """
    tensor_model_parallel_size: Positive = 1
    """GPUs of one vLLM engine, whatever the training has: ranks, or GPUs of the server."""
    gpu_memory_utilization: Share = 0.6
    """Share of the GPU's memory that vLLM may take."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Bytes of a bucket of weights on the way to the engine: the extra memory of a synchronization.
    """
    top_p: Share = 1.0
    """Sample from the fewest tokens whose probabilities add up to this; below 1 needs
    objective.tis_level.
    """
    top_k: NonNegative = 0
    """Sample from the N most probable tokens (0: from all); needs objective.tis_level."""
    logprob_diff_alarm: Annotated[float, Field(ge=0)] = 0.0
    """Largest difference of a token's log-prob between engine and trainer, in nats, before a
    line in the log says so (0: never).
    """
    endpoint: Names = ()
    """Addresses of the vLLM servers of engine=server, as http://host:8000/v1; comma separated or a
    list. Every rank asks one of them.
    """
    weight_transfer: Literal["files", "nccl"] = "files"
    """How the server gets the weights: by a directory on a disk that both see, or from GPU to GPU.
    """
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt: the group G that an advantage is relative to."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it before sampling; the trainer's log-probs as well."""
    max_response_length: Positive = 3000
    """Longest response in tokens, EOS included; what is longer is truncated."""
    max_num_seqs: Positive = 512
    """Responses that an engine samples at once, at most."""
    routing_replay: bool = False
    """The training's forward pass takes the experts that the engine chose for each token (R3); of
    models with experts.
    """
    vllm: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Engine arguments of vLLM, passed on by name (docs/engines.md#options-of-vllm)."""
    filter_groups: FilterGroups = "none"
    """Draw prompts until prompts_per_step groups have a signal in the reasoning (reasoning, or
    true), the others train the confidence alone; until as many train any block (any); or take all.
    """
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Prompts drawn for each one that is missing, by filter_groups; for each of a step, by
    max_staleness with an engine in the trainer's processes.
    """
    max_refills: NonNegative = 4
    """Rounds, at most, in which further prompts are drawn because of filter_groups."""
    max_staleness: NonNegative = 0
    """Optimizer updates that a token's weights may miss when the training on its batch begins (0:
    none). A server generates the next batch while this one trains; an engine in the trainer's
    processes ends a rollout when the batch is full. What is unfinished goes on with new weights.
    """

    @property
    def ranks_of_an_engine(self) -> int:
        """Return how many ranks of the training are one engine. Of a server's engines none is."""
        if self.engine == "server":
            return 1
        return self.tensor_model_parallel_size

    @property
    def quantization(self) -> str | None:
        """Return vLLM's name of what the engine quantizes weights to when it loads them, if it
        does.
        """
        return self.vllm.get("quantization") or None


@dataclass(frozen=True, config=STRICT)
class JudgingConfig:
    """What decides whether a response is right, and what opens its confidence."""

    marker: Annotated[str, Field(min_length=1)] = CONFIDENCE_TAG
    """The confidence tag: the text that opens the confidence block."""
    verifier: VerifierChoice = "math"
    """What decides correctness: math, code, of questions exact, f1 or choice
    (docs/bring_your_own.md#questions), a function of yours (my_reward.py:verify), a server
    (https://host/path; docs/bring_your_own.md#a-verifier), or several of them with weights,
    {my_reward.py:right: 0.7, my_reward.py:short: 0.3} (docs/bring_your_own.md#several-verifiers).
    """
    threshold: Share = 1.0
    """Least score of a right response, by f1, a verifier of yours, or several verifiers."""
    graded: bool = False
    """The reward is the score of f1, your verifier, or several verifiers itself, else 1 from
    threshold on and 0 below.
    """
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of a step's responses that may have no judgement, because an agent or your verifier
    failed, before the run ends.
    """
    sandbox: Annotated[str, Field(min_length=1)] = "auto"
    """What programs run in: bubblewrap, landlock, unsafe (nothing), or the safest here (auto)."""
    test_seconds: Annotated[float, Field(gt=0)] = CodeLimits.test_seconds
    """Seconds of one test of a program, and of one call of your verifier."""
    program_seconds: Annotated[float, Field(gt=0)] = CodeLimits.program_seconds
    """Seconds of all tests of a program."""
    memory_mb: Annotated[int, Field(ge=128)] = CodeLimits.memory_mb
    """MiB of memory of a program, and of a process of your verifier."""

    @property
    def limits(self) -> CodeLimits:
        return CodeLimits(self.test_seconds, self.program_seconds, self.memory_mb)


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW as the paper and Megatron name it; its betas are options of Megatron
    (``parallel.megatron``).
    """

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate after the warmup."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that the decay ends at."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from lr to min_lr over training.steps."""
    lr_warmup_iters: NonNegative = 0
    """Steps in which the learning rate rises from 0 to lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay of AdamW, times the learning rate."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient of an update; a larger one is scaled down (0: off)."""


@dataclass(frozen=True, config=STRICT)
class SampledProblemsConfig:
    """Benchmarks and how they are sampled, in a validation and in ``dcpo evaluate``."""

    benchmarks: str | tuple[str, ...] = ""
    """Names (math500, aime24) or NAME=PATH, comma separated or a list."""
    samples: Positive = 1
    """Responses to each problem."""
    limit: NonNegative = 0
    """Only the first problems of each benchmark (0: all)."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """As rollout.temperature, for these problems; 0 is greedy, the most probable token always."""
    top_p: Share = 0.8
    """As rollout.top_p, for these problems."""
    top_k: NonNegative = 20
    """As rollout.top_k, for these problems."""
    max_tokens: NonNegative = 0
    """Longest response in tokens (0: rollout.max_response_length)."""
    kinds: str = ""
    """What the kinds of problem are that AUROC is also measured within: benchmark, digits (of the
    answer), or a column of the data; empty: the data's kind, if it names one (--kinds).
    """

    @property
    def benchmark_list(self) -> str:
        """Return the benchmarks as one text, separated by commas."""
        return self.benchmarks if isinstance(self.benchmarks, str) else ",".join(self.benchmarks)


@dataclass(frozen=True, config=STRICT)
class ValidationConfig(SampledProblemsConfig):
    """Validation by the run's own engine, before the first and after the last step too. Sampling:
    the paper's.
    """

    interval: NonNegative = 0
    """Validate every N steps (0: never)."""


@dataclass(frozen=True, config=STRICT)
class LoopConfig:
    """The loop of any training: steps, micro-batches, checkpoints."""

    steps: Positive = 120
    """Steps of the run: a rollout and its updates each."""
    micro_batch_size: Positive = 8
    """Sequences of a forward and backward pass on a rank; without parallel.sequence_packing."""
    max_tokens_per_micro_batch: Positive = 16384
    """Tokens of a forward and backward pass on a rank, with parallel.sequence_packing; a longer
    sequence is alone.
    """
    save_interval: NonNegative = 20
    """Save a checkpoint every N steps (0: only at the end)."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    resume: Literal["none", "auto", "strict"] = "none"
    """auto: go on after the newest intact checkpoint of run_dir; strict: refuse if that is not the
    newest, so that no step is lost; none: refuse a run_dir that has one.
    """
    async_save: bool | Literal["auto"] = "auto"
    """Write checkpoints alongside the training, from a copy on the host; auto: on a GPU."""

    @property
    def updates_per_step(self) -> int:
        """Return how many updates of the optimizer a step takes."""
        return 1


@dataclass(frozen=True, config=STRICT)
class TrainingConfig(LoopConfig):
    """The loop: steps, updates, checkpoints."""

    updates_per_rollout: Positive = 1
    """Updates of the optimizer on one rollout (mini-batches); divides data.prompts_per_step."""
    keep_best: str = ""
    """Metric of the validation, METRIC or BENCHMARK/METRIC, whose best checkpoint is kept too."""
    early_stop: NonNegative = 0
    """End when N validations in a row have not improved on keep_best (0: never)."""
    callback: str = ""
    """Function (updater, samples, step) by import path, called before every update; the numbers
    that it returns are metrics.
    """
    profile_steps: tuple[Positive, ...] = ()
    """Steps of which the first rank leaves a trace in profile/."""
    offload_optimizer_during_rollout: bool = False
    """The state of the optimizer waits in the host's memory while responses are sampled."""

    @property
    def updates_per_step(self) -> int:
        """Return how many updates of the optimizer a step takes."""
        return self.updates_per_rollout


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """What a run writes besides metrics.jsonl."""

    to: Names = ("tensorboard", "report")
    """Loggers: tensorboard, report (report.html, every minute), wandb, mlflow, swanlab, trackio, or
    one of yours by import path.
    """
    project: str = ""
    """Project of those but tensorboard; empty: the name of the directory that run_dir is in."""
    samples_interval: NonNegative = 10
    """Write the judged responses every N steps (0: never)."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class RunConfig:
    """What every training has, by reinforcement (:class:`Config`) or supervised
    (``config/supervised_sections.py``).
    """

    run_dir: str
    """Directory that the run writes to, seen from the working directory."""
    seed: int = 1
    """Seed of the sampling and of the order of the data."""
    model: ModelConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: LoopConfig
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    @property
    def frozen(self) -> bool:
        """Return whether the model's own parameters stay as they are, because ``model.adapter`` is
        trained.
        """
        return self.model.adapter is not None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Config(RunConfig):
    """One training run; ``config.yaml`` of the run directory holds it in full."""

    data: DataConfig
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    judging: JudgingConfig = dataclasses.field(default_factory=JudgingConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)

    @property
    def rollouts_behind(self) -> int:
        """Return how many rollouts a token may be older than the one whose weights are the newest:
        whole ones, because the engines get weights once in a rollout, and of a server one, because
        it generates one batch ahead.
        """
        behind = self.rollout.max_staleness // self.training.updates_per_rollout
        return min(behind, 1) if self.rollout.engine == "server" else behind

    @property
    def generates_ahead(self) -> bool:
        """Return whether the next batch is generated while this one trains."""
        return self.rollout.engine == "server" and self.rollouts_behind > 0

    @property
    def carries_over(self) -> bool:
        """Return whether a rollout leaves unfinished responses for the next one."""
        return self.rollout.engine != "server" and self.rollouts_behind > 0

    @property
    def most_groups(self) -> int:
        """Return the most groups that a step may train on. With ``filter_groups: reasoning`` these
        are all that its rounds draw when no group is informative.
        """
        per_step = self.data.prompts_per_step
        if self.rollout.filter_groups != "reasoning":
            return per_step
        per_round = math.ceil(per_step * self.rollout.oversample)
        return per_round * (1 + self.rollout.max_refills)
