"""What vLLM's loaders are given: a slice in the shape of the whole. Needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_dcpo.weights.planner import WeightSlice
from tests.helpers.vllm import needs_vllm

pytestmark = needs_vllm

WHOLE = torch.arange(40.0).view(10, 4)


def rows(start: int, stop: int, keeps: tuple[int, int, int]) -> Any:
    from megatron_dcpo.rollout.vllm_weights import SliceOfWhole

    return SliceOfWhole(WeightSlice("embedding", 0, start, WHOLE[start:stop]), WHOLE.shape, keeps)


def test_pieces_add_up_to_the_slice_of_the_rank() -> None:
    """As vLLM's vocabulary loader reads it: narrowed to the rank's rows, the padding behind them
    set to zero.
    """
    parameter = torch.nn.Parameter(torch.full((7, 4), -1.0), requires_grad=False)
    for start, stop in ((5, 7), (7, 10)):
        given = rows(start, stop, (0, 5, 10))
        narrowed = given.narrow(0, 5, 5)
        parameter[: narrowed.shape[0]].data.copy_(narrowed)
        parameter[narrowed.shape[0] :].data.fill_(0)
        assert given.copied == [4 * (stop - start)]
    assert torch.equal(parameter[:5], WHOLE[5:])
    assert not parameter[5:].any()


def test_columns() -> None:
    from megatron_dcpo.rollout.vllm_weights import SliceOfWhole

    target = torch.zeros(10, 2)
    given = SliceOfWhole(WeightSlice("o_proj", 1, 3, WHOLE[:, 3:4]), WHOLE.shape, (1, 2, 4))
    target.copy_(given.detach().narrow(1, 2, 2))
    assert torch.equal(target[:, 1], WHOLE[:, 3])
    assert not target[:, 0].any()


def test_of_one_expert() -> None:
    """As vLLM's loader of experts reads it: with a dimension for the expert, which goes again."""
    target = torch.zeros(5, 4)
    (given,) = rows(6, 8, (0, 5, 10)).unsqueeze(0).unbind()
    target.copy_(given.narrow(0, 5, 5))
    assert torch.equal(target[1:3], WHOLE[6:8])
    assert given.copied == [8]


@pytest.mark.parametrize(
    "misread",
    [
        lambda given: given.unsqueeze(1),
        lambda given: given.unbind(),
        lambda given: given.unsqueeze(0).narrow(1, 5, 5),
        lambda given: given.unsqueeze(0).unbind(1),
        lambda given: torch.zeros(1, 10, 4).copy_(given.unsqueeze(0)),
        lambda given: given.clone(),
        lambda given: given + 1,
        lambda given: given[2],
        lambda given: given.narrow(1, 0, 2),
        lambda given: torch.zeros(10, 4).copy_(given),
        lambda given: torch.zeros(4, 4).copy_(given.narrow(0, 5, 4)),
        lambda given: torch.zeros(5, 4).copy_(given.narrow(0, 0, 5)),
        lambda given: torch.zeros(1, 4).copy_(given.narrow(0, 5, 5)),
        lambda given: given.copy_(WHOLE),
    ],
)
def test_anything_else_is_an_error(misread: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="of embedding, of which this rank keeps"):
        misread(rows(5, 10, (0, 5, 10)))
