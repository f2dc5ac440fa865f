"""A vLLM server as the engine, for clusters that split devices between training and rollouts.

The server is started with ``VLLM_SERVER_DEV_MODE=1`` (vLLM serves the routes that replace weights
only then) and ``--logprobs-mode processed_logprobs``. All ranks send their prompts to the one
server. An update is a Hugging Face directory on a disk that both see, which appears complete or not
at all; or, with ``rollout.weight_transfer=nccl``, the tensors themselves, which rank 0 broadcasts
to the server's workers.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.errors import UserError, one_line, pip_install
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
    request_seed,
)
from megatron_dcpo.rollout.tokens import read_eos_token_ids
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import capabilities, synchronize
from megatron_dcpo.runtime.dtypes import name_of
from megatron_dcpo.runtime.files import new_directory
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.runtime.signals import RolloutAbandoned, stop_requested
from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.architecture import read_architecture
from megatron_dcpo.weights.hf_checkpoint import copy_side_files, tensors_on_disk
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import EMBEDDING, OUTPUT, hf_shapes

logger = logging.getLogger(__name__)

_REQUEST_SECONDS, _RETURN_SECONDS = (
    3600.0,
    900.0,
)  # for one request; for a server to come back
# How long a run waits for a server that has not answered yet, and the statuses of one that starts.
START_SECONDS = 900.0
_STARTING = (502, 503, 504)
_ROUNDED = 1e-3  # a log-prob of a probability that rounding has put above 1
_REFUSED_SECONDS = (
    2.0  # within which a server says that it takes no weights in this way
)


class ServerEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine` with a server as the engine.

    ``endpoint`` is the server's address, with or without ``/v1``; ``exchange`` the directory in
    which weights are put, or None if they travel over NCCL; ``concurrency`` the number of requests
    of this rank that are under way at once. Raises :class:`UserError` when the server does not
    answer, or was started without an option that this needs.
    """

    tensor_model_parallel_size = 1  # each rank is a client, whatever the server has

    def __init__(
        self,
        endpoint: str,
        model_dir: str | Path,
        exchange: Path | None,
        concurrency: int = 512,
    ) -> None:
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.client = JsonClient(self.url, through_proxy=False)
        self.model_dir = Path(model_dir)
        self.exchange = exchange
        self.concurrency = concurrency
        self.transfer = _Nccl(self.url, self._call) if exchange is None else None
        self.arch = read_architecture(model_dir)
        self.eos_token_ids = read_eos_token_ids(self.model_dir)
        self.weights_version = 0
        self._wait_for_start()
        self.model = self._check()

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield responses as :class:`megatron_dcpo.rollout.engine.Engine` says: one request per
        sample, ``concurrency`` at a time.

        ``partial`` is refused: a request that is withdrawn gives no tokens, and withdrawing the
        requests of one rank withdraws the requests of all ranks.
        """
        if partial is not None:
            raise ValueError("rollout.max_staleness is not for rollout.engine=server")
        if sampling.raw_logprobs or sampling.top_logprobs:
            raise ValueError(
                "this engine trains; to evaluate a server, use dcpo evaluate --endpoint"
            )
        self._check_version()
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(samples)))) as pool:
            done: queue.SimpleQueue[Future[Response]] = queue.SimpleQueue()
            for prompt, index in samples:
                request = pool.submit(self._sample, prompt, index, sampling, step)
                request.add_done_callback(done.put)
            left = len(samples)
            try:
                while left:
                    responses = [
                        done.get().result() for _ in range(max(1, done.qsize()))
                    ]
                    left -= len(responses)
                    if stop_requested():
                        raise RolloutAbandoned
                    # a server that was started again in between has other weights
                    self._check_version()
                    yield responses
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def update_weights(
        self, buckets: Iterable[Sequence[WeightSlice]], version: int
    ) -> None:
        """Hand the weights to the server. Collective: rank 0 hands them over when no rank has a
        request under way, and every rank waits until the server has them.
        """
        distributed.barrier()
        failure = ""
        if distributed.topology().rank == 0:
            try:
                if self.transfer is not None:
                    self.transfer.send(
                        buckets, hf_shapes(self.arch), self.arch.tied_embeddings
                    )
                else:
                    self._through_files(buckets, version)
                self._reset_prefix_cache()
                self._call("/update_weight_version", {"new_version": str(version)})
            except EngineError as error:
                failure = str(error)
        for _ in buckets:  # to the end, whatever failed: the other ranks go on sending
            pass
        failure = distributed.broadcast_object(failure)
        if failure:
            raise EngineError(failure)
        self.weights_version = version

    def _reset_prefix_cache(self) -> None:
        """Have the server forget what the old weights computed. It answers with status 200 when it
        could not.
        """
        reply = self._call("/reset_prefix_cache", {})
        if isinstance(reply, dict) and reply.get("success") is False:
            raise EngineError(
                f"{self.url} did not clear its prefix cache: a request is still running"
            )

    def _through_files(
        self, buckets: Iterable[Sequence[WeightSlice]], version: int
    ) -> None:
        assert self.exchange is not None
        directory = self.exchange.absolute() / f"version_{version}"
        self._write(buckets, directory)
        arguments = {"weights_path": str(directory)}
        try:
            self._call(
                "/collective_rpc", {"method": "reload_weights", "kwargs": arguments}
            )
        finally:
            for older in set(directory.parent.glob("version_*")) - {directory}:
                shutil.rmtree(older, ignore_errors=True)

    def sleep(self) -> None:
        """Do nothing: the server has devices of its own."""

    def restart(self) -> None:
        """Wait until the server answers again. Whoever started it has to start it again; it comes
        back with the weights it began with.
        """
        deadline = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                self._call("/health")
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.url} has not come back in {_RETURN_SECONDS:.0f} s: {error}"
                    ) from None
            else:
                self.weights_version = 0
                return
            time.sleep(1.0)

    # ---------------------------------------------------------------------------------------- parts
    def _sample(
        self, prompt: Prompt, index: int, sampling: SamplingConfig, step: int
    ) -> Response:
        """Return the server's response. Raises :class:`EngineError`, also for a reply that cannot
        be one.
        """
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
            stopped = choice["finish_reason"] == "stop"
            self._check_tokens(token_ids, logprobs, sampling.max_tokens)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{self.url}: unexpected reply ({type(error).__name__}: {one_line(error, 200)})"
            ) from None
        return Response(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop" if stopped else "length",
            weights_version=self.weights_version,
        )

    def _check_tokens(
        self, token_ids: np.ndarray, logprobs: np.ndarray, max_tokens: int
    ) -> None:
        """Raise ValueError for token ids or log-probs that cannot be."""
        length = token_ids.size
        has_one_logprob_each = token_ids.shape == logprobs.shape == (length,)
        if not has_one_logprob_each or not 0 < length <= max_tokens:
            raise ValueError(
                f"{token_ids.shape} token ids with {logprobs.shape} log-probs"
            )
        if token_ids.min() < 0 or token_ids.max() >= self.arch.vocab_size:
            raise ValueError("a token id outside the vocabulary")
        if not (logprobs <= _ROUNDED).all():
            raise ValueError("a log-prob above 0, or not a number")

    def _write(self, buckets: Iterable[Sequence[WeightSlice]], directory: Path) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        pieces = (piece for bucket in buckets for piece in bucket)
        with new_directory(directory, overwrite=True) as temporary:
            first = next(pieces)
            dtype = name_of(first.values.dtype)
            specs = {
                name: (shape, dtype) for name, shape in hf_shapes(self.arch).items()
            }
            if self.arch.tied_embeddings:
                # vLLM's output layer may keep a packed copy, which the embedding alone does not
                # refresh.
                specs[OUTPUT] = specs[EMBEDDING]
            with tensors_on_disk(temporary, specs) as tensors:
                for piece in itertools.chain([first], pieces):
                    piece.write_into(tensors[piece.name])
                    if self.arch.tied_embeddings and piece.name == EMBEDDING:
                        piece.write_into(tensors[OUTPUT])
            copy_side_files(self.model_dir, temporary)

    def _wait_for_start(self) -> None:
        """Wait until the server answers at all: a scheduler starts it at the same time as the run,
        and it loads its model for minutes. Raises :class:`UserError` after START_SECONDS.
        """
        began = time.monotonic()
        has_said = False
        while True:
            try:
                self.client.call("/health", timeout=30.0)
            except HttpError as error:
                may_come = error.unreachable or error.status in _STARTING
                if not may_come:
                    return  # it answers; whether as it should is checked next
                waited = time.monotonic() - began
                if waited > START_SECONDS:
                    raise UserError(
                        f"rollout.endpoint: no server answers at {self.url} after "
                        f"{START_SECONDS:.0f} s ({error}); start one, as dcpo launch --engines "
                        "does, or correct the address"
                    ) from None
                if not has_said and distributed.Collectives().rank == 0:
                    logger.info(
                        "waiting for a server at %s, for %.0f s at most (%s)",
                        self.url,
                        START_SECONDS,
                        error,
                    )
                    has_said = True
            else:
                return
            time.sleep(1.0)

    def _check(self) -> str:
        """Return the name of the model served. Raises :class:`UserError` when the server lacks
        something.
        """
        needed = (
            "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
            "--generation-config vllm"
        )
        try:
            models = [str(row["id"]) for row in self._call("/v1/models")["data"]]
            self._call("/weight_info")
            info = json.dumps(self._call("/server_info?config_format=json"))
        except (EngineError, LookupError, TypeError) as error:
            raise UserError(
                f"rollout.endpoint: {error}; start the server with: {needed}"
            ) from None
        if "processed_logprobs" not in info:
            raise UserError(
                f"{self.url} reports log-probs of the raw logits; start it with: {needed}"
            )
        if len(models) != 1:
            raise UserError(
                f"{self.url} serves {len(models)} models; training needs a server that serves "
                "only its model"
            )
        return models[0]

    def _check_version(self) -> None:
        info = self._call("/weight_info")
        served = info.get("weight_version") if isinstance(info, dict) else None
        if served != str(self.weights_version):
            raise EngineError(
                f"{self.url} holds weights version {served}, not {self.weights_version}: it was "
                "restarted"
            )

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON of vLLM
        """Make one attempt: whether to wait for the server or to give up is decided by who asks."""
        try:
            return self.client.call(
                path, body, timeout=30.0 if body is None else _REQUEST_SECONDS
            )
        except HttpError as error:
            raise EngineError(f"{self.url}{path}: {error}") from None


class _Nccl:
    """vLLM's dense NCCL backend (``vllm serve --weight-transfer-config '{"backend": "nccl"}'``),
    its trainer's side.

    Rank 0 of the run and the server's workers are one group. A tensor is put together from its
    slices, the server is told its name, element type and shape (``/update_weights``), and both
    enter its broadcast. Besides a bucket, the tensors that are not complete yet are in memory: one
    or two. vLLM keeps a second copy of the layer that it is loading.
    """

    def __init__(self, url: str, call: Callable[..., Any]) -> None:
        if not capabilities().separate_memory:
            raise UserError(
                "rollout.weight_transfer=nccl needs a GPU for the training; set it to files"
            )
        if find_spec("vllm") is None:
            raise UserError(
                "rollout.weight_transfer=nccl needs vLLM in the trainer's environment as well "
                f"({pip_install('vllm')})"
            )
        self.url, self.call = url, call
        self.group: Any = None

    def send(
        self,
        buckets: Iterable[Sequence[WeightSlice]],
        shapes: Mapping[str, Sequence[int]],
        tied: bool,
    ) -> None:
        """Send all tensors of ``shapes``. Raises :class:`EngineError`; the group is then given up,
        and the next call makes another.
        """
        try:
            group = self.group = self.group or self._connected()
            self.call("/start_weight_update", {})
            with ThreadPoolExecutor(1) as pool:
                for tensors in whole_tensors(buckets, shapes, tied):
                    told = pool.submit(
                        self.call,
                        "/update_weights",
                        {"update_info": described(tensors)},
                    )
                    self._check(told)
                    for tensor in tensors.values():
                        group.broadcast(tensor, src=0)
                    told.result()
                    # the bucket may be overwritten as soon as the next one is asked for
                    synchronize()
            self.call("/finish_weight_update", {})
        except EngineError:
            if self.group is not None:
                self.group.destroy()
                self.group = None
            raise

    def _connected(self) -> Any:  # noqa: ANN401 - a communicator of vLLM
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        info = {
            "master_address": _address_towards(self.url),
            "master_port": _free_port(),
            "world_size": 1 + int(self.call("/get_world_size")["world_size"]),
        }
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(
                self.call,
                "/init_weight_transfer_engine",
                {"init_info": connection(info)},
            )
            self._check(told)
            group = trainer_init(info)
            told.result()
        return group

    def _check(self, told: Future[Any]) -> None:
        """Raise if the server refused: a rank that enters a collective alone waits for ever."""
        if wait([told], _REFUSED_SECONDS if self.group is None else 0.0).done:
            told.result()


def whole_tensors(
    buckets: Iterable[Sequence[WeightSlice]],
    shapes: Mapping[str, Sequence[int]],
    tied: bool,
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors that each bucket completes, by name; those that no slice completed are
    missing at the end: :class:`EngineError`. A tied output layer is sent as a tensor too: vLLM may
    keep a copy of it.
    """
    begun: dict[str, tuple[Tensor, int]] = {}
    left = set(shapes)
    for bucket in buckets:
        done: dict[str, Tensor] = {}
        for piece in bucket:
            tensor, filled = begun.pop(piece.name, (None, 0))
            if tensor is None:
                tensor = torch.empty(
                    tuple(shapes[piece.name]),
                    dtype=piece.values.dtype,
                    device=piece.values.device,
                )
            piece.write_into(tensor)
            filled += piece.values.numel()
            if filled < tensor.numel():
                begun[piece.name] = tensor, filled
                continue
            left.remove(piece.name)
            done |= {piece.name: tensor} | (
                {OUTPUT: tensor} if tied and piece.name == EMBEDDING else {}
            )
        if done:
            yield done
    if left:
        raise EngineError(
            f"{len(left)} tensors did not come completely, {min(left)} among them"
        )


def connection(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server's workers are told of the group that rank 0 opens; a tensor is a
    broadcast of its own.
    """
    return {**group, "rank_offset": 1, "packed": False}


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return what the server is told of the tensors whose broadcasts follow, in their order."""
    return {
        "names": list(tensors),
        "dtype_names": [
            str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()
        ],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _address_towards(url: str) -> str:
    """Return this host's address as the server at ``url`` can reach it. Nothing is sent."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"no way to {url}: {one_line(error, 100)}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
