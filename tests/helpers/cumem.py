"""vLLM's sleeping memory without a GPU: a driver that counts, ``cumem_allocator`` and its Python
half, an engine on them.

What is imitated, line by line, is vLLM 0.32.0: ``csrc/cumem_allocator.cpp`` (CUDA, not ROCm),
``device_allocator/cumem.py`` and the sleep of ``v1/executor/abstract.py``.
``tests/cuda_wheels/test_cumem.py`` compares it with the binary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

OUT_OF_MEMORY = (2, "out of memory")
INVALID = (1, "invalid argument")
NOTHING = (0, "")
TAGS = ("weights", "kv_cache")


@dataclass
class Driver:
    """Physical memory of one card: created, mapped to reserved addresses, unmapped, released."""

    total: int
    created: dict[int, int] = field(
        default_factory=dict
    )  # handle -> bytes, until it is neither held nor mapped
    held: set[int] = field(default_factory=set)
    mapped: dict[int, int] = field(default_factory=dict)  # address -> handle
    reserved: set[int] = field(default_factory=set)
    numbers: Any = field(default_factory=lambda: itertools.count(4096, 4096))

    @property
    def used(self) -> int:
        return sum(self.created.values())

    def create(self, size: int) -> tuple[tuple[int, str], int]:
        if self.used + size > self.total:
            return OUT_OF_MEMORY, 0
        handle = next(self.numbers)
        self.created[handle] = size
        self.held.add(handle)
        return NOTHING, handle

    def map(self, address: int, handle: int) -> tuple[int, str]:
        if address not in self.reserved or address in self.mapped or handle not in self.held:
            return INVALID
        self.mapped[address] = handle
        return NOTHING

    def unmap(self, address: int) -> tuple[int, str]:
        if address not in self.mapped:
            return INVALID
        self._drop(self.mapped.pop(address))
        return NOTHING

    def release(self, handle: int) -> tuple[int, str]:
        if handle not in self.held:
            return INVALID
        self.held.remove(handle)
        self._drop(handle)
        return NOTHING

    def free_address(self, address: int) -> tuple[int, str]:
        if address not in self.reserved or address in self.mapped:
            return INVALID
        self.reserved.remove(address)
        return NOTHING

    def _drop(self, handle: int) -> None:
        if handle not in self.held and handle not in self.mapped.values():
            self.created.pop(handle, None)


class Extension:
    """``cumem_allocator``: ``error_code`` is one for the process, and only the two functions for
    Python reset it.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.error_code, self.error_msg = driver, 0, ""
        self.printed: list[str] = []  # on stderr
        self.handles: dict[int, int] = {}  # what p_memHandle of an address points to

    def check(self, result: tuple[int, str]) -> bool:
        """CUDA_CHECK, then ``if (error_code != 0) return``: also after an error of long ago."""
        if result[0]:
            self.error_code = result[0]
            self.error_msg = f"CUDA Error: {result[1]} at /workspace/csrc/cumem_allocator.cpp:245"
            self.printed.append(self.error_msg)
        return self.error_code == 0

    def create_and_map(self, address: int, size: int) -> None:
        result, handle = self.driver.create(size)
        if not result[0]:
            self.handles[address] = handle
        if self.check(result) and self.check(self.driver.map(address, handle)):
            self.check(NOTHING)  # cuMemSetAccess

    def unmap_and_release(self, address: int) -> None:
        if self.check(self.driver.unmap(address)):
            self.check(self.driver.release(self.handles[address]))

    def malloc(self, allocator: Allocator, size: int) -> int:
        if not self.check(NOTHING):  # cuMemGetAllocationGranularity
            return 0
        address = next(self.driver.numbers)
        self.driver.reserved.add(address)
        allocator.sizes[address], allocator.tags[address] = size, allocator.tag
        self.create_and_map(address, size)
        if self.error_code:
            self.check(self.driver.free_address(address))
            return 0
        return address

    def free(self, allocator: Allocator, address: int) -> None:
        allocator.forget(address)
        self.unmap_and_release(address)
        self.check(self.driver.free_address(address))

    def raise_error(self) -> None:
        if self.error_code:
            self.error_code = 0
            raise RuntimeError(self.error_msg)


class Allocator:
    """``CuMemAllocator``: what was allocated under which tag, and what of it sleeps."""

    def __init__(self, extension: Extension) -> None:
        self.extension, self.tag = extension, "default"
        self.sizes: dict[int, int] = {}
        self.tags: dict[int, str] = {}
        self.asleep: set[int] = set()

    def forget(self, address: int) -> None:
        """``_python_free_callback``: on CUDA it does not ask whether the memory sleeps."""
        del self.sizes[address], self.tags[address]
        self.asleep.discard(address)

    def sleep(self) -> None:
        for address in self.sizes.keys() - self.asleep:
            try:
                self.extension.unmap_and_release(address)
                self.extension.raise_error()
            finally:
                self.asleep.add(address)

    def wake_up(self, tags: list[str] | None) -> None:
        for address in sorted(self.asleep):
            if tags is None or self.tags[address] in tags or self.tags[address] not in TAGS:
                self.extension.create_and_map(address, self.sizes[address])
                self.extension.raise_error()
                self.asleep.discard(address)


class Llm:
    """As much of ``vllm.LLM`` as an update of weights needs. ``failing``: the next call of that
    name raises.
    """

    def __init__(self, allocator: Allocator, sizes: dict[str, list[int]]) -> None:
        self.allocator, self.failing, self.version = allocator, "", "0"
        self.sleeping: set[str] = set()
        self.addresses: list[int] = []
        for allocator.tag, parts in sizes.items():
            self.addresses += [self._allocated(size) for size in parts]
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))

    def _allocated(self, size: int) -> int:
        if not (address := self.allocator.extension.malloc(self.allocator, size)):
            raise ValueError(
                "Free memory on device cuda:0 on startup is less than desired GPU memory "
                "utilization"
            )
        return address

    def sleep(self, level: int) -> None:
        assert level == 2
        if "weights" in self.sleeping:  # "Executor is already sleeping."
            return
        self.allocator.sleep()
        self.sleeping |= {*TAGS}

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if not self.sleeping or (tags and not self.sleeping.issuperset(tags)):
            return not self.sleeping
        self.allocator.wake_up(tags)
        self.sleeping -= {*(tags or TAGS)}
        return not self.sleeping

    def start_weight_update(self) -> None:
        self._may_fail("start_weight_update")

    def update_weights(self, _: dict[str, Any]) -> None:
        self._may_fail("update_weights")

    def finish_weight_update(self, weight_version: str) -> None:
        self._may_fail("finish_weight_update")
        self.version = weight_version

    def reset_prefix_cache(self) -> bool:
        return not self.sleeping

    def _may_fail(self, name: str) -> None:
        if "weights" in self.sleeping:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.failing == name:
            raise RuntimeError("a shape that does not fit")

    def shutdown(self) -> None:
        while self.addresses:
            self.allocator.extension.free(self.allocator, self.addresses.pop())
