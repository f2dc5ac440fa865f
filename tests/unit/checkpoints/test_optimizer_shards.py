"""A flat range of a tensor as boxes: disjoint, in order, and nothing else."""

import itertools
import math

import pytest
import torch

from megatron_dcpo.checkpoints.optimizer_shards import boxes


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (5, 1), (3, 2, 4)])
def test_boxes_are_the_range(shape):
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        found = []
        for offset, box in boxes(shape, start, stop):
            found += (
                numbers[tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))]
                .reshape(-1)
                .tolist()
            )
        assert found == list(range(start, stop))
        assert len(boxes(shape, start, stop)) <= 2 * len(shape) - 1
