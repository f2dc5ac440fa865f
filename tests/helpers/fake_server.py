"""A small OpenAI-compatible server: what it says is a function of the question and the seed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any], dict[str, str]]


def answer(body: dict[str, Any]) -> str:
    """A function of the question and the seed only, as sampling with a seed is."""
    question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    right = body["seed"] % 3 != 0
    number = question.split("=")[0].strip().split()[-1]
    return f"\\boxed{{{int(number) if right else -1}}}\n<conf> Confidence: 0.{body['seed'] % 9 + 1}"


def good_reply(body: dict[str, Any]) -> Reply:
    logprobs = [-0.5, -0.25, -9999.0]
    tops = [[-0.5, -1.5, -2.5], [-2.0, -0.25], [-0.1, -3.0]]
    if "messages" in body:
        rows = [
            {
                "token": "t",
                "logprob": one,
                "top_logprobs": [{"token": "t", "logprob": v} for v in top],
            }
            for one, top in zip(logprobs, tops, strict=True)
        ]
        choice: dict[str, Any] = {
            "message": {"content": answer(body)},
            "logprobs": {"content": rows},
        }
    else:
        named = [{f"t{i}": v for i, v in enumerate(top)} for top in tops]
        choice = {
            "text": answer(body),
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": named},
        }
    return 200, {"choices": [choice | {"finish_reason": "stop"}]}, {}


@dataclass
class FakeServer:
    """Counts what it is asked. ``reply`` may be replaced; ``pause``: seconds before every
    answer.
    """

    reply: Callable[[dict[str, Any]], Reply] = good_reply
    pause: float = 0.0
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    models_below: str = "/"  # the paths under which the models are listed
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> FakeServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                if not self.path.startswith(fake.models_below):
                    self._send((404, {"detail": "Not Found"}, {}))
                    return
                self._send((200, {"data": [{"id": "fake"}]}, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body["authorization"] = self.headers.get("Authorization")
                with fake._lock:
                    fake.asked.append(body)
                    fake._at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake._at_once)
                time.sleep(fake.pause)
                found = fake.reply(body)
                with fake._lock:
                    fake._at_once -= 1
                self._send(found)
                if found[0] == 200:
                    with fake._lock:
                        fake.answered.append(body)

            def _send(self, found: Reply) -> None:
                status, body, headers = found
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self.httpd = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.httpd.daemon_threads = True
        self.port = self.httpd.server_address[1]
        threading.Thread(
            target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def stop(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"
