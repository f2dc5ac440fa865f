"""Peak memory of this process over a stretch of code."""

from __future__ import annotations

import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SECONDS = 0.02


class PeakMemory:
    """Samples resident and anonymous memory while the block runs.

    Anonymous memory (heap, buffers) is what a machine must have; resident memory counts mapped files as well, which the
    kernel can drop. Linux only; elsewhere both read zero.
    """

    def __init__(self) -> None:
        self._peaks = {"VmRSS": 0, "RssAnon": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def resident_bytes(self) -> int:
        self._sample()
        return self._peaks["VmRSS"]

    @property
    def anonymous_bytes(self) -> int:
        self._sample()
        return self._peaks["RssAnon"]

    def _watch(self) -> None:
        while not self._stop.wait(_SECONDS):
            self._sample()

    def _sample(self) -> None:
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            return
        for line in lines:
            name, _, rest = line.partition(":")
            if name in self._peaks:
                self._peaks[name] = max(self._peaks[name], int(rest.split()[0]) * 1024)
