"""vLLM servers as the engine, for clusters that split devices between training and rollouts.

A server is started with ``VLLM_SERVER_DEV_MODE=1`` (vLLM serves the routes that replace weights
only then) and ``--logprobs-mode processed_logprobs``. Each rank sends its prompts to one of the
servers, and all of them get every update: a Hugging Face directory on a disk that all see, which
appears complete or not at all; or, with ``rollout.weight_transfer=nccl``, the tensors themselves,
which rank 0 broadcasts to the workers of each server.

Weights may arrive while requests are under way: the servers return what they have sampled, and each
response is continued by a request of its own, behind its tokens, with the new weights.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.errors import UserError, one_line, pip_install
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
    append_segment,
)
from megatron_dcpo.rollout.random_numbers import request_seed
from megatron_dcpo.rollout.server_gate import Gate, Withdrawal
from megatron_dcpo.rollout.server_link import RETURN_SECONDS, ServerLink
from megatron_dcpo.rollout.server_tensors import (
    connection,
    described,
    in_calls,
    packed,
    whole_tensors,
)
from megatron_dcpo.rollout.tokens import read_eos_token_ids
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import capabilities, own_stream, synchronize
from megatron_dcpo.runtime.dtypes import name_of
from megatron_dcpo.runtime.files import new_directory
from megatron_dcpo.runtime.signals import RolloutAbandoned, stop_requested
from megatron_dcpo.types import FinishReason, Response, ResponseKey
from megatron_dcpo.weights.hf_checkpoint import copy_side_files, in_parts, tensors_on_disk
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import EMBEDDING, OUTPUT, hf_shapes, stored_shapes

T = TypeVar("T")

_ROUNDED = 1e-3  # a log-prob of a probability that rounding has put above 1
_REFUSED_SECONDS = 2.0  # time for a server to reject the transfer
_LOOK_SECONDS = 0.5  # between two looks for a signal, while no response comes
_GIVE_UP_SECONDS = 60.0  # for a server to end an update that was broken off


class ServerEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine` with servers as the engine.

    ``endpoints`` are the servers' addresses, with or without ``/v1``, of which ``rank`` asks the
    one at its number modulo theirs; ``exchange`` is the directory in which weights are put, or None
    if they travel over NCCL; ``concurrency`` the number of requests of this rank that are under way
    at once. Raises :class:`UserError` when a server does not answer, or was started without an
    option that this needs.
    """

    tensor_model_parallel_size = 1  # each rank is a client, whatever the servers have

    def __init__(
        self,
        endpoints: Sequence[str],
        model_dir: str | Path,
        exchange: Path | None,
        rank: int = 0,
        concurrency: int = 512,
        quantization: str | None = None,
    ) -> None:
        self.servers = [ServerLink(endpoint) for endpoint in endpoints]
        self.server = self.servers[rank % len(self.servers)]  # that this rank asks
        self.model_dir = Path(model_dir)
        self.exchange = exchange
        self.concurrency = concurrency
        self.links = []
        if exchange is None:
            self.links = [_Nccl(server) for server in self.servers]
        self.arch = read_architecture(model_dir)
        self.eos_token_ids = read_eos_token_ids(self.model_dir)
        self.weights_version = 0
        self.gate = Gate()
        for server in self.servers:
            server.wait_for_start()
            server.check(quantization)

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield responses as :class:`megatron_dcpo.rollout.engine.Engine` says: one request per
        sample, ``concurrency`` at a time.

        A rollout that is given up withdraws what is under way, by closing the connections.
        ``partial`` is refused: what weights interrupt is continued here.
        """
        if partial is not None:
            raise ValueError("a rollout of rollout.engine=server carries nothing over")
        arrivals = Arrivals()
        arrivals.put(*(EngineCall(prompt, index, sampling.max_tokens) for prompt, index in samples))
        arrivals.close()
        for responses in self.serve(arrivals, sampling, step):
            if responses:
                yield responses

    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Pass on what arrives as :meth:`megatron_dcpo.rollout.engine.Engine.serve` says, with its
        token ids: one request per call, ``concurrency`` at a time. The server stops at the texts of
        a call as soon as it has decoded one; what it has sampled behind the token with which that
        is complete is cut off.
        """
        if sampling.raw_logprobs or sampling.top_logprobs:
            raise ValueError(
                "this engine trains; to evaluate a server, use dcpo evaluate --endpoint"
            )
        self._check_version()
        with ThreadPoolExecutor(self.concurrency) as pool:
            requests = _Requests(pool, arrivals)
            try:
                while not (arrivals.is_over and not requests.under_way):
                    if stop_requested():
                        raise RolloutAbandoned
                    if requests.done.empty():
                        arrivals.wait(_LOOK_SECONDS)
                    requests.withdraw(arrivals.take_cancelled())
                    for call in arrivals.take(self.concurrency):
                        requests.send(call, partial(self._sample, sampling=sampling, step=step))
                    finished = requests.take_finished()
                    if finished:
                        self._check_version()
                    yield finished
            except BaseException:
                requests.withdraw(list(requests.under_way))
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Hand the weights to every server. Collective: rank 0 hands them over when no rank has a
        request under way, and every rank waits until all servers have them. Requests that are
        under way are continued then.
        """
        self.gate.close()
        try:
            paused = self._interrupt()
            self._hand_over(buckets, version, paused)
        except BaseException as error:
            self.gate.fail(error)
            raise
        self.weights_version = version
        self.gate.open()

    def _interrupt(self) -> bool:
        """Have the servers return what is under way, if any rank has a request there; return
        whether they are paused. Raises :class:`EngineError` on every rank if one cannot be.
        """
        if not distributed.max_over_ranks(self.gate.under_way):
            return False
        failure = ""
        if distributed.topology().rank == 0:
            try:
                _at_the_same_time(ServerLink.pause, self.servers)
            except EngineError as error:
                failure = str(error)
        failure = distributed.broadcast_object(failure)
        if failure:
            raise EngineError(failure)
        self.gate.wait_until_empty()
        return True

    def _hand_over(
        self, buckets: Iterable[Sequence[WeightSlice]], version: int, paused: bool
    ) -> None:
        """Hand the weights over on rank 0, and have the servers sample again if they are
        ``paused``; wait on the others.
        """
        distributed.barrier()
        failure = ""
        if distributed.topology().rank == 0:
            try:
                if self.links:
                    self._over_nccl(buckets)
                else:
                    self._through_files(buckets, version)
                for server in self.servers:
                    server.adopt(version)
                    if paused:
                        server.resume()
            except EngineError as error:
                failure = str(error)
                for server in self.servers if paused else ():
                    with suppress(EngineError):
                        server.resume()
        for _ in buckets:  # to the end, whatever failed: the other ranks go on sending
            pass
        failure = distributed.broadcast_object(failure)
        if failure:
            raise EngineError(failure)

    def _over_nccl(self, buckets: Iterable[Sequence[WeightSlice]]) -> None:
        """Broadcast every tensor to the workers of all servers at the same time, in a group for
        each server. Raises :class:`EngineError`; all groups are then given up, and the next update
        makes others.
        """
        shapes = hf_shapes(self.arch)
        try:
            for link in self.links:
                link.begin()
            tensors = whole_tensors(buckets, shapes, self.arch.tied_embeddings)
            for call in in_calls(tensors):
                messages = packed(call)
                synchronize()  # the messages are packed before other threads send them
                send = partial(_Nccl.send, told=described(call), messages=messages)
                _at_the_same_time(send, self.links)
                call.clear()  # their memory is free before the next ones come
                messages.clear()
            _at_the_same_time(_Nccl.finish, self.links)
        except EngineError:
            for link in self.links:
                link.give_up()
            raise

    def _through_files(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Write the weights once, and have every server read them, all at the same time."""
        assert self.exchange is not None
        directory = self.exchange.absolute() / f"version_{version}"
        self._write(buckets, directory)
        try:
            _at_the_same_time(lambda server: server.reload(directory), self.servers)
        finally:
            for older in set(directory.parent.glob("version_*")) - {directory}:
                shutil.rmtree(older, ignore_errors=True)

    def sleep(self) -> None:
        """Do nothing: the servers have devices of their own."""

    def restart(self) -> None:
        """Wait until every server answers again. Whoever started one that ended has to start it
        again; it has the weights that it began with then.
        """
        deadline = time.monotonic() + RETURN_SECONDS
        for server in self.servers:
            server.wait_for_return(deadline)
        self.weights_version = 0
        self.gate.open()

    # ---------------------------------------------------------------------------------------- parts
    def _check_version(self) -> None:
        """Raise :class:`EngineError` if the server has other weights than it was given, now or
        after those that arrive.
        """
        with self.gate.passing(Withdrawal()):
            self.server.check_version(self.weights_version)

    def _sample(
        self, call: EngineCall, sampling: SamplingConfig, step: int, withdrawal: Withdrawal
    ) -> Response:
        """Return the server's response, sampled in as many parts as weights arrive meanwhile.
        Raises :class:`EngineError`, also for a reply that cannot be one.
        """
        begun: Response | None = None
        while begun is None or begun.finish_reason == "abort":
            with self.gate.passing(withdrawal):
                part = self._part(call, begun, sampling, step, withdrawal)
            begun = append_segment(begun, part)
        return begun

    def _part(
        self,
        call: EngineCall,
        begun: Response | None,
        sampling: SamplingConfig,
        step: int,
        withdrawal: Withdrawal,
    ) -> Response:
        """Return what the server samples behind the tokens that have ``begun`` a response, up to
        its end or to the arrival of weights (``abort``).
        """
        prompt, index = call.prompt, call.index
        before = [] if begun is None else begun.token_ids.tolist()
        body = {
            "model": self.server.model,
            "prompt": [*prompt.token_ids, *before],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": call.max_tokens - len(before),
            "seed": request_seed(sampling.seed, step, prompt.prompt_id, index, len(before)),
            "stop_token_ids": list(self.eos_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if call.ends is not None:
            body["stop"] = list(call.ends.texts)
            body["skip_special_tokens"] = False  # a text may be one's
        with withdrawal.attempt() as stop:
            try:
                reply = self.server.complete(body, stop)
            except EngineError:
                if not withdrawal.is_sent_again:
                    raise
                return _nothing_new(call, self.weights_version)
        try:
            (choice,) = reply["choices"]
            # otherwise nobody has paused the servers
            interrupted = choice["finish_reason"] == "abort" and not self.gate.is_open
            if interrupted and not choice["token_ids"]:
                return _nothing_new(call, self.weights_version)
            token_ids = np.array(choice["token_ids"], np.int64)
            logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            finish_reason: FinishReason = "abort" if interrupted else "length"
            if choice["finish_reason"] == "stop":
                finish_reason = "stop"
            self._check_tokens(token_ids, logprobs, call.max_tokens - len(before))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            what = f"{type(error).__name__}: {one_line(error, 200)}"
            raise EngineError(f"{self.server.url}: unexpected reply ({what})") from None
        return Response(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            weights_version=self.weights_version,
        )

    def _check_tokens(self, token_ids: np.ndarray, logprobs: np.ndarray, max_tokens: int) -> None:
        """Raise ValueError for token ids or log-probs that cannot be."""
        length = token_ids.size
        has_one_logprob_each = token_ids.shape == logprobs.shape == (length,)
        if not has_one_logprob_each or not 0 < length <= max_tokens:
            raise ValueError(f"{token_ids.shape} token ids with {logprobs.shape} log-probs")
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
            specs = {name: (shape, dtype) for name, shape in stored_shapes(self.arch).items()}
            if self.arch.tied_embeddings:
                # vLLM's output layer may keep a packed copy, which the embedding alone does not
                # refresh.
                specs[OUTPUT] = specs[EMBEDDING]
            with tensors_on_disk(temporary, specs) as stored:
                tensors = in_parts(self.arch, stored)
                for piece in itertools.chain([first], pieces):
                    piece.write_into(tensors[piece.name])
                    if self.arch.tied_embeddings and piece.name == EMBEDDING:
                        piece.write_into(tensors[OUTPUT])
            copy_side_files(self.model_dir, temporary)


def _nothing_new(call: EngineCall, version: int) -> Response:
    """Return what a call has when weights arrive before its first token."""
    return Response(
        prompt_id=call.prompt.prompt_id,
        sample_index=call.index,
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        weights_version=version,
    )


class _Requests:
    """The calls that a server has been asked, each in a thread of ``pool``. ``under_way`` has what
    withdraws each.
    """

    def __init__(self, pool: ThreadPoolExecutor, arrivals: Arrivals) -> None:
        self.pool = pool
        self.arrivals = arrivals
        self.under_way: dict[ResponseKey, Withdrawal] = {}
        self.done: queue.SimpleQueue[tuple[EngineCall, Future[Response]]] = queue.SimpleQueue()

    def send(self, call: EngineCall, sample: Callable[..., Response]) -> None:
        withdrawal = self.under_way[call.key] = Withdrawal()
        request = self.pool.submit(sample, call, withdrawal=withdrawal)
        request.add_done_callback(partial(self._is_done, call))

    def withdraw(self, keys: Iterable[ResponseKey]) -> None:
        for key in keys:
            if key in self.under_way:
                self.under_way.pop(key).set()

    def take_finished(self) -> list[Response]:
        """Return the responses that have come, but for those of calls that were withdrawn."""
        finished = []
        while not self.done.empty():
            call, request = self.done.get()
            if self.under_way.pop(call.key, None) is not None:
                finished.append(_cut_at_text(request.result(), call))
        return finished

    def _is_done(self, call: EngineCall, request: Future[Response]) -> None:
        self.done.put((call, request))
        self.arrivals.wake()


def _cut_at_text(response: Response, call: EngineCall) -> Response:
    """Return a response up to the token with which its call ends."""
    if call.ends is None:
        return response
    for length, token in enumerate(response.token_ids.tolist(), start=1):
        if call.ends(token):
            return replace(
                response,
                token_ids=response.token_ids[:length],
                logprobs=response.logprobs[:length],
                finish_reason="stop",
            )
    return response


def _at_the_same_time(act: Callable[[T], object], servers: Sequence[T]) -> None:
    """Have ``act`` done for all servers at the same time. When it fails for one, the others are
    waited for before the error is raised, so that none is left in a broadcast.
    """
    with ThreadPoolExecutor(len(servers)) as pool:
        pending = [pool.submit(act, server) for server in servers]
    for done in pending:
        done.result()


@dataclass
class Sent:
    """What was broadcast to one server."""

    messages: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes


class _Nccl:
    """vLLM's dense NCCL backend (``vllm serve --weight-transfer-config '{"backend": "nccl"}'``),
    its trainer's side.

    Rank 0 of the run and the workers of one server are a group. For each call of tensors the server
    is told names, element types and shapes (``/update_weights``), and both enter the broadcasts of
    the messages that hold them. In memory are, besides a bucket, the tensors of a call twice, whole
    and packed, and those that are not complete yet: one or two. Each worker keeps the messages of
    the layer that it is loading. ``sent`` counts the messages and their bytes.
    """

    def __init__(self, server: ServerLink) -> None:
        if not capabilities().separate_memory:
            raise UserError(
                "rollout.weight_transfer=nccl needs a GPU for the training; set it to files"
            )
        if find_spec("vllm") is None:
            raise UserError(
                "rollout.weight_transfer=nccl needs vLLM in the trainer's environment as well "
                f"({pip_install('vllm')})"
            )
        self.server = server
        self.group: Any = None
        self.begun = False
        self.sent = Sent()

    def begin(self) -> None:
        """Open the group, if it is not, and tell the server that tensors come."""
        if self.group is None:
            self.group = self._connected()
        self.server.begin_update()
        self.begun = True
        self.server.call("/start_weight_update", {})

    def send(self, told: Mapping[str, Any], messages: Sequence[Tensor]) -> None:
        """Send the tensors that ``told`` describes, which ``messages`` hold. They may be
        overwritten when it returns.
        """
        with ThreadPoolExecutor(1) as pool, own_stream():
            pending = pool.submit(self.server.call, "/update_weights", {"update_info": told})
            self._check(pending)
            for message in messages:
                self.group.broadcast(message, src=0)
                self.sent.add(message.nbytes)
            pending.result()

    def finish(self, timeout: float | None = None) -> None:
        """Tell the server that there are no more tensors. A server in which anything failed refuses
        that, and is broken then; it is asked once, because a second call may be accepted.
        """
        self.begun = False
        try:
            self.server.call("/finish_weight_update", {}, timeout)
        except EngineError:
            self.server.break_off()
            raise
        self.server.end_update()

    def give_up(self) -> None:
        """Leave the group, and a server that still answers without an update half begun."""
        if self.group is not None:
            self.group.destroy()
            self.group = None
        with suppress(EngineError):
            if self.begun:
                self.finish(_GIVE_UP_SECONDS)
            self.server.call("/shutdown_weight_transfer_engine", {}, _GIVE_UP_SECONDS)

    def _connected(self) -> Any:  # noqa: ANN401 - a communicator of vLLM
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        info = {
            "master_address": _address_towards(self.server.url),
            "master_port": _free_port(),
            "world_size": 1 + int(self.server.call("/get_world_size")["world_size"]),
        }
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(
                self.server.call, "/init_weight_transfer_engine", {"init_info": connection(info)}
            )
            self._check(pending)
            group = trainer_init(info)
            pending.result()
        return group

    def _check(self, pending: Future[Any]) -> None:
        """Raise if the server refused: a rank that enters a collective alone waits for ever."""
        if wait([pending], _REFUSED_SECONDS if self.group is None else 0.0).done:
            pending.result()


def _address_towards(url: str) -> str:
    """Return this host's address as the server at ``url`` can reach it, IPv4 if both have one.
    Nothing is sent.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = min(found)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"no way to {url}: {one_line(error, 100)}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
