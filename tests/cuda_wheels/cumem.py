"""``cumem_allocator`` of vLLM's CUDA wheel on a driver that only counts, beside its imitation
(``tests/helpers/cumem.py``).

    python -m tests.cuda_wheels.cumem [THE LIBRARY]

Of its libraries it calls the driver alone; the others are empty here. Prints how many operations
were compared, and after the first that differed what each said.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tests.helpers.cumem import Allocator, Driver, Extension

TOTAL, ORDERS, LENGTH = 100, 2000, 12
EMPTY = (
    "libtorch.so",
    "libc10.so",
    "libnvrtc.so.13",
    "libc10_cuda.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
)
COUNTING = """
#include <stddef.h>
typedef unsigned long long u64;
#define N 100000
static u64 next = 4096, size_of[N], handle_at[N]; static char held[N], reserved[N]; u64 used, errors;
static int at(u64 x) { return (int)(x / 4096); }
static void drop(u64 h) {
    for (u64 a = 4096; a < next; a += 4096) if (handle_at[at(a)] == h) return;
    if (!held[at(h)]) { used -= size_of[at(h)]; size_of[at(h)] = 0; }
}
static int no(int e) { errors++; return e; }
void driver_reset(void) {
    for (int i = 0; i < at(next) + 1; i++) { size_of[i] = handle_at[i] = 0; held[i] = reserved[i] = 0; }
    next = 4096; used = errors = 0;
}
u64 driver_used(void) { return used; }
u64 driver_errors(void) { return errors; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
int cuGetErrorString(int e, const char **s) { *s = e == 2 ? "out of memory" : "invalid argument"; return 0; }
int cuMemGetAllocationGranularity(size_t *g, const void *p, int f) { *g = 1; return 0; }
int cuMemCreate(u64 *h, size_t s, const void *p, u64 f) {
    if (used + s > TOTAL) return no(2);
    *h = next; next += 4096; held[at(*h)] = 1; size_of[at(*h)] = s; used += s; return 0;
}
int cuMemAddressReserve(u64 *a, size_t s, size_t l, u64 d, u64 f) {
    *a = next; next += 4096; reserved[at(*a)] = 1; return 0;
}
int cuMemMap(u64 a, size_t s, size_t o, u64 h, u64 f) {
    if (!reserved[at(a)] || handle_at[at(a)] || !held[at(h)]) return no(1);
    handle_at[at(a)] = h; return 0;
}
int cuMemSetAccess(u64 a, size_t s, const void *d, size_t n) { return 0; }
int cuMemUnmap(u64 a, size_t s) {
    u64 h = handle_at[at(a)]; if (!h) return no(1);
    handle_at[at(a)] = 0; drop(h); return 0;
}
int cuMemRelease(u64 h) { if (!held[at(h)]) return no(1); held[at(h)] = 0; drop(h); return 0; }
int cuMemAddressFree(u64 a, size_t s) {
    if (!reserved[at(a)] || handle_at[at(a)]) return no(1);
    reserved[at(a)] = 0; return 0;
}
"""


class Binary:
    """The library's functions, called as torch and vLLM call them."""

    def __init__(self, library: str) -> None:
        spec = spec_from_file_location(
            "cumem_allocator", library, loader=ExtensionFileLoader("cumem_allocator", library)
        )
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.code = ctypes.CDLL(library)
        self.code.my_malloc.restype = ctypes.c_void_p
        self.code.my_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.code.my_free.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self.error = ctypes.c_int.in_dll(self.code, "error_code")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.handles: dict[int, tuple[int, int, int, int]] = {}
        self.callbacks = (
            (lambda handle: self.handles.__setitem__(handle[2], handle)),
            lambda at: self.handles.pop(at),
        )
        self.module.init_module(*self.callbacks)

    def reset(self) -> None:
        self.driver.driver_reset()
        self.error.value = 0
        self.handles.clear()

    def malloc(self, size: int) -> int:
        return self.code.my_malloc(size, 0, None) or 0

    def free(self, at: int) -> None:
        self.code.my_free(at, self.handles[at][1], 0, None)

    def unmap(self, at: int) -> None:
        self.module.python_unmap_and_release(*self.handles[at])

    def map(self, at: int) -> None:
        self.module.python_create_and_map(*self.handles[at])

    def state(self) -> tuple[int, int, bool]:
        return (self.driver.driver_used(), self.driver.driver_errors(), self.error.value != 0)


class Imitation:
    """The same by the stand-in."""

    def reset(self) -> None:
        self.driver = Driver(TOTAL)
        self.extension = Extension(self.driver)
        self.allocator = Allocator(self.extension)

    def malloc(self, size: int) -> int:
        return self.extension.malloc(self.allocator, size)

    def free(self, at: int) -> None:
        self.extension.free(self.allocator, at)

    def unmap(self, at: int) -> None:
        self.extension.unmap_and_release(at)
        self.extension.raise_error()

    def map(self, at: int) -> None:
        self.extension.create_and_map(at, self.allocator.sizes[at])
        self.extension.raise_error()

    def state(self) -> tuple[int, int, bool]:
        return (self.driver.used, len(self.extension.printed), self.extension.error_code != 0)


def said(one: Any, name: str, argument: int) -> tuple[Any, ...]:
    try:
        answer = getattr(one, name)(argument)
    except RuntimeError as error:
        return (str(error).split(" at ")[0], *one.state()), 0
    return (bool(answer) if name == "malloc" else None, *one.state()), answer


def compare(library: str) -> dict[str, Any]:
    binary, imitation, compared = Binary(library), Imitation(), 0
    for seed in range(ORDERS):
        rng, pairs, done = random.Random(seed), [], []
        binary.reset()
        imitation.reset()
        for _ in range(LENGTH):
            name = rng.choice(["malloc", "malloc", "free", "unmap", "map"])
            if name == "malloc":
                arguments = (rng.choice([10, 30, 60]),) * 2
            elif pairs:
                arguments = pairs.pop(rng.randrange(len(pairs)))
            else:
                continue
            if name in ("unmap", "map"):
                pairs.append(arguments)
            done.append((name, arguments))
            first, second = (
                said(one, name, at) for one, at in zip((binary, imitation), arguments, strict=True)
            )
            if name == "malloc" and first[-1] and second[-1]:
                pairs.append((first[-1], second[-1]))
            if first[0] != second[0]:
                return {"compared": compared, "differs": f"{done}: {first} {second}"}
            compared += 1
    return {"compared": compared, "differs": ""}


def main() -> None:
    if "CUMEM" in os.environ:
        print(json.dumps(compare(os.environ["CUMEM"])))
        return
    found = find_spec("vllm")
    library = (
        sys.argv[1]
        if len(sys.argv) > 1
        else str(Path(found.origin or "").parent / "cumem_allocator.abi3.so")
    )
    with tempfile.TemporaryDirectory() as stubs:
        for name, text in [
            ("libcuda.so.1", COUNTING),
            *((name, "#include <iostream>") for name in EMPTY),
        ]:
            options = [
                "-w",
                "-shared",
                "-fPIC",
                f"-DTOTAL={TOTAL}",
                f"-Wl,-soname,{name}",
                "-o",
                f"{stubs}/{name}",
            ]
            language = (
                ["gcc", "-x", "c"] if text == COUNTING else ["g++", "-x", "c++"]
            )  # which makes std::cerr ready
            subprocess.run([*language, *options, "-"], input=text, text=True, check=True)
        environment = os.environ | {"LD_LIBRARY_PATH": stubs, "CUMEM": library}
        sys.exit(
            subprocess.run(
                [sys.executable, "-m", "tests.cuda_wheels.cumem"], env=environment
            ).returncode
        )


if __name__ == "__main__":
    main()
