"""The transformers engine in a process of its own, for ``rollout.engine=server`` on a machine
without a GPU:

    python examples/quickstart/engine_server.py --model examples/quickstart/policy --port 8011

``dcpo launch`` starts it with ``--engine-command`` (async.yaml). It answers what training asks of a
vLLM server, and nothing else. Requests that come together are sampled together, to their end or to
a pause. For this machine alone.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_dcpo.errors import EXIT_USER_ERROR, UserError
from megatron_dcpo.rollout.engine import PartialRollout, SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime.device import set_threads
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.types import Prompt, Response, ResponseKey
from megatron_dcpo.weights.hf_checkpoint import HFReader

_QUIET_SECONDS = 0.02  # without a further request before those that are there are sampled

Job = tuple[SamplingConfig, Prompt, int, "Future[Response]"]  # the seed is the sample's index


class TransformersServer(ThreadingHTTPServer):
    """Serves ``engine``. :meth:`work` samples, on the thread that calls it; ``version``: what the
    trainer calls the weights.
    """

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, engine: TransformersEngine, address: tuple[str, int]) -> None:
        self.engine, self.version = engine, "0"
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.sampling = threading.Lock()
        self.going_on = threading.Event()
        self.going_on.set()
        super().__init__(address, _Handler)

    def work(self) -> None:
        """Sample what is asked for, for ever."""
        while True:
            together = [self.jobs.get()]
            with suppress(queue.Empty):
                while True:
                    together.append(self.jobs.get(timeout=_QUIET_SECONDS))
            alike: dict[SamplingConfig, list[Job]] = defaultdict(list)
            for job in together:
                alike[job[0]].append(job)
            for sampling, jobs in alike.items():
                self.going_on.wait()
                with self.sampling:
                    self._sample(sampling, jobs)

    def _sample(self, sampling: SamplingConfig, jobs: Sequence[Job]) -> None:
        asked: dict[ResponseKey, list[Future[Response]]] = defaultdict(list)
        for _, prompt, seed, answer in jobs:
            asked[prompt.prompt_id, seed].append(answer)
        prompts = {prompt.prompt_id: prompt for _, prompt, _, _ in jobs}
        samples = [(prompts[name], seed) for name, seed in asked]
        until_pause = PartialRollout(should_stop=lambda: not self.going_on.is_set(), unfinished={})
        try:
            for responses in self.engine.stream(samples, sampling, partial=until_pause):
                for response in responses:
                    for answer in asked.pop(response.key):
                        answer.set_result(response)
        except Exception as error:  # for those who ask; the next ones may be luckier
            for answer in (each for answers in asked.values() for each in answers):
                answer.set_exception(error)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``/v1/completions``."""
        sampling = SamplingConfig(
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(0, body["top_k"]),
            max_tokens=body["max_tokens"],
        )
        answer: Future[Response] = Future()
        ids = tuple(body["prompt"])
        self.jobs.put((sampling, Prompt(str(ids), (), ids, "", ""), body["seed"], answer))
        response = answer.result()
        choice = {"token_ids": response.token_ids.tolist(), "finish_reason": response.finish_reason}
        return {"choices": [choice | {"logprobs": {"token_logprobs": response.logprobs.tolist()}}]}

    def reload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``/collective_rpc``: take the weights of a directory, between two samplings."""
        with self.sampling:
            reader = HFReader(body["kwargs"]["weights_path"])
            for name, parameter in self.engine.model.named_parameters():
                parameter.data.copy_(reader.slice(name)[:])
        return {}

    def pause(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``/pause?mode=abort``: what is being sampled is returned as it is."""
        self.going_on.clear()
        with self.sampling:
            return {}

    def resume(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``/resume``."""
        self.going_on.set()
        return {}

    def rename(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``/update_weight_version``."""
        self.version = body["new_version"]
        return {}


class _Handler(BaseHTTPRequestHandler):
    server: TransformersServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        known = {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/weight_info": {"weight_version": self.server.version},
            "/server_info": {"engine": "transformers", "logprobs_mode": "processed_logprobs"},
        }
        path = self.path.partition("?")[0]
        self._send(200 if path in known else 404, known.get(path))

    def do_POST(self) -> None:
        known = {
            "/v1/completions": self.server.complete,
            "/collective_rpc": self.server.reload,
            "/update_weight_version": self.server.rename,
            "/reset_prefix_cache": lambda body: {},
            "/pause": self.server.pause,
            "/resume": self.server.resume,
        }
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self._send(200, known[self.path.partition("?")[0]](parse_json(body)))
        except (
            Exception
        ) as error:  # whatever the engine raises, or a body that is not the trainer's
            self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        with suppress(OSError):  # who asked has gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    args = parser.parse_args(argv)
    set_threads()
    try:
        engine = TransformersEngine.from_pretrained(args.model, args.dtype, args.max_num_seqs)
        server = TransformersServer(engine, (args.host, args.port))
    except (UserError, OSError) as error:
        print(f"dcpo: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    threading.Thread(target=server.serve_forever, name="requests", daemon=True).start()
    server.work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
