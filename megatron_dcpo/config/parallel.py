"""The section ``parallel``: Megatron's parallelism under Megatron's names, and every other option
of Megatron under its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_dcpo.config.field_types import STRICT, Positive
from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.parallel_sizes import ParallelSizes


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class PlannedOptions:
    """The options in ``parallel.megatron`` that this package reads as well, because they decide
    which rank holds what, or how much memory it takes. All others are passed on by name.
    """

    virtual_pipeline_model_parallel_size: Positive = 1
    """Model chunks that each pipeline rank has (interleaved)."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage; the others share the rest."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last stage; the others share the rest."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """The output layer counts as a layer of the last stage."""
    pipeline_model_parallel_layout: str | None = None
    """All stages, virtual ones too, written out in Megatron's notation."""
    cp_comm_type: Literal["p2p", "all_gather"] = "p2p"
    """How context-parallel ranks exchange keys and values."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the last backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass runs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers recompute_granularity=full recomputes."""
    recompute_num_layers: Positive = 1
    """Layers of a unit (uniform), or recomputed layers of a stage (block)."""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ("core_attn",)
    """Modules that recompute_granularity=selective recomputes."""


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of Megatron, the planned ones with the values that their types ask for."""
    try:
        planned = TypeAdapter(PlannedOptions).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"parallel.megatron.{first['loc'][0]}"
        raise ValueError(f"{name}: {one_line(first['msg'])} (found {first['input']!r})") from None
    return {name: getattr(planned, name, value) for name, value in options.items()}


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Megatron's parallelism options. Data parallelism is what is left of the world size."""

    tensor_model_parallel_size: Positive = 1
    """Ranks that share the matrices of each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline stages, each on its own ranks, that the layers are divided into."""
    expert_model_parallel_size: Positive = 1
    """Ranks that the experts of a mixture of experts are divided over."""
    expert_tensor_parallel_size: Positive | None = None
    """Ranks that share the matrices of one expert; not set: tensor_model_parallel_size."""
    context_parallel_size: Positive = 1
    """Ranks that share the tokens of each sequence."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks divide the activations between their matrices along the sequence."""
    use_distributed_optimizer: bool = False
    """Data-parallel ranks divide the state of the optimizer instead of holding it whole."""
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    """Activations that the backward pass computes again: none, of whole layers (full), or of
    recompute_modules.
    """
    sequence_packing: bool = False
    """Micro-batches are sequences one after another, without padding
    (training.max_tokens_per_micro_batch).
    """
    distributed_timeout_minutes: Positive = 30
    """Minutes that a collective waits for the other ranks before the job ends."""
    megatron: Annotated[dict[str, Any], AfterValidator(_checked)] = dataclasses.field(
        default_factory=dict
    )
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig,
    passed on by name (docs/layouts.md#options-of-megatron).
    """

    @functools.cached_property
    def planned(self) -> PlannedOptions:
        """Return the options of ``megatron`` that this package reads, defaults included."""
        return PlannedOptions(**self.megatron)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        return self.planned.virtual_pipeline_model_parallel_size

    @property
    def num_layers_in_first_pipeline_stage(self) -> int | None:
        return self.planned.num_layers_in_first_pipeline_stage

    @property
    def num_layers_in_last_pipeline_stage(self) -> int | None:
        return self.planned.num_layers_in_last_pipeline_stage

    @property
    def account_for_embedding_in_pipeline_split(self) -> bool:
        return self.planned.account_for_embedding_in_pipeline_split

    @property
    def account_for_loss_in_pipeline_split(self) -> bool:
        return self.planned.account_for_loss_in_pipeline_split

    @property
    def pipeline_model_parallel_layout(self) -> str | None:
        return self.planned.pipeline_model_parallel_layout

    @property
    def cp_comm_type(self) -> str:
        return self.planned.cp_comm_type

    @property
    def overlap_grad_reduce(self) -> bool:
        return self.planned.overlap_grad_reduce

    @property
    def overlap_param_gather(self) -> bool:
        return self.planned.overlap_param_gather

    @property
    def recompute_method(self) -> str:
        return self.planned.recompute_method

    @property
    def recompute_num_layers(self) -> int:
        return self.planned.recompute_num_layers

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return self.planned.recompute_modules

    @property
    def sizes(self) -> ParallelSizes:
        """Return the sizes of the parallel grid."""
        return ParallelSizes(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )
