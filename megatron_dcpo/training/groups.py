"""The responses to one prompt on their way from the engine to the batch, and those that a checkpoint carries on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_dcpo.types import Judgement, Prompt, Response


@dataclass(frozen=True)
class PromptGroup:
    """The prompt at ``position`` of the run, drawn in ``step``, and its ``size`` responses by sample index: with their
    judgements, or with none while they are unfinished."""

    prompt: Prompt
    position: int
    step: int
    size: int
    responses: Mapping[int, tuple[Response, Judgement | None]] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[int]:
        return [index for index in range(self.size) if self.responses.get(index, (None, None))[1] is None]

    def with_responses(self, more: Mapping[int, tuple[Response, Judgement | None]]) -> PromptGroup:
        return dataclasses.replace(self, responses={**self.responses, **more})


def saved_groups(groups: Sequence[PromptGroup]) -> list[dict[str, Any]]:
    """Tensors and plain values, all that a checkpoint's reader takes."""
    return [
        {
            "position": group.position,
            "step": group.step,
            "responses": {
                index: (
                    {name: _plain(getattr(response, name)) for name in _FIELDS},
                    None if judgement is None else {k: _plain(v) for k, v in dataclasses.asdict(judgement).items()},
                )
                for index, (response, judgement) in group.responses.items()
            },
        }
        for group in groups
    ]


_FIELDS = ("token_ids", "logprobs", "finish_reason", "weights_version", "step", "segments")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    return value.item() if isinstance(value, np.generic) else value


def restored_groups(saved: Sequence[Any], draw: Callable[[int], Prompt], size: int) -> list[PromptGroup]:
    """The groups that :func:`saved_groups` made; ``draw`` gives the prompt at a position. Raises what odd values raise."""
    groups = []
    for entry in saved:
        prompt, responses = draw(int(entry["position"])), {}
        for index, (values, judgement) in entry["responses"].items():
            ids, logprobs = (values[name].numpy() for name in ("token_ids", "logprobs"))
            if ids.ndim != 1 or ids.shape != logprobs.shape:
                raise ValueError(f"{len(ids)} tokens of {prompt.prompt_id} with {logprobs.shape} log-probs")
            response = Response(prompt.prompt_id, index, **(values | {"token_ids": ids, "logprobs": logprobs}))
            responses[index] = response, None if judgement is None else Judgement(**judgement)
        groups.append(PromptGroup(prompt, int(entry["position"]), int(entry["step"]), size, responses))
    return groups
