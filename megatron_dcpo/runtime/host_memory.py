"""Values that leave the device for the host while something else needs the room, and the ledger of
what is on the device.

If the device's memory is the host's (not ``capabilities().separate_memory``), nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron_dcpo.runtime.device import capabilities, empty_cache, pinned, synchronize

_PIECE = 2**28  # bytes: torch rounds each pinned allocation up to a power of two


class Ledger:
    """The bytes that this process holds on the device, by name: ``weights``, ``gradients``,
    ``optimizer``, ``reference``, ``teacher``, ``engine weights``, ``engine cache``, ``buckets``.

    All code that takes or gives back device memory enters it here. ``watchers`` are called after
    each change with the name and the present entries, so that a test can assert what may be on the
    device together.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.watchers: list[Callable[[str, dict[str, int]], None]] = []

    def put(self, what: str, nbytes: int) -> None:
        """Enter ``nbytes`` for ``what``, in place of the previous entry."""
        self.held[what] = nbytes
        self._tell(what)

    def drop(self, what: str) -> None:
        if self.held.pop(what, None) is not None:
            self._tell(what)

    @contextmanager
    def holding(self, what: str, nbytes: int) -> Iterator[None]:
        self.put(what, nbytes)
        try:
            yield
        finally:
            self.drop(what)

    def _tell(self, what: str) -> None:
        for watcher in self.watchers:
            watcher(what, dict(self.held))


ledger = Ledger()


class HostCopy:
    """The values of a contiguous tensor in the host's memory, pinned for fast transfers."""

    def __init__(self, like: Tensor) -> None:
        self.numel = like.numel()
        self.dtype = like.dtype
        self._pieces = [pinned(length, self.dtype) for length in self._lengths()]

    def fill(self, tensor: Tensor) -> HostCopy:
        """Copy the values of ``tensor``; the copy is complete after ``synchronize()``."""
        for piece, part in zip(self._pieces, self._parts(tensor), strict=True):
            piece.copy_(part, non_blocking=True)
        return self

    def write_into(self, tensor: Tensor) -> None:
        for piece, part in zip(self._pieces, self._parts(tensor), strict=True):
            part.copy_(piece, non_blocking=True)

    def _lengths(self) -> list[int]:
        most = _PIECE // self.dtype.itemsize
        return [min(most, self.numel - start) for start in range(0, self.numel, most)]

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if self.numel:
            return tensor.detach().view(-1).split(self._lengths())
        return ()


class Movable:
    """Tensors that are on the device or, between :meth:`offload` and :meth:`reload`, on the host.
    The objects and their views stay the same; only the storage is given back.

    ``name`` is the name in the ledger. ``tensors`` is called at every :meth:`offload`, because an
    optimizer creates its moments late; each tensor has a separate storage. The values of
    ``constant`` tensors never change and are copied once.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], constant: bool = False
    ) -> None:
        self.name = name
        self.constant = constant
        self._tensors = tensors
        self.away = False
        self._moved: list[tuple[Tensor, int, HostCopy]] = []
        ledger.put(name, sum(tensor.nbytes for tensor in self._distinct()))

    def offload(self) -> None:
        """Move the tensors off the device if that makes room. Does nothing if they are away."""
        if self.away or not capabilities().separate_memory:
            return
        before = {id(tensor): copy for tensor, _, copy in self._moved}
        self._moved = []
        for tensor in self._distinct():
            copy = before.get(id(tensor))
            if copy is None:
                copy = HostCopy(tensor).fill(tensor)
            elif not self.constant:
                copy.fill(tensor)
            self._moved.append((tensor, tensor.untyped_storage().nbytes(), copy))
        synchronize()
        for tensor, _, _ in self._moved:
            tensor.untyped_storage().resize_(0)
        empty_cache()
        self.away = True
        ledger.drop(self.name)

    def reload(self) -> None:
        """Move the tensors back onto the device. Does nothing if they are there."""
        if not self.away:
            return
        for tensor, size, copy in self._moved:
            tensor.untyped_storage().resize_(size)
            copy.write_into(tensor)
        synchronize()
        self.away = False
        ledger.put(self.name, sum(tensor.nbytes for tensor, _, _ in self._moved))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the tensors on the device inside the block, and then move them back if they were
        away.
        """
        was_away = self.away
        self.reload()
        try:
            yield
        finally:
            if was_away:
                self.offload()

    def _distinct(self) -> list[Tensor]:
        """Return one tensor for each storage; tied weights share one."""
        by_storage = {}
        for tensor in self._tensors():
            if tensor.numel():
                by_storage[tensor.untyped_storage().data_ptr()] = tensor
        return list(by_storage.values())
