"""What the code does: the memory that it holds and where it was made, the collectives that it
calls, the operations that it asks for, and how often it waits for the device.

A ledger stands between the code and the tensors, real or fake, and sees every operation. Memory is
that of the tensors' storages, without an allocator's rounding and fragmentation, and without what a
kernel takes for itself.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import megatron_dcpo
import megatron_dcpo.runtime.rehearsed_kernels  # noqa: F401 - the operations of ``rehearsed``
from megatron_dcpo.runtime.rehearsed_values import device_of

aten = torch.ops.aten
c10d = torch.ops.c10d

LARGE = 1 << 20  # bytes from which on it is noted where a tensor was made
SHOWN = 5
# Of these each rank sends (n - 1) / n of the whole buffer, which a ring passes on.
_ONCE_AROUND = (
    c10d.allgather_into_tensor_coalesced_.default,
    c10d.reduce_scatter_tensor_coalesced_.default,
    c10d._allgather_base_.default,
    c10d.allgather_.default,
    c10d._reduce_scatter_base_.default,
    c10d.reduce_scatter_.default,
    c10d.alltoall_base_.default,
    c10d.alltoall_.default,
)
_ALL_REDUCE = (c10d.allreduce_.default, c10d.allreduce_coalesced_.default)
_SENDS_NOTHING = (
    c10d.recv_.default,
    c10d.recv_any_source_.default,
    c10d.barrier.default,
    c10d.monitored_barrier_.default,
)
_READS_VALUES = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
)
# products, with the number of arguments whose shapes say how many operations they take
_FACTORS = {
    aten.mm: 2,
    aten.bmm: 2,
    aten.addmm: 3,
    aten.baddbmm: 3,
    torch.ops.rehearsed.attention: 4,
    torch.ops.rehearsed.attention_backward: 4,
}
_ROOMS = (str(Path(megatron_dcpo.__file__).parent), "megatron/core")
_OURSELVES = ("/megatron_dcpo/rehearsal/", "/megatron_dcpo/runtime/rehearsed_")


@dataclass(frozen=True)
class Made:
    """A tensor's storage: its bytes, the line of code that made it, and ``of`` which module, or of
    which operation's gradient, it is.
    """

    nbytes: int
    line: str
    of: str = ""


@dataclass(frozen=True)
class SentBytes:
    """Collectives of one kind in one group: how many, and the bytes that this rank sends."""

    count: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> SentBytes:
        """Return the sum with one more collective."""
        return SentBytes(count=self.count + 1, nbytes=self.nbytes + nbytes)


@dataclass
class Phase:
    """What one phase of a step did, on one rank.

    live: the bytes on the device at its end; peak: the most at any time.
    host: the most bytes in the host's memory.
    largest: the largest storages on the device at the peak.
    traffic: by group and operation. flops: of matrix products and attention.
    waits: how often the host waited for the device's values, by line.
    calls: by group, its collectives in their order: operation, bytes and line.
    """

    name: str
    live: int = 0
    peak: int = 0
    host: int = 0
    largest: list[Made] = field(default_factory=list)
    traffic: dict[tuple[str, str], SentBytes] = field(default_factory=dict)
    flops: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    calls: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the phase as plain data."""
        sent = [
            {"group": group, "operation": operation, **asdict(traffic)}
            for (group, operation), traffic in self.traffic.items()
        ]
        return {
            "name": self.name,
            "live": self.live,
            "peak": self.peak,
            "host": self.host,
            "largest": [asdict(made) for made in self.largest],
            "traffic": sent,
            "flops": self.flops,
            "waits": dict(self.waits),
            "calls": self.calls,
        }


