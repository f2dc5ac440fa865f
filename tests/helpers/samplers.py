"""A sampler of training whose engine is a clockwork, in a process group of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_dcpo.config import load_config
from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.objectives.method import SCORES
from megatron_dcpo.rollout.engine import PartialRollout, Samples, SamplingConfig, append_segment
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.generation import Generation
from megatron_dcpo.training.sampler import Sampler, SamplerState
from megatron_dcpo.types import Judgement, Prompt, Response, ResponseKey, TrainingSample
from tests.helpers.paths import QUICKSTART


@contextmanager
def one_rank() -> Iterator[None]:
    """Open a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the first and only rank for the client of a server, without a group."""
    monkeypatch.setattr(distributed, "topology", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "max_over_ranks", lambda value: value)
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: value)


def length_of(prompt_id: str, index: int) -> int:
    """Return the number of tokens of a response of the clockwork."""
    return max(1, round(random.Random(f"{prompt_id}/{index}").lognormvariate(1.5, 1.0)))


class Clockwork:
    """An engine that gives every response a token a step; a response ends at a length of its own.
    ``asked``: the prompts and indices of each call.
    """

    tensor_model_parallel_size, slot_steps = 1, None

    def __init__(self) -> None:
        self.weights_version = 0
        self.asked: list[list[ResponseKey]] = []

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
        partial: PartialRollout | None = None,
    ) -> Iterator[list[Response]]:
        begun = {(p.prompt_id, i): partial.so_far(p, i) if partial else None for p, i in samples}
        self.asked.append(list(begun))
        new = dict.fromkeys(begun, 0)

        def response(name: ResponseKey, reason: Any) -> Response:
            before, count = begun[name], new.pop(name)
            first = len(before.token_ids) if before else 0
            parts = np.arange(first, first + count), np.zeros(count, np.float32)
            return append_segment(
                before, Response(*name, *parts, reason, self.weights_version, step=step)
            )

        while new:
            new = {name: count + 1 for name, count in new.items()}
            over = [
                name
                for name in new
                if new[name] + len(getattr(begun[name], "token_ids", ())) >= length_of(*name)
            ]
            if over:
                yield [response(name, "stop") for name in over]
            if partial is not None and partial.should_stop():
                yield [response(name, "abort") for name in list(new)]


def number_of(prompt_id: str) -> int:
    """Return the number of a prompt of :func:`numbered_sampler`, of whatever epoch."""
    return int(prompt_id.split("@")[0])


def all_right(responses: Sequence[Response], by_id: Any) -> list[Judgement]:
    """Judge all responses right, and 0.5 sure."""
    return [Judgement(r.prompt_id, 1.0, 0.5, "ok", 1, len(r.token_ids)) for r in responses]


def unwatched() -> Timers:
    return Timers(SimpleNamespace(enter=lambda phase, step: None))  # type: ignore[arg-type]


def method_that_chooses(is_chosen: Callable[[Sequence[TrainingSample]], bool]) -> Any:
    """Return a method that trains on the groups of which ``is_chosen`` says so."""

    def chosen(samples: Sequence[TrainingSample], scores: np.ndarray | None) -> bool:
        return is_chosen(samples)

    return SimpleNamespace(
        needs_old_logprobs=False,
        group_scores=lambda samples: np.zeros((len(SCORES), len(samples))),
        trains=chosen,
        is_informative=chosen,
    )


def sampler_of(
    prompts: Sequence[Prompt], *overrides: str, file: str = "grpo", **parts: Any
) -> Sampler:
    """Return a sampler of a run of the quickstart. ``parts`` replace a clockwork, a judge to whom
    everything is right, a method that trains on every group, and timers that nobody
    watches.
    """
    config = parts.pop("config", None) or load_config(QUICKSTART / f"{file}.yaml", list(overrides))
    generation = Generation(
        engine=parts.pop("engine", None) or Clockwork(),
        collectives=Collectives(),
        watch=parts.pop("watch", None),
    )
    stubs: dict[str, Any] = {
        "judge": all_right,
        "method": method_that_chooses(lambda samples: True),
        "timers": unwatched(),
    }
    return Sampler(
        draw=partial(draw_prompts, prompts, seed=config.seed, shuffle=config.data.shuffle),
        generation=generation,
        config=config,
        **(stubs | parts),
    )


def numbered_sampler(
    trains: Callable[[int], bool], prompts: int, *overrides: str, file: str = "grpo", **parts: Any
) -> Sampler:
    """Return a sampler of so many prompts, named by their numbers; ``trains`` says whether a
    prompt's group trains the policy.
    """
    data = [Prompt(str(i), (), (1,), "1", "t") for i in range(prompts)]

    def is_chosen(samples: Sequence[TrainingSample]) -> bool:
        return trains(number_of(samples[0].prompt.prompt_id))

    return sampler_of(data, *overrides, file=file, method=method_that_chooses(is_chosen), **parts)


class Steps:
    """A run that samples only: keeps the state from one step to the next, as the loop does."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.state = SamplerState()
        self.metrics: dict[str, float] = {}

    def take(self, step: int) -> list[TrainingSample]:
        """Return the samples of ``step``, with the weights of the step before in the engine."""
        self.sampler.engine.weights_version = step - 1
        batch, self.state = self.sampler.sample(self.state, step, range(step - 1, step))
        self.metrics = batch.metrics
        return batch.samples
