"""How Megatron divides a model: the layout of a run, and the coordinates of a rank in it. The names
are those of Megatron's options.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.config import ParallelConfig

UNEVEN_PIPELINE = (  # options that divide the layers other than equally
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass(frozen=True)
class Layout:
    """How Megatron divides the model. The names are those of Megatron's options."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128
    transformer_engine: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    @property
    def expert_tensor(self) -> int:
        """Return the tensor-parallel size of experts, by default TP as in Megatron."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def width(self) -> int:
        """Return how many consecutive ranks of a pipeline stage hold the whole stage: TP, or the EP
        x ETP ranks of all experts.
        """
        return max(
            self.tensor_model_parallel_size, self.expert_model_parallel_size * self.expert_tensor
        )

    def at(self, part: int, pipeline: int, virtual: int = 0) -> Coordinates:
        """Return the coordinates of rank ``part`` among the :attr:`width` ranks of a stage.
        Megatron counts tensor before expert before data ranks.
        """
        return Coordinates(
            tensor=part % self.tensor_model_parallel_size,
            pipeline=pipeline,
            virtual=virtual,
            expert=part // self.expert_tensor % self.expert_model_parallel_size,
            expert_tensor=part % self.expert_tensor,
        )

    @classmethod
    def of(cls, parallel: ParallelConfig, transformer_engine: bool = False) -> Layout:
        """Return the layout of a run's configuration."""
        return cls(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            transformer_engine=transformer_engine,
            **{option: getattr(parallel, option) for option in (*UNEVEN_PIPELINE, *EXPERTS)},
        )


@dataclass(frozen=True)
class Coordinates:
    """A piece of the layout: tensor rank, pipeline rank, virtual pipeline stage, rank among the
    experts' ranks, and tensor rank within an expert.
    """

    tensor: int = 0
    pipeline: int = 0
    virtual: int = 0
    expert: int = 0
    expert_tensor: int = 0
