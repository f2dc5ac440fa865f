"""The sizes of the parallel grid. Imports no torch, so that a configuration can hold them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share each dimension, by Megatron's names.

    The data-parallel size is what remains of the world size. ``expert_tensor_parallel_size`` None
    means that experts are split over tensor-parallel ranks as the other layers are.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks that hold all experts of a pipeline stage once."""
        expert_tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return self.expert_model_parallel_size * expert_tensor
