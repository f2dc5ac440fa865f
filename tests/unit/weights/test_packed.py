"""How many messages an update of a server's weights takes, by the shapes of public models."""

from __future__ import annotations

import pytest

from megatron_dcpo.planning.plan import architecture_of
from megatron_dcpo.weights.packed import MESSAGE_BYTES, Broadcasts, broadcasts, groups
from megatron_dcpo.weights.table import number_of_parameters


def test_a_message_ends_with_the_tensor_that_is_too_much() -> None:
    def counts(sizes: list[int]) -> list[int]:
        return [len(group) for group in groups(sizes, int, limit=8)]

    assert counts([4, 4, 4, 20, 1, 1]) == [3, 1, 2]
    assert counts([8, 1, 8]) == [2, 1]
    assert counts([]) == []


@pytest.mark.parametrize(
    ("model", "apart", "together"),
    [
        (
            "Qwen/Qwen3-8B",
            399,
            Broadcasts(calls=26, messages=74, nbytes=16_381_470_720, largest=1_244_668_416),
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            18_867,
            Broadcasts(calls=113, messages=446, nbytes=61_064_245_248, largest=691_540_480),
        ),
    ],
)
def test_messages_of_an_update(model: str, apart: int, together: Broadcasts) -> None:
    """A tensor a broadcast, as it was, against packed messages; the bytes are those of the model
    in both.
    """
    arch = architecture_of(model)
    one_each = broadcasts(arch, itemsize=2, message_bytes=0)
    assert (one_each.messages, one_each.nbytes) == (apart, 2 * number_of_parameters(arch))
    assert broadcasts(arch, itemsize=2) == together
    assert together.nbytes == one_each.nbytes
    assert together.largest < one_each.largest + MESSAGE_BYTES
