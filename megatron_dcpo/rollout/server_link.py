"""One vLLM server of ``rollout.endpoint``: whether it is there, and which weights it has."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dcpo.config.sections import REQUEST_SECONDS
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.http_json import HttpError, JsonClient

logger = logging.getLogger(__name__)

_ASK_SECONDS = 30.0
# How long a run waits for a server that has not answered yet, and for one that is started again.
START_SECONDS = 900.0
RETURN_SECONDS = 900.0
# vLLM's older name of a quantization
_NEWER_NAMES: dict[str | None, str] = {"fp8": "fp8_per_tensor"}
# The statuses of a server that starts.
_STARTING = (502, 503, 504)
# The names of a server's weights that are no version. What vLLM leaves of an update that failed
# inside a worker makes the next one write into tensors that its graphs do not read, without an
# error, so that such a server has to be started again.
_IN_UPDATE = "in an update"
_WHOLE = "whole"  # an update was ended in order, with all tensors or with some of them
BROKEN = "broken"


class ServerLink:
    """The server at ``endpoint``, an address with or without ``/v1``. ``model`` is the name of what
    it serves, once :meth:`check` has asked it.
    """

    def __init__(self, endpoint: str) -> None:
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.client = JsonClient(self.url, through_proxy=False)
        self.model = ""

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Any:  # noqa: ANN401 - JSON of vLLM
        """Make one attempt: whether to wait for the server or to give up is decided by who asks.
        Without a ``timeout`` a question may take 30 seconds, a request with a ``body``
        REQUEST_SECONDS; ``stop`` withdraws it. Raises :class:`EngineError`.
        """
        if timeout is None:
            timeout = _ASK_SECONDS if body is None else REQUEST_SECONDS
        try:
            return self.client.call(path, body, timeout=timeout, stop=stop)
        except HttpError as error:
            raise EngineError(f"{self.url}{path}: {error}") from None

    def complete(self, body: dict[str, Any], stop: threading.Event) -> Any:  # noqa: ANN401 - JSON of vLLM
        """Return the reply to the request for one response; ``stop`` withdraws it. Raises
        :class:`EngineError`, and :class:`UserError` if it took too long, which it would again.
        """
        began = time.monotonic()
        try:
            return self.call("/v1/completions", body, stop=stop)
        except EngineError as error:
            if time.monotonic() - began < REQUEST_SECONDS:
                raise
            raise UserError(
                f"{error}: a response took more than {REQUEST_SECONDS:.0f} s, the server's queue "
                "included; give it more GPUs (dcpo launch --engines), or lower "
                "data.prompts_per_step or rollout.max_response_length; if it hangs, end it"
            ) from None

    # ------------------------------------------------------------------------------ is it there?
    def wait_for_start(self) -> None:
        """Wait until the server answers at all: a scheduler starts it at the same time as the run,
        and it loads its model for minutes. Raises :class:`UserError` after START_SECONDS.
        """
        began = time.monotonic()
        has_said = False
        while True:
            try:
                self.client.call("/health", timeout=_ASK_SECONDS)
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

    def wait_for_return(self, deadline: float) -> None:
        """Wait until the server answers again, a broken one until it was started again; until
        ``deadline`` of the monotonic clock at most. Raises :class:`UserError`.
        """
        while True:
            try:
                self.call("/health")
                self._check_not_broken()
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.url} has not come back in {RETURN_SECONDS:.0f} s: {error}"
                    ) from None
            else:
                return
            time.sleep(1.0)

    def check(self, quantization: str | None = None) -> None:
        """Ask for the name of the model served. Raises :class:`UserError` when the server lacks
        something, or has another ``quantization``.
        """
        needed = (
            "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
            "--generation-config vllm"
        )
        if quantization:
            needed = f"{needed} --quantization {quantization}"
        try:
            models = [str(row["id"]) for row in self.call("/v1/models")["data"]]
            self._check_engine_answers()
            info = self.call("/server_info?config_format=json")
        except (EngineError, LookupError, TypeError) as error:
            raise UserError(f"rollout.endpoint: {error}; start the server with: {needed}") from None
        if "processed_logprobs" not in json.dumps(info):
            raise UserError(
                f"{self.url} reports log-probs of the raw logits; start it with: {needed}"
            )
        served = _quantization_of(info)
        if _NEWER_NAMES.get(served, served) != _NEWER_NAMES.get(quantization, quantization):
            raise UserError(
                f"{self.url} serves {served or 'unquantized'} weights, and "
                f"rollout.vllm.quantization is {quantization or 'not set'}; change one of them, "
                f"the server by: {needed}"
            )
        if len(models) != 1:
            raise UserError(
                f"{self.url} serves {len(models)} models; training needs a server that serves "
                "only its model"
            )
        self.model = models[0]

    def _check_engine_answers(self) -> None:
        """Raise :class:`UserError` if the server answers and its engine does not."""
        try:
            self.client.call("/weight_info", timeout=_ASK_SECONDS)
        except HttpError as error:
            if error.status is not None or error.unreachable:
                raise EngineError(f"{self.url}/weight_info: {error}") from None
            raise UserError(
                f"rollout.endpoint: the engine of {self.url} does not answer ({error}): its "
                "workers may wait for the weights of a run that has ended; start it again"
            ) from None

    # --------------------------------------------------------------------------- which weights?
    def check_version(self, version: int) -> None:
        """Raise :class:`EngineError` if the server has other weights than ``version``."""
        served = self._version()
        if served != str(version):
            raise EngineError(
                f"{self.url} holds weights version {served}, not {version}: it was restarted"
            )

    def begin_update(self) -> None:
        """Call the weights incomplete from now on. Raises :class:`EngineError` if an update before
        was broken off.
        """
        if self._version() == _IN_UPDATE:  # by a run that has ended
            self.break_off()
        self._check_not_broken()
        self._name_weights(_IN_UPDATE)

    def end_update(self) -> None:
        """Say that nothing of an update is left in the server's workers."""
        self._name_weights(_WHOLE)

    def break_off(self) -> None:
        """Say that an update failed inside the server. ``dcpo launch`` then starts it again."""
        with suppress(EngineError):
            self._name_weights(BROKEN)

    def reload(self, directory: Path) -> None:
        """Have the server read its weights from a Hugging Face directory."""
        arguments = {"weights_path": str(directory)}
        self.begin_update()
        try:
            self.call("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        except EngineError:
            self.break_off()
            raise
        self.end_update()

    def pause(self) -> None:
        """Have the server return what it has sampled of every request so far, and hold those that
        come until :meth:`resume`.
        """
        self.call("/pause?mode=abort", {})

    def resume(self) -> None:
        """Have the server sample again."""
        self.call("/resume", {})

    def adopt(self, version: int) -> None:
        """Have the server forget what the old weights computed, and call the new ones
        ``version``.
        """
        reply = self.call("/reset_prefix_cache", {})
        if isinstance(reply, dict) and reply.get("success") is False:
            # with status 200 all the same
            raise EngineError(
                f"{self.url} did not clear its prefix cache: a request is still running"
            )
        self._name_weights(str(version))

    def _version(self) -> str | None:
        return weights_name(self.call("/weight_info"))

    def _name_weights(self, name: str) -> None:
        self.call("/update_weight_version", {"new_version": name}, _ASK_SECONDS)

    def _check_not_broken(self) -> None:
        if self._version() == BROKEN:
            raise EngineError(f"an update failed inside {self.url}; it has to be started again")


def weights_name(info: Any) -> str | None:  # noqa: ANN401 - JSON of vLLM
    """Return what ``/weight_info`` calls the weights: their version, or the state of an update."""
    return info.get("weight_version") if isinstance(info, dict) else None


def _quantization_of(info: Any) -> str | None:  # noqa: ANN401 - JSON of vLLM
    """Return what ``/server_info`` says of the quantization of the model served."""
    for name in ("vllm_config", "model_config", "quantization"):
        info = info.get(name) if isinstance(info, dict) else None
    return info or None
