"""A conversion that is refused by the disk, or gets a signal in the middle: ``python -m
tests.helpers.interrupted_conversion VERB SOURCE TARGET BYTES SIGNAL``, of which 0 is none.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from megatron_dcpo.conversion import convert
from megatron_dcpo.errors import UserError


def main() -> int:
    verb, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    limit, number = int(sys.argv[4]), int(sys.argv[5])
    # a shell's background job has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sent = []

    def progress(done: int, total: int) -> None:
        # once: a second one would interrupt the clean-up
        if number and done > total // 2 and not sent:
            sent.append(True)
            os.kill(os.getpid(), number)

    try:
        getattr(convert, verb)(source, target, progress=progress)
    except UserError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
