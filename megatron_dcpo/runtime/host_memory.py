"""Values that leave the device for the host while something else needs the room, and the ledger of
what is on the device.

Where the device's memory is the host's (``capabilities().separate_memory``) nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron_dcpo.runtime.device import capabilities, empty_cache, pinned, synchronize

_PIECE = 2**28  # bytes: torch rounds each pinned allocation up to a power of two


class Ledger:
    """What this process holds on the device, in bytes: ``weights``, ``gradients``, ``optimizer``,
    ``reference``, ``engine weights``, ``engine cache``, ``buckets``.

    Whoever takes or gives back memory of the device says so. ``watchers`` are called after each
    change with the name and what is held now: a test asserts what may be awake together.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.watchers: list[Callable[[str, dict[str, int]], None]] = []

    def put(self, what: str, nbytes: int) -> None:
        """Enter that ``what`` takes ``nbytes`` now, whatever it took before."""
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
    """The values of a contiguous tensor in the host's memory, pinned for the sake of the transfers'
    speed.
    """

    def __init__(self, like: Tensor) -> None:
        self.numel = like.numel()
        self.dtype = like.dtype
        self._pieces = [pinned(n, self.dtype) for n in self._lengths()]

    def fill(self, tensor: Tensor) -> HostCopy:
        """Take the values of ``tensor``; they are there after ``synchronize()``."""
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
    Objects and views stay what they are: only the storage is given back.

    ``tensors`` is asked at every :meth:`leave` (an optimizer makes its moments late); each has a
    storage of its own. ``constant``: the values never change and are copied once. ``name``: in the
    ledger.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], constant: bool = False
    ) -> None:
        self.name = name
        self.constant = constant
        self._tensors = tensors
        self.away = False
        self._moved: list[tuple[Tensor, int, HostCopy]] = []
        ledger.put(name, sum(t.nbytes for t in self._own()))

    def offload(self) -> None:
        """Move the state off the device, where that makes room; harmless when they are away."""
        if self.away or not capabilities().separate_memory:
            return
        before = {id(tensor): copy for tensor, _, copy in self._moved}
        self._moved = []
        for tensor in self._own():
            copy = before.get(id(tensor)) or HostCopy(tensor)
            if not (self.constant and id(tensor) in before):
                copy.fill(tensor)
            self._moved.append((tensor, tensor.untyped_storage().nbytes(), copy))
        synchronize()
        for tensor, _, _ in self._moved:
            tensor.untyped_storage().resize_(0)
        empty_cache()
        self.away = True
        ledger.drop(self.name)

    def reload(self) -> None:
        """Move the state onto the device as it was; harmless when they are there."""
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
        """Have the state on the device inside the block, and afterwards where it was before."""
        was_away = self.away
        self.reload()
        try:
            yield
        finally:
            if was_away:
                self.offload()

    def _own(self) -> list[Tensor]:
        """Return each storage once: tied weights are one."""
        return list(
            {t.untyped_storage().data_ptr(): t for t in self._tensors() if t.numel()}.values()
        )
