"""What the tests of the vLLM engine share: which of them run, and a server that can be killed and
started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.types import Prompt
from tests.helpers.paths import QUICKSTART

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed (make setup-engine)"
)
at_length = pytest.mark.skipif(
    "DCPO_TEST_ENGINE" not in os.environ, reason="at length only: make test-engine"
)
POLICY = QUICKSTART / "policy"
HELDOUT = f"heldout={QUICKSTART / 'data' / 'heldout.jsonl'}"
PYTHON = os.environ.get("DCPO_VLLM") or (sys.executable if find_spec("vllm") else None)


def prompts_for_test() -> list[Prompt]:
    """Six prompts of odd lengths; the first two share their beginning, so that the prefix cache has
    something to keep.
    """
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 331, 40).tolist()
    ids = [shared, [*shared, 7], *(rng.integers(1, 331, n).tolist() for n in (1, 5, 33, 64))]
    return [Prompt(f"p{i}", (), tuple(tokens), "", "") for i, tokens in enumerate(ids)]


class Server:
    """``vllm serve`` on a port of its own; ``kill`` and ``start`` again at will."""

    def __init__(self, log: Path, *options: str, **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log, self.options, self.settings = log, options, settings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        options = [
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "32",
        ]
        options += [
            "--kv-cache-memory-bytes",
            str(64 << 20),
            "--served-model-name",
            "policy",
            *self.options,
        ]
        settings = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        settings |= {
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": "",
        }
        settings |= self.settings
        self.process = subprocess.Popen(
            [
                str(PYTHON),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(POLICY),
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                *options,
            ],
            env={**os.environ, **settings},
            stdout=open(self.log, "a"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"vllm serve ended: {self.log.read_text()[-2000:]}"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"vllm serve did not start: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """The whole session: the engine core is a process of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
