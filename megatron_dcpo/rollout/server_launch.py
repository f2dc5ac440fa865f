"""The server of ``rollout.engine=server`` as a child of ``dcpo launch``. If it ends, or an update
of its weights has failed, it is started again; the run waits for it, sends it the weights, and
continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import Config
from megatron_dcpo.config.field_types import LOCAL
from megatron_dcpo.config.rules import check_engine_gpus, check_engine_size
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.server_link import BROKEN, weights_name
from megatron_dcpo.rollout.vllm_host import cache_bytes
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.device import capabilities, fp32_head, host_memory_available
from megatron_dcpo.runtime.dtypes import dtype_name
from megatron_dcpo.runtime.http_json import HttpError, JsonClient

_PAUSE_SECONDS = 5.0
_END_SECONDS = 20.0


def server_command(config: Config, engines: int, longest: int, other: str = "") -> list[str]:
    """Return the command that serves ``config``'s model on ``engines`` GPUs: vLLM's, with an engine
    on every ``rollout.tensor_model_parallel_size`` of them, for sequences of at most ``longest``
    tokens, or the ``other`` one with what every server needs to know. Raises :class:`UserError`.
    """
    rollout = config.rollout
    model = config.model
    if rollout.engine != "server":
        raise UserError(
            f"--engines is for rollout.engine=server, not {rollout.engine}; set it, and "
            "rollout.endpoint"
        )
    size = rollout.tensor_model_parallel_size
    check_engine_gpus(config, engines, "--engines")
    check_engine_size(read_architecture(model.path), size)
    address = urlsplit(own_endpoint(config))
    host = address.hostname or LOCAL[0]
    if host not in LOCAL:
        # Debian's /etc/hosts gives a node's own name an address of the loopback device
        host = "0.0.0.0"
    common: dict[str, Any] = {
        "host": host,
        "port": address.port or 8000,
        "max-num-seqs": rollout.max_num_seqs,
        "dtype": dtype_name(model.params_dtype),
    }
    if rollout.quantization:
        common["quantization"] = rollout.quantization
    if other:
        return [*shlex.split(other), *_words({"model": model.path, **common})]
    options: dict[str, Any] = {
        "logprobs-mode": "processed_logprobs",
        "tensor-parallel-size": size,
        "data-parallel-size": engines // size,
    }
    options |= _memory(config, engines, longest)
    options["max-model-len"] = longest
    options["generation-config"] = "vllm"  # no defaults besides SamplingConfig
    if fp32_head(model.head_dtype):
        options["hf-overrides"] = json.dumps({"head_dtype": "float32"})
    if rollout.weight_transfer == "nccl":
        options["weight-transfer-config"] = json.dumps({"backend": "nccl"})
    serve = [sys.executable, "-m", "megatron_dcpo.rollout.vllm_server_main", "serve"]
    command = [*serve, model.path, *_words({**common, **options})]
    if not capabilities().cuda_graphs:
        command.append("--enforce-eager")
    if not capabilities().separate_memory:
        # as in vllm_engine.py: a split prompt fails
        command.append("--no-enable-chunked-prefill")
    return command


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _memory(config: Config, engines: int, longest: int) -> dict[str, Any]:
    """Return vLLM's options for the memory that the ``engines`` GPUs or cores of a server use.

    Without a memory of its own each of vLLM's workers would take ``gpu_memory_utilization`` of the
    host's, whatever their number.
    """
    rollout = config.rollout
    options: dict[str, Any] = {"gpu-memory-utilization": rollout.gpu_memory_utilization}
    if capabilities().separate_memory:
        return options
    options["kv-cache-memory-bytes"] = cache_bytes(
        arch=read_architecture(config.model.path),
        options=EngineOptions(
            dtype=config.model.params_dtype,
            tensor_model_parallel_size=rollout.tensor_model_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_model_len=longest,
            max_num_seqs=rollout.max_num_seqs,
            responses=config.data.prompts_per_step * rollout.group_size,
            arguments={"quantization": rollout.quantization},
        ),
        available=host_memory_available(),
        ranks=engines,
    )
    return options


def own_endpoint(config: Config) -> str:
    """Return the address of the one server that a launcher starts. Raises :class:`UserError`."""
    endpoints = config.rollout.endpoint
    if len(endpoints) > 1:
        raise UserError(
            f"--engines starts one server, and rollout.endpoint names {len(endpoints)}: give the "
            f"launcher on each node its own address alone (rollout.endpoint={endpoints[0]}), and "
            "the training all of them"
        )
    return endpoints[0]


def log_name(endpoint: str) -> str:
    """Return the name of the file in the run's directory to which the server at ``endpoint``
    writes: several nodes have one each.
    """
    host = urlsplit(endpoint).hostname
    if host is None or host in LOCAL:
        return "engines.log"
    return f"engines-{host}.log"


def _cores_apart(first: int, engines: int) -> list[int]:
    """Return the cores of the engines, and take them from this process and the ranks that it
    starts; none if there are too few for ``first`` ranks and the engines.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < max(first, 1) + engines:
        return []
    os.sched_setaffinity(0, cores[:-engines])
    return cores[-engines:]


