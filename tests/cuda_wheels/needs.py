"""Which of these tests run: those of the CUDA wheels in their environment only."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_dcpo.runtime.text import parse_json
from tests.helpers.paths import REPOSITORY

in_cuda_wheels = pytest.mark.skipif(
    "DCPO_TEST_CUDA_WHEELS" not in os.environ,
    reason="in the environment of the CUDA wheels: make test-cuda-wheels",
)


def printed_by(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a module prints last, run in a process of its own: it makes up a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cuda_wheels.{module}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(parse_json(done.stdout.splitlines()[-1]))
