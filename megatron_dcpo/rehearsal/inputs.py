"""What a rehearsal invents in place of what a job reads: the tensors of a checkpoint, the responses
of a rollout, and an engine that takes weights.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.rollout.engine import Engine, PartialRollout
from megatron_dcpo.rollout.sampling import Samples, SamplingConfig
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes

CONFIDENCE_TOKENS = 8


class InventedCheckpoint(HFReader):
    """The tensors of a model in Hugging Face's form, on the host: zeros."""

    def __init__(self, arch: Architecture, dtype: torch.dtype) -> None:
        self._shapes = hf_shapes(arch)
        self._dtype = dtype

    def check(self, arch: Architecture) -> tuple[str, ...]:
        """Return no warnings: every tensor has its shape."""
        return ()

    def slice(self, name: str) -> Tensor:
        """Return the tensor, of which parts are taken."""
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor."""
        return torch.zeros(self._shapes[name], dtype=self._dtype)


class InventedEngine(Engine):
    """An engine that takes the weights which its rank keeps. Raises RuntimeError if a slice does
    not fit into the tensor that the engine has of that name, or if a part of one never came.
    """

    eos_token_ids = (0,)
    slot_steps = None

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], tensor_model_parallel_size: int
    ) -> None:
        self.weights_version = 0
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.shapes = dict(shapes)
        self.received = dict.fromkeys(self.shapes, 0)

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Raise NotImplementedError: the responses of a rehearsal are invented."""
        raise NotImplementedError("a rehearsal samples nothing")

    def sleep(self) -> None:
        """Do nothing: the engine's own memory is not rehearsed."""

    def restart(self) -> None:
        """Do nothing: the engine has no process."""

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Take all slices of a new version."""
        self.received = dict.fromkeys(self.shapes, 0)
        for bucket in buckets:
            for part in bucket:
                self._take(part)
        for name, numbers in self.received.items():
            if numbers * self.tensor_model_parallel_size < math.prod(self.shapes[name]):
                raise RuntimeError(
                    f"the engine got {numbers} numbers of {name} {self.shapes[name]}"
                )
        self.weights_version = version

    def _take(self, part: WeightSlice) -> None:
        shape = list(self.shapes[part.name])
        got = tuple(part.values.shape)
        stop = part.start + got[part.dim]
        if stop > shape[part.dim]:
            raise RuntimeError(f"{part.name} {tuple(shape)} has no {part.start} to {stop}")
        shape[part.dim] = got[part.dim]
        if got != tuple(shape):
            raise RuntimeError(f"{part.name} {self.shapes[part.name]} cannot take {got}")
        self.received[part.name] += part.values.numel()


def engine_of(arch: Architecture, config: Config) -> InventedEngine:
    """Return the engine that the configuration describes."""
    return InventedEngine(hf_shapes(arch), config.rollout.tensor_model_parallel_size)


@dataclass(frozen=True)
class RehearsedBatch:
    """The responses of a rehearsed step.

    responses: those of one micro-batch on all data-parallel ranks.
    micro_batches: of each update, a multiple of ``rounds``.
    most_of_group: the most responses of one group.
    """

    responses: int
    micro_batches: int
    rounds: int
    most_of_group: int
    updates: int

    def least(self) -> RehearsedBatch:
        """Return the smallest batch of this kind."""
        return replace(self, micro_batches=self.rounds, updates=1)

    @property
    def group_size(self) -> int:
        """Return the responses of a group, so that all groups of an update are equal."""
        of_update = self.responses * self.micro_batches
        sizes = range(1, self.most_of_group + 1)
        return max(size for size in sizes if of_update % size == 0)

    @property
    def groups(self) -> int:
        """Return the number of groups, of all updates."""
        return self.updates * self.responses * self.micro_batches // self.group_size


def invented_samples(config: Config, batch: RehearsedBatch) -> list[TrainingSample]:
    """Return the judged responses of a batch, all of the longest prompt and response that the
    options allow. Every second response is right, and states a higher confidence.
    """
    prompt_tokens = (1,) * config.data.max_prompt_length
    tokens = np.ones(config.rollout.max_response_length, np.int64)
    logprobs = np.ones(len(tokens), np.float32)
    samples = []
    for group in range(batch.groups):
        prompt = Prompt(
            prompt_id=f"p{group}",
            messages=(),
            token_ids=prompt_tokens,
            ground_truth="",
            task="rehearsal",
        )
        for index in range(batch.group_size):
            right = index % 2
            samples.append(
                TrainingSample(
                    prompt=prompt,
                    response=Response(
                        prompt_id=prompt.prompt_id,
                        sample_index=index,
                        token_ids=tokens,
                        logprobs=logprobs,
                        finish_reason="stop",
                        weights_version=0,
                    ),
                    judgement=Judgement(
                        prompt_id=prompt.prompt_id,
                        correct=float(right),
                        confidence=0.5 + 0.25 * right,
                        status="ok",
                        boundary=len(tokens) - CONFIDENCE_TOKENS,
                        length=len(tokens),
                    ),
                )
            )
    return samples


def parameter_dtype(config: Config) -> torch.dtype:
    """Return the type of the parameters."""
    return torch_dtype(config.model.params_dtype)
