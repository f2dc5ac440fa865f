"""The server of the transformers engine, in threads of the tests' process."""

from __future__ import annotations

import runpy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.types import Response
from tests.helpers.paths import QUICKSTART

SCRIPT = QUICKSTART / "engine_server.py"


class Engine(TransformersEngine):
    """``fails_with``: the weights version with which it fails once, a response handed over, and
    loses its weights; ``failing`` is called then; ``pause``: seconds more between two of them.
    ``sampled``: version and first weights of each response, in order.
    """

    fails_with, pause = "", 0.0
    failing: Callable[[], None] = staticmethod(lambda: None)
    server: Any
    sampled: list[tuple[str, tuple[float, ...]]]

    def first_weights(self) -> tuple[float, ...]:
        return tuple(next(self.model.parameters()).detach()[0, :4].tolist())

    def stream(
        self, samples: Any, sampling: Any, step: int = 0, partial: Any = None
    ) -> Iterator[Sequence[Response]]:  # type: ignore[override]
        for responses in super().stream(samples, sampling, step, partial):
            time.sleep(self.pause)
            self.sampled += [(self.server.version, self.first_weights())] * len(responses)
            yield responses
            if self.server.version == self.fails_with:
                self.server.version, self.fails_with = "0", ""
                for parameter in self.model.parameters():
                    parameter.data.zero_()
                self.failing()
                raise RuntimeError("killed in generation")


class Served:
    """A context: the quickstart's policy behind an address of its own, ``together`` responses
    sampled at a time (1: each as if it were alone, bit for bit).
    """

    def __init__(self, together: int = 512) -> None:
        self.together = together

    def __enter__(self) -> Served:
        self._start(("127.0.0.1", 0))
        return self

    def _start(self, address: tuple[str, int]) -> None:
        self.engine = Engine.from_pretrained(QUICKSTART / "policy", max_num_seqs=self.together)
        assert isinstance(self.engine, Engine)
        self.engine.sampled = []
        server = runpy.run_path(str(SCRIPT))["TransformersServer"]
        self.http = self.engine.server = server(self.engine, address)
        for target in (self.http.serve_forever, self.http.work):
            threading.Thread(target=target, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def start_again(self, seconds: float) -> None:
        """Be away for so long, and come back at the same address with the weights of the start."""
        self._stop()
        again = threading.Timer(seconds, self._start, [self.http.server_address])
        again.daemon = True
        again.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    @property
    def options(self) -> tuple[str, str]:
        return ("rollout.engine=server", f"rollout.endpoint={self.endpoint}")
