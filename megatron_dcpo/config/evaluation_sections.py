"""The sections that ``dcpo evaluate`` reads; ``judging`` is the section of a training."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dcpo.config.field_types import (
    STRICT,
    Columns,
    NonNegative,
    Positive,
    RowFunction,
    Thinking,
    Unread,
    check_row_function,
)
from megatron_dcpo.config.sections import (
    AgentsConfig,
    DataConfig,
    JudgingConfig,
    RolloutConfig,
    SampledProblemsConfig,
    SourceConfig,
)


@dataclass(frozen=True, config=STRICT)
class EvaluatedModelConfig:
    """The model that is evaluated in this process."""

    path: str = ""
    """Directory of a Hugging Face checkpoint, or its name on the hub (--model)."""
    adapter_path: str = ""
    """Directory of an adapter in PEFT's format that is added to it, a run's adapter/ for instance
    (--adapter).
    """
    params_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Element type of the parameters; auto: bf16 on a GPU, else fp32 (--dtype)."""


@dataclass(frozen=True, config=STRICT)
class PromptConfig:
    """How a problem becomes a prompt."""

    template: str = DataConfig.template
    """As data.template of a training (--template)."""
    thinking: Thinking = DataConfig.thinking
    """As data.thinking of a training (--thinking)."""
    columns: Columns = dataclasses.field(default_factory=dict)
    """As data.columns of a training, for benchmarks of your own files that have them."""
    row: RowFunction = ""
    """As data.row of a training, for benchmarks of your own files."""
    unread: Unread = "say"
    """As data.unread of a training."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources of a training; a benchmark of the same name or path has their verifier and template
    (--as-trained).
    """

    def __post_init__(self) -> None:
        check_row_function(self.columns, self.row)


@dataclass(frozen=True, config=STRICT)
class EngineConfig(AgentsConfig):
    """How the model's responses are sampled in this process."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """What samples; auto: vLLM on a GPU if it can run the model, else transformers (--engine)."""
    max_num_seqs: NonNegative = 0
    """Responses sampled at once; 0: 512 by vLLM on a GPU, else 64 (--batch-size)."""
    max_response_length: Positive = RolloutConfig.max_response_length
    """Longest response in tokens, unless evaluation.max_tokens is set."""


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig(SampledProblemsConfig):
    """The benchmarks, how they are sampled, and what is scored. Sampling: the paper's."""

    samples: Positive = 4
    """Responses to each problem (--repeats)."""
    seed: NonNegative = 0
    """Seed of the sampling (--seed)."""
    confidence: str = "verbal,token,consistency"
    """Kinds of confidence that are scored, comma separated (--confidence)."""
    features: bool = False
    """Keep what dcpo calibrate --kind confclass reads (--features)."""
    calibrator: str = ""
    """File of dcpo calibrate whose confidence is scored as well (--calibrator)."""
    resamples: NonNegative = 1000
    """Bootstrap resamples for 95 % intervals; 0: no intervals (--resamples)."""


@dataclass(frozen=True, config=STRICT)
class EndpointConfig:
    """An OpenAI-compatible server that is evaluated instead of a model."""

    url: str = ""
    """Address, as http://host:8000/v1 (--endpoint)."""
    model: str = ""
    """Model to ask for; empty: the only one that the server offers (--model-name)."""
    tokenizer: str = ""
    """Directory of a tokenizer that renders the prompts here, as training does; their token ids are
    sent to completions (--tokenizer).
    """
    api: Literal["auto", "chat", "completions"] = "auto"
    """auto: completions with a tokenizer or with data.template=raw, else chat (--api)."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable of the key (--api-key-env)."""
    concurrency: Positive = 32
    """Requests at a time (--concurrency)."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for one sample (--timeout)."""
    attempts: Positive = 8
    """Tries of a sample, with growing pauses (--attempts)."""
    extra_body: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Added to every request (--extra-body)."""


@dataclass(frozen=True, config=STRICT)
class EvaluateConfig:
    """One evaluation: what ``dcpo evaluate`` reads."""

    run_dir: str
    """Directory that the evaluation writes to (--out)."""
    model: EvaluatedModelConfig = dataclasses.field(default_factory=EvaluatedModelConfig)
    data: PromptConfig = dataclasses.field(default_factory=PromptConfig)
    rollout: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    judging: JudgingConfig = dataclasses.field(default_factory=JudgingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    endpoint: EndpointConfig = dataclasses.field(default_factory=EndpointConfig)

    @property
    def max_tokens(self) -> int:
        """Return the length of the longest response in tokens."""
        return self.evaluation.max_tokens or self.rollout.max_response_length
