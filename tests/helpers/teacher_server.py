"""A stand-in for a vLLM server whose model reads: log-probs of a prompt's tokens, texts of ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Body = dict[str, Any]


@dataclass
class TeacherServer:
    """Answers as vLLM does with the model of ``directory``. ``spoil`` may change a reply to a
    completion; ``prompts`` are those that were read.
    """

    directory: Path
    spoil: Callable[[Body], Body] = lambda reply: reply
    max_model_len: int = 256
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.directory)
        self.reading = threading.Lock()

    def models(self) -> Body:
        return {"data": [{"id": "teacher", "max_model_len": self.max_model_len}]}

    def detokenize(self, body: Body) -> Body:
        return {"prompt": self.tokenizer.decode(body["tokens"])}

    def complete(self, body: Body) -> Body:
        assert body["max_tokens"] == 1
        assert body["prompt_logprobs"] == 0
        ids = torch.tensor([body["prompt"]])
        with self.reading, torch.no_grad():
            self.prompts.append(body["prompt"])
            logprobs = self.model(ids).logits[0].log_softmax(-1)
        rows: list[Body | None] = [None]
        for place, token in enumerate(body["prompt"][1:]):
            value = float(logprobs[place, token])
            rows.append({str(token): {"logprob": value, "rank": 1, "decoded_token": ""}})
        return self.spoil({"choices": [{"prompt_logprobs": rows, "text": ""}]})


@contextmanager
def serving(teacher: TeacherServer) -> Iterator[str]:
    """Serve a teacher; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self._send(teacher.models() if self.path == "/v1/models" else None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = {"/v1/completions": teacher.complete, "/detokenize": teacher.detokenize}
            self._send(known[self.path](body) if self.path in known else None)

        def _send(self, reply: Body | None) -> None:
            text = json.dumps(reply).encode()
            self.send_response(404 if reply is None else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
