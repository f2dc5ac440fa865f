"""What the cases share: samples, a configuration for a layout, and who takes which samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.config.parallel import ParallelConfig, PlannedOptions
from megatron_dcpo.config.sections import Config, DataConfig, ModelConfig, OptimizerConfig
from megatron_dcpo.policy.batching import assign_to_ranks, sequence_length, split_micro_batches
from megatron_dcpo.runtime.distributed import Topology, initialize
from megatron_dcpo.types import TrainingSample
from tests.helpers.samples import bare


def samples_for_test() -> list[TrainingSample]:
    """Eight prompts and responses of odd lengths."""
    rng = np.random.default_rng(0)
    return [
        bare(rng.integers(1, 331, rng.integers(1, 9)), rng.integers(1, 331, rng.integers(1, 120)))
        for _ in range(8)
    ]


def parallel_config(options: Mapping[str, Any]) -> ParallelConfig:
    """Return the section ``parallel`` of these options, the ones that are handed on to Megatron in
    their place.
    """
    own = dict(options)
    handed_on = own.pop("megatron", {}) | {
        name: own.pop(name) for name in options if name in PlannedOptions.__pydantic_fields__
    }
    return ParallelConfig(**own, megatron=handed_on)


def initialize_layout(parallel: ParallelConfig) -> Topology:
    return initialize(parallel.sizes)


def config_for_test(
    model: str, dtype: str, parallel: ParallelConfig, layers: str = "auto", **optimizer: Any
) -> Config:
    return Config(
        run_dir="unused",
        model=ModelConfig(path=model, params_dtype=dtype, transformer_impl=layers),
        data=DataConfig(path="unused"),
        parallel=parallel,
        optimizer=OptimizerConfig(**optimizer),
    )


def shared_out(
    samples: list[TrainingSample],
    parallel: ParallelConfig,
    topology: Topology,
    micro_batch_size: int,
    max_tokens: int,
) -> tuple[list[int], list[list[int]]]:
    """Indices of the samples of this rank, and its micro-batches of them."""
    lengths = [sequence_length(sample) for sample in samples]
    shares = assign_to_ranks(lengths, topology.dp_size)
    splits = split_micro_batches(
        [[lengths[i] for i in share] for share in shares],
        topology.dp_rank,
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
        packing=parallel.sequence_packing,
        multiple_of=topology.pp_size if parallel.virtual_pipeline_model_parallel_size > 1 else 1,
    )
    return list(shares[topology.dp_rank]), splits
