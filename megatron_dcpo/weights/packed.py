"""How tensors become a few large messages, as the workers of a vLLM server take them apart again.
Pure: no tensors.

A server gets name, type and shape of the coming tensors in calls. A message of
the call is the bytes of whole tensors, one behind the other, in the order of the call. It ends with
the tensor by which it has more than ``MESSAGE_BYTES``, or with the last one of the call; a larger
tensor is not cut. The workers find the ends by the same rule, and nothing else is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.weights.table import EMBEDDING, hf_shapes, is_constant

T = TypeVar("T")

# large enough for the wire, and small next to a worker's weights
MESSAGE_BYTES = 128 * 2**20
# Streams of a worker, which take messages in turns. With two, vLLM 0.32.0 may receive a message
# into memory from which the other stream still loads a layer that came in several messages.
WORKER_STREAMS = 1
# A call ends as a message does. The trainer's rank 0 has its tensors in memory.
CALL_BYTES = 4 * MESSAGE_BYTES
_CONSTANT_BYTES = 4  # of a number of the model's constants, which are fp32


def groups(items: Iterable[T], nbytes_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the consecutive items that are together: a group ends with the item by which it has
    more than ``limit`` bytes, or with the last one.
    """
    group: list[T] = []
    nbytes = 0
    for item in items:
        group.append(item)
        nbytes += nbytes_of(item)
        if nbytes > limit:
            yield group
            group = []
            nbytes = 0
    if group:
        yield group


@dataclass(frozen=True)
class Broadcasts:
    """What an update sends to the workers of one server.

    calls: the requests that tell the server which tensors come.
    messages: the broadcasts.
    nbytes: the bytes of all messages.
    largest: the bytes of the largest message.
    """

    calls: int
    messages: int
    nbytes: int
    largest: int


def broadcasts(
    arch: Architecture,
    itemsize: int,
    message_bytes: int = MESSAGE_BYTES,
    call_bytes: int = CALL_BYTES,
) -> Broadcasts:
    """Return what an update of ``arch`` in numbers of ``itemsize`` bytes sends to one server, if
    its tensors are complete in the order of the model. With ``message_bytes`` 0 every tensor is a
    message of its own.
    """
    messages = []
    calls = 0
    for call in groups(_sizes(arch, itemsize), int, call_bytes):
        calls += 1
        messages += [sum(message) for message in groups(call, int, message_bytes)]
    return Broadcasts(
        calls=calls, messages=len(messages), nbytes=sum(messages), largest=max(messages)
    )


def _sizes(arch: Architecture, itemsize: int) -> list[int]:
    """Return the bytes of all tensors: the constants come last, and a tied output layer is sent
    behind the embedding.
    """
    sizes = []
    constants = []
    for name, shape in hf_shapes(arch).items():
        if is_constant(name):
            constants.append(_CONSTANT_BYTES * math.prod(shape))
            continue
        sizes.append(itemsize * math.prod(shape))
        if arch.tied_embeddings and name == EMBEDDING:
            sizes.append(sizes[-1])
    return sizes + constants
