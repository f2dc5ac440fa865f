"""The section ``parallel``: Megatron's parallelism by Megatron's names, and whatever else Megatron
knows by its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_dcpo.config.kinds import STRICT, Positive
from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.parallel_sizes import ParallelSizes


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Megatron's parallelism options. Data parallelism is what is left of the world size. Options
    of :data:`PLANNED` are attributes, too.
    """

    tensor_model_parallel_size: Positive = 1
    """Ranks that share the matrices of each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Stages that the layers are divided into, each on ranks of its own."""
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
    """Micro-batches are sequences one behind the other without padding
    (training.max_tokens_per_micro_batch).
    """
    distributed_timeout_minutes: Positive = 30
    """Minutes that a collective waits for the other ranks before the job ends."""
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig,
    passed on by name (docs/scaling.md#options-of-megatron).
    """

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


# Options of Megatron that decide which rank holds what, or how much memory it takes: type, default,
# meaning.
PLANNED: dict[str, tuple[Any, Any, str]] = {
    "virtual_pipeline_model_parallel_size": (
        Positive,
        1,
        "Model chunks that each pipeline rank has (interleaved).",
    ),
    "num_layers_in_first_pipeline_stage": (
        Positive,
        None,
        "Layers of the first stage; the others share what is left.",
    ),
    "num_layers_in_last_pipeline_stage": (
        Positive,
        None,
        "Layers of the last stage; the others share what is left.",
    ),
    "account_for_embedding_in_pipeline_split": (
        bool,
        False,
        "The embedding counts as a layer of the first stage.",
    ),
    "account_for_loss_in_pipeline_split": (
        bool,
        False,
        "The output layer counts as a layer of the last stage.",
    ),
    "pipeline_model_parallel_layout": (
        str,
        None,
        "All stages, virtual ones too, written out in Megatron's notation.",
    ),
    "cp_comm_type": (
        Literal["p2p", "all_gather"],
        "p2p",
        "How context-parallel ranks exchange keys and values.",
    ),
    "overlap_grad_reduce": (
        bool,
        False,
        "Gradients are reduced while the last backward pass runs.",
    ),
    "overlap_param_gather": (
        bool,
        False,
        "Updated parameters are gathered while the next forward pass runs.",
    ),
    "recompute_method": (
        Literal["uniform", "block"],
        "uniform",
        "Which layers recompute_granularity=full is about.",
    ),
    "recompute_num_layers": (
        Positive,
        1,
        "Layers of a unit (uniform), or recomputed layers of a stage (block).",
    ),
    "recompute_modules": (
        tuple[Literal["core_attn", "mlp"], ...],
        ("core_attn",),
        "Modules that recompute_granularity=selective is about.",
    ),
}


def _checked(name: str, kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(
            f"{name}: {one_line(error.errors()[0]['msg'])} (found {value!r})"
        ) from None
