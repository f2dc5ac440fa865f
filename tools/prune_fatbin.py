"""Zero the device code that one GPU never runs in CUDA libraries, so that they compress to a tenth.

    prune_fatbin.py ARCH FILE...        ARCH: 90 for Hopper

Sizes and offsets stay. What has no machine code for ARCH is lost: in vLLM 0.32.0 for Hopper that is
Marlin and FP4 alone. Each fat binary: magic 0xBA55ED50, version, header bytes, bytes of entries;
each entry: kind (1 PTX, 2 machine code), header bytes, bytes, and the architecture 28 bytes in.
"""

from __future__ import annotations

import collections
import struct
import sys
from pathlib import Path

PTX, MACHINE_CODE = 1, 2


def prune(path: Path, keep: int) -> dict[str, int]:
    """Rewrite the file; return the bytes kept and zeroed."""
    data, at = bytearray(path.read_bytes()), 0
    sizes: dict[str, int] = collections.Counter()
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if version != 1 or header != 16 or at + header + size > len(data):
            at += 4
            continue
        place, end = at + header, at + header + size
        while place < end:
            kind, _, entry_header, length = struct.unpack_from("<HHIQ", data, place)
            architecture = struct.unpack_from("<I", data, place + 28)[0]
            if kind not in (PTX, MACHINE_CODE) or not 32 <= entry_header <= 4096:
                break
            stays, start = (kind == MACHINE_CODE and architecture == keep, place + entry_header)
            sizes["kept" if stays else "zeroed"] += length
            if not stays:
                data[start : start + length] = bytes(length)
            place = start + length
        at = end
    if sizes:
        path.write_bytes(data)
    return sizes


if __name__ == "__main__":
    for name in sys.argv[2:]:
        if sizes := prune(Path(name), int(sys.argv[1])):
            print(Path(name).name, {key: f"{value / 1e6:.1f} MB" for key, value in sizes.items()})