class EngineServer:
    """A server as a context: it is started and waited for, and ended when the block ends. ``first``
    is the number of GPUs or cores of this node before those of the server's ``engines``; ``log`` is
    the file to which it writes.
    """

    def __init__(
        self, command: list[str], endpoint: str, first: int, engines: int, log: Path
    ) -> None:
        self.command = command
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.log = log
        self.client = JsonClient(self.url, timeout=5.0, through_proxy=False)
        self.environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        # the trainer's: one hardware queue, also for the copies and broadcasts of vLLM
        self.environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        self.cores: list[int] = []
        if capabilities().separate_memory:
            visible = os.environ.get(
                "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(first + engines)))
            ).split(",")
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + engines])
        else:
            # vLLM binds each worker to another NUMA node, and ends if there are too few
            self.environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            self.cores = _cores_apart(first, engines)
        self.process: subprocess.Popen[bytes] | None = None
        self.answers = threading.Event()
        self.over = threading.Event()

    def __enter__(self) -> EngineServer:
        """Wait until the server answers. Raises :class:`UserError` if it ends before that, or if
        another server is running.
        """
        if self._healthy():
            raise UserError(
                f"a server answers at {self.url} already; end it, or change rollout.endpoint"
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        keeper = threading.Thread(target=self._keep, name="engines", daemon=True)
        keeper.start()
        while not self._healthy():
            if not keeper.is_alive():
                status = self.process.returncode if self.process else None
                raise UserError(
                    f"the engines' server ended with status {status} before it answered; see "
                    f"{self.log}"
                )
            time.sleep(0.5)
        self.answers.set()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.process is not None:
            self._end(self.process)

    def serve(self) -> int:
        """Wait for the signal that ends this process."""
        for number in signals.STOP_SIGNALS:
            signal.signal(number, lambda *_: self.over.set())
        while not self.over.wait(1.0):
            pass
        return 0

    def _keep(self) -> None:
        """Start the server, again when it ends; on cores of this thread, as it inherits them."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        while not self.over.is_set():
            with self.log.open("ab") as log:
                how: dict[str, Any] = {
                    "env": self.environment,
                    "stdout": log,
                    "stderr": subprocess.STDOUT,
                }
                how |= {
                    "start_new_session": True,
                    "preexec_fn": signals.as_child(),
                }  # ^C is for the ranks
                self.process = subprocess.Popen(self.command, **how)
            status = self._watch(self.process)
            if self.over.is_set() or not self.answers.is_set():
                return
            signals.announce(
                f"the engines' server ended with status {status} ({self.log}); it is started again"
            )
            self.over.wait(_PAUSE_SECONDS)

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        """Return the status with which the server ends; one that an update has broken is ended."""
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PAUSE_SECONDS)
            if self.answers.is_set() and self._broken():
                self._end(process)
        return process.wait()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with contextlib.suppress(OSError):  # what it started
            os.killpg(process.pid, signal.SIGKILL)

    def _broken(self) -> bool:
        with contextlib.suppress(HttpError):
            return weights_name(self.client.call("/weight_info")) == BROKEN
        return False

    def _healthy(self) -> bool:
        with contextlib.suppress(HttpError):
            self.client.call("/health")
            return True
        return False
