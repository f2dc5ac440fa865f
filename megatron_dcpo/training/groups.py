"""Groups that a checkpoint carries on, as plain values and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_dcpo.training.sampler import Draw, PromptGroup
from megatron_dcpo.types import Judgement, Response


def saved_groups(groups: Sequence[PromptGroup]) -> list[dict[str, Any]]:
    """Return groups as tensors and plain values, all that a checkpoint's reader takes."""
    return [
        {
            "position": group.position,
            "step": group.step,
            "responses": {
                index: (
                    {name: _plain(getattr(response, name)) for name in _FIELDS},
                    None
                    if judgement is None
                    else {k: _plain(v) for k, v in dataclasses.asdict(judgement).items()},
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
    return (
        value.item()
        if isinstance(value, np.generic)
        else dict(value)
        if isinstance(value, Mapping)
        else value
    )


def restored_groups(saved: Sequence[Any], draw: Draw, size: int) -> list[PromptGroup]:
    """Return the groups that :func:`saved_groups` made. Raises what odd values raise."""
    groups = []
    for entry in saved:
        prompt, responses = draw(int(entry["position"]), 1)[0], {}
        for index, (values, judgement) in entry["responses"].items():
            ids, logprobs = (values[name].numpy() for name in ("token_ids", "logprobs"))
            if ids.ndim != 1 or ids.shape != logprobs.shape:
                raise ValueError(
                    f"{len(ids)} tokens of {prompt.prompt_id} with {logprobs.shape} log-probs"
                )
            response = Response(
                prompt.prompt_id, index, **(values | {"token_ids": ids, "logprobs": logprobs})
            )
            responses[index] = response, None if judgement is None else Judgement(**judgement)
        groups.append(
            PromptGroup(prompt, int(entry["position"]), int(entry["step"]), size, responses)
        )
    return groups
