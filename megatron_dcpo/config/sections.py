"""The sections of a configuration: frozen dataclasses whose types, ranges and defaults pydantic checks."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from megatron_dcpo.errors import did_you_mean, one_line
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.runtime.plugins import is_import_path
from megatron_dcpo.sandbox.local import CodeLimits
from megatron_dcpo.types import CONFIDENCE_TAG, REASONING_GYM

_STRICT = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, config=_STRICT)
class AdapterConfig:
    """A low-rank adapter: (alpha / rank) B A x is added to the projections ``targets`` of every layer."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = get_args(Projection)


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """``path``: a Hugging Face checkpoint directory (Qwen3, Llama-3.x, Qwen2.5). ``adapter``: train these low-rank factors
    (LoRA), and keep the model's own parameters as they are. ``head_dtype``: what logits are computed in, by trainer and
    engine: ``fp32``, ``model`` (``params_dtype``), or ``auto``, which is fp32 on a GPU."""

    path: str
    adapter: AdapterConfig | None = None
    params_dtype: Literal["fp32", "bf16"] = "bf16"
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    head_dtype: Literal["auto", "fp32", "model"] = "auto"


@dataclass(frozen=True, config=_STRICT)
class ParallelConfig:
    """Megatron's parallelism options. Data parallelism is what is left of the world size.

    Experts are divided over ``expert_model_parallel_size`` ranks, one over ``expert_tensor_parallel_size`` (default:
    TP). ``megatron``: whatever else Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig
    know, by their names (docs/scaling.md#options-of-megatron). Those of :data:`PLANNED` are read by the planner as
    well, and are attributes of this section."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    expert_model_parallel_size: Positive = 1
    expert_tensor_parallel_size: Positive | None = None
    context_parallel_size: Positive = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    sequence_packing: bool = False
    distributed_timeout_minutes: Positive = 30
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.megatron.items():
            if name in PLANNED:
                self.megatron[name] = _checked(f"parallel.megatron.{name}", PLANNED[name][0], value)

    def __getattr__(self, name: str) -> Any:
        """Return an option of :data:`PLANNED`: as ``megatron`` has it, else Megatron's default."""
        if name not in PLANNED:
            raise AttributeError(name)
        return self.megatron.get(name, PLANNED[name][1])

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Return the sizes as ``runtime.distributed.initialize`` takes them."""
        names = "tensor_model pipeline_model virtual_pipeline_model context expert_model expert_tensor"
        return tuple(getattr(self, f"{name}_parallel_size") for name in names.split())


# Options of Megatron that decide which rank holds what, or how much memory it takes: their types and defaults.
PLANNED: dict[str, tuple[Any, Any]] = {
    "virtual_pipeline_model_parallel_size": (Positive, 1),
    "num_layers_in_first_pipeline_stage": (Positive, None),
    "num_layers_in_last_pipeline_stage": (Positive, None),
    "account_for_embedding_in_pipeline_split": (bool, False),
    "account_for_loss_in_pipeline_split": (bool, False),
    "pipeline_model_parallel_layout": (str, None),
    "cp_comm_type": (Literal["p2p", "all_gather"], "p2p"),
    "overlap_grad_reduce": (bool, False),
    "overlap_param_gather": (bool, False),
    "recompute_method": (Literal["uniform", "block"], "uniform"),
    "recompute_num_layers": (Positive, 1),
    "recompute_modules": (tuple[Literal["core_attn", "mlp"], ...], ("core_attn",)),
}


def _checked(name: str, kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {one_line(error.errors()[0]['msg'])} (found {value!r})") from None


QUESTIONS = ("exact", "f1", "choice")
BUILT_IN = ("math", "code", *QUESTIONS)  # verifiers
LOCAL = ("localhost", "127.0.0.1", "::1")


def _verifier(name: str) -> str:
    if "://" in name:
        address = urlsplit(name)
        if address.scheme != "https" and (address.scheme != "http" or address.hostname not in LOCAL):
            raise ValueError("expected an https:// address; http:// is for this machine (http://localhost:PORT) alone")
        if address.username or address.password or address.query:
            raise ValueError("the address is shown in logs; leave the key out, and set DCPO_VERIFIER_KEY")
    elif name not in BUILT_IN and not is_import_path(name):
        expected = "math, code, exact, f1, choice, an import path as my_reward.py:verify, or an https:// address"
        raise ValueError(f"expected {expected}{did_you_mean(name, BUILT_IN)}")
    return name


VerifierName = Annotated[str, AfterValidator(_verifier)]


@dataclass(frozen=True, config=_STRICT)
class SourceConfig:
    """One source of ``data.path``. ``weight``: its share of every step, of the weights' sum. ``verifier`` and ``template``:
    instead of ``judging.verifier`` and ``data.template``. ``name``: in the metrics (default: the file's).

    ``options``, ``size`` and ``seed`` are those of a task of Reasoning Gym, ``reasoning_gym:TASK``.
    """

    path: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    verifier: VerifierName | None = None
    template: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: Positive | None = None
    seed: NonNegative | None = None

    def __post_init__(self) -> None:
        given = self.options or self.size is not None or self.seed is not None
        if given and not self.path.startswith(REASONING_GYM):
            raise ValueError("options, size and seed are for path: reasoning_gym:TASK; remove them")


def _as_sources(value: Any) -> Any:
    """Return one mapping as a list of it, and paths in a list as mappings."""
    if isinstance(value, list | tuple):
        return [{"path": one} if isinstance(one, str) else one for one in value]
    return [value] if isinstance(value, dict | SourceConfig) else value


Sources = Annotated[
    Annotated[str, Tag("path")] | Annotated[tuple[SourceConfig, ...], Field(min_length=1), Tag("sources")],
    Discriminator(lambda value: "sources" if isinstance(value, list | tuple) else "path"),
    BeforeValidator(_as_sources),
]


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """``path``: jsonl, json or parquet, a hub data set name, ``reasoning_gym:TASK``, or a list of sources that are mixed by
    their weights (docs/bring_your_own.md#data). ``template``: how a problem becomes a prompt:
    ``paper``, ``abstain``, ``grpo``, ``chat``, ``raw``, or an import path, ``my_prompt.py:render``.
    ``order``: a column by which each source is sorted, the least first (a curriculum); ``shuffle`` is then of equal ones.
    ``untested``: keep programming problems whose tests assert nothing, which any program passes."""

    path: Sources
    template: str = "paper"
    prompts_per_step: Positive = 256
    max_prompt_length: Positive = 1024
    limit: NonNegative = 0
    shuffle: bool = True
    order: str = ""
    untested: bool = False

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources of ``path``, of one path too."""
        return (SourceConfig(self.path),) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, config=_STRICT)
class RolloutConfig:
    """``group_size`` is G, the responses per prompt; ``max_response_length`` in tokens, EOS included.

    ``engine``: ``auto`` takes vLLM on a GPU where it is installed and can run the model, else transformers; ``server`` is a
    vLLM server of its own at ``endpoint``, which gets the weights by ``weight_transfer``. ``tensor_model_parallel_size``:
    ranks per engine, whatever the training has. At most ``max_num_seqs`` responses are sampled at once. ``vllm``:
    whatever else vLLM's engine arguments know, by their names (docs/rollout.md#options-of-vllm). ``bucket_bytes``
    bounds the extra memory of a weight synchronization. ``logprob_diff_alarm``: largest |engine - trainer| log-prob of a
    step allowed (0: any). ``filter_groups``: groups that train neither block are replaced by the next prompts, in at most
    ``max_refills`` rounds; each draws ``oversample`` times as many as are missing. ``max_staleness``: a rollout ends
    when the batch is full, of ``oversample`` times as many prompts; the next steps go on with what is unfinished, which
    has tokens at most that many steps old in the end.
    """

    engine: Literal["auto", "vllm", "transformers", "server"] = "auto"
    tensor_model_parallel_size: Positive = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    bucket_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    logprob_diff_alarm: Annotated[float, Field(ge=0)] = 0.0
    logprob_diff_action: Literal["warn", "stop"] = "warn"
    endpoint: str = ""
    weight_transfer: Literal["files", "nccl"] = "files"
    group_size: Annotated[int, Field(ge=2)] = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_response_length: Positive = 3000
    max_num_seqs: Positive = 512
    vllm: dict[str, Any] = dataclasses.field(default_factory=dict)
    filter_groups: bool = False
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    max_refills: NonNegative = 4
    max_staleness: NonNegative = 0


@dataclass(frozen=True, config=_STRICT)
class JudgingConfig:
    """``marker`` opens the confidence block; ``verifier`` decides correctness R: ``math``, ``code``, of questions ``exact``,
    ``f1`` or ``choice`` (docs/bring_your_own.md#questions), or the user's own (docs/bring_your_own.md#a-verifier): a
    function, ``my_reward.py:verify``, or a server, ``https://host/path``.

    ``threshold``: a response is right when ``f1`` or the user's verifier gives it at least this score. ``graded``: R is
    the score itself, else it is 1 or 0. ``max_error_rate``: share of a step's responses that the user's verifier may fail
    on. ``sandbox``: what programs run in (``auto``, ``bubblewrap``, ``landlock``, ``unsafe``).
    ``test_seconds``, ``program_seconds``: wall time of one test and of all tests of a program. ``test_seconds`` and
    ``memory_mb`` also bound one call of the user's verifier.
    """

    marker: Annotated[str, Field(min_length=1)] = CONFIDENCE_TAG
    verifier: VerifierName = "math"
    threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    graded: bool = False
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    sandbox: Annotated[str, Field(min_length=1)] = "auto"
    test_seconds: Annotated[float, Field(gt=0)] = CodeLimits.test_seconds
    program_seconds: Annotated[float, Field(gt=0)] = CodeLimits.program_seconds
    memory_mb: Annotated[int, Field(ge=128)] = CodeLimits.memory_mb

    @property
    def limits(self) -> CodeLimits:
        return CodeLimits(self.test_seconds, self.program_seconds, self.memory_mb)


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """AdamW as the paper and Megatron name it. ``lr_warmup_iters`` counts rollout steps."""

    lr: Annotated[float, Field(ge=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: NonNegative = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_grad: Annotated[float, Field(ge=0)] = 1.0


@dataclass(frozen=True, config=_STRICT)
class ValidationConfig:
    """Validation every ``interval`` steps (0: off), before the first and after the last one, by the run's own engine.
    ``benchmarks``: as ``dcpo evaluate --benchmarks``, or a list; the first ``limit`` problems of each (0: all),
    ``samples`` responses to each. Sampling: the paper's evaluation. ``max_tokens`` 0:
    ``rollout.max_response_length``."""

    interval: NonNegative = 0
    benchmarks: str | tuple[str, ...] = ""
    samples: Positive = 1
    limit: NonNegative = 0
    temperature: Annotated[float, Field(gt=0)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    top_k: NonNegative = 20
    max_tokens: NonNegative = 0


@dataclass(frozen=True, config=_STRICT)
class TrainingConfig:
    """``updates_per_rollout``: optimizer steps on one rollout (mini-batches). ``save_interval`` 0: only at the end.

    ``async_save`` writes checkpoints beside the training (``auto``: on a GPU); ``max_nonfinite_steps`` skipped updates
    in a row end the run. ``profile_steps``: steps of which the first rank leaves a trace in ``profile/``.
    ``keep_best``: BENCHMARK/METRIC or METRIC of the validation, whose best checkpoint is kept beside the newest
    ``keep_checkpoints``; ``early_stop``: the run ends when that many validations in a row have not improved on it (0:
    never). ``on_warning``: whether a warning of ``training/warnings.py`` ends the run."""

    steps: Positive = 120
    updates_per_rollout: Positive = 1
    micro_batch_size: Positive = 8
    max_tokens_per_micro_batch: Positive = 16384
    save_interval: NonNegative = 20
    keep_checkpoints: Positive = 2
    keep_best: str = ""
    early_stop: NonNegative = 0
    resume: Literal["none", "auto"] = "none"
    export_hf: bool = True
    gradient_probe_interval: NonNegative = 10
    async_save: bool | Literal["auto"] = "auto"
    max_nonfinite_steps: Positive = 3
    profile_steps: tuple[Positive, ...] = ()
    offload_optimizer_during_rollout: bool = False
    on_warning: Literal["log", "stop"] = "log"


@dataclass(frozen=True, config=_STRICT)
class LoggingConfig:
    """``samples_interval``: dump judged responses every that many steps (0: never).

    ``to``: loggers beside metrics.jsonl, of tensorboard, wandb, mlflow, swanlab, or an import path. ``project``: of wandb,
    mlflow and swanlab (empty: the name of the directory that run_dir is in). ``verl_names``: log under verl's names too."""

    to: tuple[str, ...] = ("tensorboard",)
    project: str = ""
    verl_names: bool = False
    samples_interval: NonNegative = 10


@dataclass(frozen=True, config=_STRICT)
class Config:
    """One training run; ``config.yaml`` of the run directory holds it in full."""

    run_dir: str
    model: ModelConfig
    data: DataConfig
    seed: int = 1
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    judging: JudgingConfig = dataclasses.field(default_factory=JudgingConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    @property
    def frozen(self) -> bool:
        """Return whether the model's own parameters stay as they are, because ``model.adapter`` is trained."""
        return self.model.adapter is not None
