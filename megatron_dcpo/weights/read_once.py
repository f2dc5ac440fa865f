"""Reading a checkpoint once for all replicas of the model.

The ranks that hold the same parameters divide them: each reads its share from the files and
broadcasts it to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.distributed import Topology, all_gather_objects
from megatron_dcpo.weights.hf_checkpoint import HFReader, load_into
from megatron_dcpo.weights.packed import MESSAGE_BYTES
from megatron_dcpo.weights.planner import Copy
from megatron_dcpo.weights.table import is_of_experts


@dataclass(frozen=True)
class ChunkToFill:
    """A model chunk of this rank: the copies that fill it, and its tensors by their name."""

    copies: tuple[Copy, ...]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Shared:
    """The tensors of a chunk that the ranks of ``group`` hold alike. ``readers`` has the rank in
    the group that reads each of them.
    """

    chunk: ChunkToFill
    group: dist.ProcessGroup
    readers: Mapping[str, int]

    @property
    def own(self) -> set[str]:
        """Return the names of the tensors that this rank reads."""
        rank = dist.get_rank(self.group)
        return {name for name, reader in self.readers.items() if reader == rank}


@torch.no_grad()
def load_once(reader: HFReader, chunks: Sequence[ChunkToFill], topology: Topology) -> None:
    """Fill the chunks of all ranks from the checkpoint; of the ranks that hold the same tensors one
    reads each of them. Collective over all ranks.

    Besides the tensors, a message of ``MESSAGE_BYTES`` is in memory. If a rank cannot read its
    share, every rank raises what was wrong there: :class:`UserError`, or RuntimeError for another
    error.
    """
    parts = []
    for chunk in chunks:
        parts += _shared(chunk, topology)
    failure: Exception | None = None
    try:
        for part in parts:
            own = part.own
            copies = [copy for copy in part.chunk.copies if copy.megatron in own]
            load_into(reader, copies, part.chunk.tensors)
    except Exception as error:  # the other ranks wait for it
        failure = error
    _raise_on_all_ranks(failure)
    for part in parts:
        for rank, message in _messages(part):
            _broadcast(message, rank, part.group)


def _shared(chunk: ChunkToFill, topology: Topology) -> list[_Shared]:
    """Return the chunk's tensors of experts and its others, which different ranks hold alike."""
    experts: dict[str, int] = {}
    others: dict[str, int] = {}
    for name, tensor in chunk.tensors.items():
        sizes = experts if is_of_experts(name) else others
        sizes[name] = tensor.nbytes
    shared = []
    for group, sizes in (
        (topology.replica_group, others),
        (topology.expert_replica_group, experts),
    ):
        readers = divided(sizes, dist.get_world_size(group))
        shared.append(_Shared(chunk=chunk, group=group, readers=readers))
    return shared


def divided(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which of ``ranks`` reads each of the tensors of ``sizes`` bytes: consecutive ones,
    about as many bytes for each rank. A rank reads none if the tensors before are large.
    """
    total = sum(sizes.values())
    readers = {}
    before = 0
    for name, size in sizes.items():
        middle = before + size // 2
        readers[name] = min(ranks - 1, middle * ranks // max(1, total))
        before += size
    return readers


def _messages(part: _Shared) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield who sends each message and the tensors in it: consecutive ones of one reader, of at
    most ``MESSAGE_BYTES`` together, or a single larger one.
    """
    message: list[Tensor] = []
    nbytes = sender = 0
    for name, reader in part.readers.items():
        tensor = part.chunk.tensors[name]
        if message and (reader != sender or nbytes + tensor.nbytes > MESSAGE_BYTES):
            yield sender, message
            message = []
            nbytes = 0
        message.append(tensor)
        nbytes += tensor.nbytes
        sender = reader
    if message:
        yield sender, message


def _broadcast(tensors: Sequence[Tensor], sender: int, group: dist.ProcessGroup) -> None:
    """Send the values of ``tensors`` from rank ``sender`` of ``group`` to its others."""
    if dist.get_world_size(group) == 1:
        return
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    if len(parts) == 1:
        dist.broadcast(parts[0], group=group, group_src=sender)
        return
    sizes = [part.numel() for part in parts]
    message = parts[0].new_empty(sum(sizes))
    if dist.get_rank(group) == sender:
        torch.cat(parts, out=message)
    dist.broadcast(message, group=group, group_src=sender)
    if dist.get_rank(group) != sender:
        for part, values in zip(parts, message.split(sizes), strict=True):
            part.copy_(values)


def _raise_on_all_ranks(failure: Exception | None) -> None:
    """Raise on every rank what the first rank that failed has to say. Collective."""
    said = None
    if failure is not None:
        said = (isinstance(failure, UserError), str(failure), type(failure).__name__)
    for rank, told in enumerate(all_gather_objects(said)):
        if told is None:
            continue
        for_the_user, text, kind = told
        if for_the_user:
            raise UserError(text) from failure
        what = one_line(f"{kind}: {text}", 300)
        raise RuntimeError(
            f"rank {rank} could not read its share of the model: {what}"
        ) from failure
