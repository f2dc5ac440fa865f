"""Groups that a checkpoint carries on, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_dcpo import codec
from megatron_dcpo.training.sampler import Draw, PromptGroup
from megatron_dcpo.types import Judgement, Prompt, Response


def saved_groups(groups: Sequence[PromptGroup]) -> list[codec.Row]:
    """Return groups as tensors and plain values, which is all that a checkpoint's reader takes.

    The prompt of a group is not saved but its position in the data, from which it is drawn again.
    """
    return [
        {
            "version": codec.VERSION,
            "position": group.position,
            "step": group.step,
            "responses": {
                index: (_saved(response), None if judgement is None else _saved(judgement))
                for index, (response, judgement) in group.responses.items()
            },
        }
        for group in groups
    ]


def _saved(record: Response | Judgement) -> codec.Row:
    return codec.to_values(record, array=torch.tensor)


def restored_groups(
    saved: Sequence[Mapping[str, object]], draw: Draw, size: int
) -> list[PromptGroup]:
    """Return the groups that :func:`saved_groups` made.

    Raises ValueError, TypeError or LookupError for a malformed group.
    """
    groups = []
    for entry in saved:
        codec.check_version(entry)
        position = int(entry["position"])  # type: ignore[call-overload]
        step = int(entry["step"])  # type: ignore[call-overload]
        (prompt,) = draw(position, 1)
        responses = {}
        for index, (response, judgement) in entry["responses"].items():  # type: ignore[attr-defined]
            responses[index] = (
                _restored_response(response, prompt, index),
                None if judgement is None else codec.from_row(Judgement, judgement),
            )
        groups.append(PromptGroup(prompt, position, step, size, responses))
    return groups


def _restored_response(saved: Mapping[str, object], prompt: Prompt, sample_index: int) -> Response:
    values: codec.Row = {"prompt_id": prompt.prompt_id, "sample_index": sample_index}
    for name, value in saved.items():
        values[name] = value.numpy() if isinstance(value, torch.Tensor) else value
    response = codec.from_row(Response, values)
    tokens = response.token_ids.shape
    if len(tokens) != 1 or tokens != response.logprobs.shape:
        raise ValueError(
            f"{prompt.prompt_id}: tokens {tokens} with log-probs {response.logprobs.shape}"
        )
    return response