class OperationLedger(TorchDispatchMode):
    """Counts what happens inside ``with ledger``, phase by phase.

    ``device`` is the type of the device whose memory is counted; what is on another is the host's.
    ``groups`` has the names of process groups, by torch's own.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.groups: Mapping[str, str] = {}
        self.phases: list[Phase] = []
        self._phase = Phase("before")
        self._held: dict[int, Made] = {}
        self._bytes = 0
        self._host_held: dict[int, int] = {}
        self._host_bytes = 0
        # what was held when the phase began, and the changes since then
        self._at_start: dict[int, Made] = {}
        self._changes: list[tuple[int, Made | None]] = []
        self._changes_at_peak = 0
        self._modules: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Count what happens inside the block as the phase ``name``."""
        self._phase = phase = Phase(name, peak=self._bytes, host=self._host_bytes)
        self._at_start = dict(self._held)
        self._changes = []
        self._changes_at_peak = 0
        self.phases.append(phase)
        yield phase
        phase.live = self._bytes
        phase.largest = self._largest_at_peak()
        self._phase = Phase("between")

    def __enter__(self) -> OperationLedger:
        self._resize = patch.object(torch.UntypedStorage, "resize_", self._resizing())
        self._resize.start()
        self._hooks = (
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            torch.nn.modules.module.register_module_forward_hook(
                self._leave_module, always_call=True
            ),
        )
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._resize.stop()

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - torch's operations have no type
        types: object,
        args: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> object:
        keywords = dict(keywords or {})
        result = function(*args, **keywords)
        if function.namespace == "prim":
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        if function.namespace == "c10d":
            self._communicate(function, args)
        elif function._overloadpacket in _FACTORS:
            factors = _FACTORS[function._overloadpacket]
            count = flop_registry[function._overloadpacket]
            self._phase.flops += count(*args[:factors], out_val=result)
        elif self._waits(function, args, result):
            self._phase.waits[_line()] += 1
        return result

    def told(self, tensor: Tensor) -> None:
        """Count that the host read ``tensor`` as a list or an array."""
        if self._is_here(tensor):
            self._phase.waits[_line()] += 1

    # ------------------------------------------------------------------------------------ memory
    def _is_here(self, tensor: Tensor) -> bool:
        return device_of(tensor).type == self.device

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self._host_held:
            return
        nbytes = storage.nbytes()
        if self._is_here(tensor):
            self._set(key, self._made(nbytes))
        else:
            self._host_held[key] = nbytes
            self._host_bytes += nbytes
            self._phase.host = max(self._phase.host, self._host_bytes)
        weakref.finalize(storage, self._release, key).atexit = False

    def _set(self, key: int, made: Made | None) -> None:
        before = self._held.pop(key, None)
        if before is not None:
            self._bytes -= before.nbytes
        if made is not None:
            self._held[key] = made
            self._bytes += made.nbytes
        self._changes.append((key, made))
        if self._bytes > self._phase.peak:
            self._phase.peak = self._bytes
            self._changes_at_peak = len(self._changes)

    def _release(self, key: int) -> None:
        if key in self._held:
            self._set(key, None)
        else:
            self._host_bytes -= self._host_held.pop(key, 0)

    def _resizing(self) -> Any:  # noqa: ANN401
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            made = self._held.get(storage._cdata)
            if made is not None:
                self._set(storage._cdata, replace(made, nbytes=storage.nbytes()))

        return resized

    def _made(self, nbytes: int) -> Made:
        if nbytes < LARGE:
            return Made(nbytes=nbytes, line="")
        node = torch._C._current_autograd_node()
        of = self._modules[-1] if self._modules else ""
        if node is not None:
            of = f"gradient of {node.name().removesuffix('Backward')}"
        return Made(nbytes=nbytes, line=_line(), of=of)

    def _largest_at_peak(self) -> list[Made]:
        held = self._at_start
        for key, made in self._changes[: self._changes_at_peak]:
            if made is None:
                held.pop(key, None)
            else:
                held[key] = made
        return sorted(held.values(), key=lambda made: -made.nbytes)[:SHOWN]

    def _enter_module(self, module: torch.nn.Module, _: object) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(self, *_: object) -> None:
        if self._modules:
            self._modules.pop()

    # ------------------------------------------------------------------------------ everything else
    def _communicate(self, function: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401
        if function in _SENDS_NOTHING:
            return
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        others = group.size() - 1
        if not others:
            return
        nbytes = _buffer_bytes(function, args)
        if function in _ALL_REDUCE:
            nbytes = 2 * nbytes * others // (others + 1)
        elif function in _ONCE_AROUND:
            nbytes = nbytes * others // (others + 1)
        name = self._name_of(group)
        operation = function._overloadpacket.__name__.strip("_")
        whole = _buffer_bytes(function, args)
        self._phase.calls.setdefault(name, []).append(
            f"{operation} of {whole:,} bytes at {_line()}"
        )
        key = (name, operation)
        self._phase.traffic[key] = self._phase.traffic.get(key, SentBytes()).plus(nbytes)

    def _name_of(self, group: ProcessGroup) -> str:
        return self.groups.get(group.group_name, "all ranks")

    def _waits(self, function: Any, args: tuple[Any, ...], result: object) -> bool:  # noqa: ANN401
        if function in _READS_VALUES:
            return self._is_here(args[0])
        if function is aten._to_copy.default:
            return self._is_here(args[0]) and not self._is_here(result)  # type: ignore[arg-type]
        if function is aten.copy_.default:
            waits = len(args) < 3 or not args[2]
            return waits and self._is_here(args[1]) and not self._is_here(args[0])
        return False


def _buffer_bytes(function: Any, args: tuple[Any, ...]) -> int:  # noqa: ANN401
    """Return the bytes of the largest buffer of a collective: what is gathered, or what is cut."""
    return max(
        sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))
        for arg in args[:2]
    )


def _line() -> str:
    """Return the innermost line of this package or of Megatron that is being executed."""
    return line_of(_frames(sys._getframe(1)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(frames: Iterable[FrameType]) -> str:
    """Return the first of the lines ``frames`` that is this package's or Megatron's."""
    for frame in frames:
        path = frame.f_code.co_filename
        if any(room in path for room in _ROOMS) and not any(here in path for here in _OURSELVES):
            start = max(path.rfind("megatron_dcpo/"), path.rfind("megatron/core/"))
            return f"{path[start:]}:{frame.f_lineno}"
    return ""
