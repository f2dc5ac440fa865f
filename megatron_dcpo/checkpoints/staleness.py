"""How a checkpoint shows that it is not an earlier one under a new name.

A digest of a file tells that the file changed after it was written. It does not tell that what was
written was old: a save that keeps handles of an earlier state writes whole files that hold the
weights, or the moments, of an earlier step. So two things are known of each group of tensors: a
checksum of what is written, which the manifest keeps, and marks, checksums of a sample of each
tensor that trains, taken from the model and the optimizer themselves. Where the marks say that
training has changed a group, its checksum must differ from that of the last checkpoint. A rank's
part of a group must differ too, if all of its tensors have changed.

Groups are the weights, the main values of mixed precision, each moment, the schedule of the
learning rate, and what the run remembers. Frozen weights have no mark and may stay as they are.
"""

from __future__ import annotations

import hashlib
import io
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dcpo.weights.peft_adapter import KEPT

WEIGHTS = "weights"
_SAMPLE = 1024  # the numbers of a tensor of which its mark is made
_STATE = "optimizer.state."
# Megatron's names of the values that mixed precision trains, by its two optimizers
_MAIN_VALUES = ("param", "fp32_param")
_WORD = 8  # bytes
_MODULO = 1 << 64

Marks = Mapping[str, tuple[int, ...]]  # of each tensor of a group, by the group


def group_of(name: str) -> str:
    """Return the group of a tensor by its name in a checkpoint."""
    if name.startswith(_STATE):
        return name.removeprefix(_STATE).partition(".")[0]
    if name.startswith(KEPT):
        return ".".join(name.split(".")[:2])
    return WEIGHTS


def checksum(tensor: Tensor) -> int:
    """Return the sum of the 64-bit words of a tensor modulo 2^64, however it is stored."""
    data = tensor.detach().contiguous().view(-1)
    whole = data.nbytes // _WORD * _WORD // data.element_size()
    words = data[:whole]
    if words.storage_offset() * words.element_size() % _WORD:
        words = words.clone()
    total = int(words.view(torch.int64).sum())
    rest = data[whole:].view(torch.uint8)
    return (total + int(rest.sum())) % _MODULO


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of each group of named tensors of a checkpoint."""
    sums: dict[str, int] = {}
    for name, tensor in tensors:
        group = group_of(name)
        sums[group] = (sums.get(group, 0) + checksum(tensor)) % _MODULO
    return sums


def checksums_of_values(common: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum of each part of a checkpoint's values, which all ranks have alike."""
    sums = {}
    for name, value in common.items():
        content = io.BytesIO()
        torch.save(value, content)
        digest = hashlib.sha256(content.getbuffer()).digest()
        sums[name] = int.from_bytes(digest[:_WORD], "little")
    return sums


def together(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the checksums of groups of which each rank has written a part."""
    sums: dict[str, int] = {}
    for part in parts:
        for group, value in part.items():
            sums[group] = (sums.get(group, 0) + value) % _MODULO
    return dict(sorted(sums.items()))


@torch.no_grad()
def marks(trained: Mapping[str, Sequence[Tensor]]) -> Marks:
    """Return the marks of the tensors that training changes on this rank, by group."""
    found = {}
    for group, tensors in trained.items():
        samples = []
        for tensor in tensors:
            sample = tensor.reshape(-1)[:_SAMPLE].view(torch.uint8)
            samples.append(torch.nn.functional.pad(sample, (0, -sample.numel() % _WORD)))
        if samples:
            found[group] = _sums_of(samples)
    return found


def _sums_of(samples: list[Tensor]) -> tuple[int, ...]:
    """Return the sum of the words of each sample, with one copy from the device."""
    running = torch.cat(samples).view(torch.int64).cumsum(0)
    ends = torch.tensor([sample.numel() // _WORD for sample in samples]).cumsum(0) - 1
    return tuple(running[ends.to(running.device)].diff(prepend=running.new_zeros(1)).tolist())


def changed(before: Marks, now: Marks) -> set[str]:
    """Return the groups of which a tensor has changed. The main values change when weights do."""
    groups = {group for group, tensors in now.items() if before.get(group, tensors) != tensors}
    if WEIGHTS in groups:
        groups.update(_MAIN_VALUES)
    return groups


def changed_throughout(before: Marks, now: Marks) -> set[str]:
    """Return the groups of which every tensor has changed, so that whatever part of them a rank
    writes has changed too.
    """
    groups = set()
    for group, tensors in now.items():
        earlier = before.get(group, ())
        if len(earlier) == len(tensors) and all(map(operator.ne, earlier, tensors)):
            groups.add(group)
    return groups


def stale(before: Mapping[str, int], now: Mapping[str, int], changed: set[str]) -> set[str]:
    """Return the groups that training has ``changed`` and whose checksums are those of before."""
    return {group for group in changed & now.keys() if before.get(group) == now[group]}
