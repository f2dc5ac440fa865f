"""An engine in processes of its own: a vLLM server, which reads new weights from files. For clusters that split devices.

The server is started beside the run with ``VLLM_SERVER_DEV_MODE=1`` (vLLM serves the routes that replace weights only
then) and ``--logprobs-mode processed_logprobs``. Every update is a Hugging Face directory that appears complete or not at
all, on a disk that both see; all ranks send their prompts to the one server.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import shutil
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    Partial,
    Samples,
    SamplingConfig,
    read_eos_token_ids,
    request_seed,
)
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.dtypes import name_of
from megatron_dcpo.runtime.files import new_directory
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.runtime.signals import RolloutAbandoned, stop_requested
from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.architecture import read_architecture
from megatron_dcpo.weights.hf_checkpoint import copy_side_files, tensors_on_disk
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes

logger = logging.getLogger(__name__)

_REQUEST_SECONDS, _RETURN_SECONDS = 3600.0, 900.0  # for one request; for a server to come back
_ROUNDED = 1e-3  # a log-prob of a probability that rounding has put above 1


class ServerEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine`. Updates are collective: rank 0 writes and tells the server.

    ``endpoint``: the server's address (with or without ``/v1``). ``exchange``: the directory the weights are put in.
    Raises :class:`UserError` when the server does not answer, or was started without what this needs.
    """

    tensor_model_parallel_size = 1  # each rank is a client of its own, whatever the server has

    def __init__(self, endpoint: str, model_dir: str | Path, exchange: Path, concurrency: int = 512) -> None:
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.client = JsonClient(self.url)
        self.model_dir, self.exchange, self.concurrency = Path(model_dir), exchange.absolute(), concurrency
        self.arch = read_architecture(model_dir)
        self.eos_token_ids = read_eos_token_ids(self.model_dir)
        self.weights_version = 0
        self.model = self._check()

    def stream(
        self, samples: Samples, sampling: SamplingConfig, step: int = 0, partial: Partial | None = None
    ) -> Generator[list[Response], None, None]:
        """See :class:`megatron_dcpo.rollout.engine.Engine`. One request per sample, ``concurrency`` at a time. Not
        ``partial``: a request that is taken back gives no tokens, and taking back one rank's takes all ranks'."""
        if partial is not None:
            raise ValueError("rollout.max_staleness is not for rollout.engine=server")
        if sampling.raw_logprobs or sampling.top_logprobs:
            raise ValueError("this engine trains; to evaluate a server, use dcpo evaluate --endpoint")
        self._check_version()
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(samples)))) as pool:
            done: queue.SimpleQueue[Future[Response]] = queue.SimpleQueue()
            for prompt, i in samples:
                pool.submit(self._sample, prompt, i, sampling, step).add_done_callback(done.put)
            left = len(samples)
            try:
                while left:
                    responses = [done.get().result() for _ in range(max(1, done.qsize()))]
                    left -= len(responses)
                    if stop_requested():
                        raise RolloutAbandoned
                    self._check_version()  # a server that came back in between has other weights
                    yield responses
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Write the weights and have the server read them; every rank waits until it has."""
        failure = ""
        if distributed.topology().rank == 0:
            directory = self.exchange / f"version_{version}"
            self._write(buckets, directory)
            try:
                self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
                self._call("/reset_prefix_cache", {})
                self._call("/update_weight_version", {"new_version": str(version)})
            except EngineError as error:
                failure = str(error)
            for older in set(self.exchange.glob("version_*")) - {directory}:
                shutil.rmtree(older, ignore_errors=True)
        else:
            for _ in buckets:
                pass
        failure = distributed.broadcast_object(failure)
        if failure:
            raise EngineError(failure)
        self.weights_version = version

    def sleep(self) -> None:
        """Its devices are its own."""

    def restart(self) -> None:
        """Whoever started the server starts it again; wait for that. It comes back with the weights it began with."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                self._call("/health")
                self.weights_version = 0
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{self.url} has not come back in {_RETURN_SECONDS:.0f} s: {error}") from None
            time.sleep(1.0)

    # ---------------------------------------------------------------------------------------------------- parts
    def _sample(self, prompt: Prompt, index: int, sampling: SamplingConfig, step: int) -> Response:
        body = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": sampling.max_tokens,
            "seed": request_seed(sampling.seed, step, prompt.prompt_id, index),
            "stop_token_ids": list(self.eos_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        reply = self._call("/v1/completions", body)
        try:
            (choice,) = reply["choices"]
            token_ids = np.array(choice["token_ids"], np.int64)
            logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            cut_off = choice["finish_reason"] != "stop"
            good = token_ids.shape == logprobs.shape == (token_ids.size,) and 0 < token_ids.size <= sampling.max_tokens
            good = good and bool((token_ids >= 0).all() and (token_ids < self.arch.vocab_size).all())
            if not (good and (logprobs <= _ROUNDED).all()):
                raise ValueError("token ids or log-probs that cannot be")
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{self.url}: unexpected reply ({type(error).__name__}: {one_line(error, 200)})"
            ) from None
        return Response(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="length" if cut_off else "stop",
            weights_version=self.weights_version,
        )

    def _write(self, buckets: Iterable[Sequence[WeightSlice]], directory: Path) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        pieces = (piece for bucket in buckets for piece in bucket)
        with new_directory(directory, overwrite=True) as temporary:
            first = next(pieces)
            dtype = name_of(first.values.dtype)
            specs = {name: (shape, dtype) for name, shape in hf_shapes(self.arch).items()}
            if self.arch.tied_embeddings:
                # vLLM's output layer may keep a packed copy, which the embedding alone does not refresh.
                specs["lm_head.weight"] = specs["model.embed_tokens.weight"]
            with tensors_on_disk(temporary, specs) as tensors:
                for piece in itertools.chain([first], pieces):
                    piece.write_into(tensors[piece.name])
                    if self.arch.tied_embeddings and piece.name == "model.embed_tokens.weight":
                        piece.write_into(tensors["lm_head.weight"])
            copy_side_files(self.model_dir, temporary)

    def _check(self) -> str:
        """The name of the model served. Raises :class:`UserError` when the server lacks something."""
        needed = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
        try:
            models = [str(row["id"]) for row in self._call("/v1/models")["data"]]
            self._call("/weight_info")
            info = json.dumps(self._call("/server_info?config_format=json"))
        except (EngineError, LookupError, TypeError) as error:
            raise UserError(f"rollout.endpoint: {error}; start the server with: {needed}") from None
        if "processed_logprobs" not in info:
            raise UserError(f"{self.url} reports log-probs of the raw logits; start it with: {needed}")
        if len(models) != 1:
            raise UserError(f"{self.url} serves {len(models)} models; training needs a server of its own")
        return models[0]

    def _check_version(self) -> None:
        info = self._call("/weight_info")
        served = info.get("weight_version") if isinstance(info, dict) else None
        if served != str(self.weights_version):
            raise EngineError(
                f"{self.url} holds weights version {served}, not {self.weights_version}: it was started anew"
            )

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One attempt: whether to wait for the server or to give up is decided by who asks."""
        try:
            return self.client.call(path, body, timeout=30.0 if body is None else _REQUEST_SECONDS)
        except HttpError as error:
            raise EngineError(f"{self.url}{path}: {error}") from None
