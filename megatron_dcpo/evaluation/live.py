"""``dcpo report RUN --serve``: the report of a run on this machine, which follows it while it
trains.

The page asks every few seconds whether there is a newer one; it loads nothing else. The server
listens on the loopback address only and answers only requests for a local host name, so that no
page of the internet can read a run (DNS rebinding).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.report import OTHER_FORM, Followed, render_report
from megatron_dcpo.evaluation.run_description import total_steps
from megatron_dcpo.evaluation.runs import read_run
from megatron_dcpo.runtime.local_names import is_local_host, is_same_origin
from megatron_dcpo.runtime.run_records import seconds_left
from megatron_dcpo.runtime.text import encodable, printable

ADDRESS = "127.0.0.1"
# Between two questions of the page: drawing its pictures takes one or two.
_SECONDS = 5


@dataclass
class LivePage:
    """The page of the run in ``root``, drawn again when the run has written something."""

    root: Path
    tag: str = ""
    text: str = ""
    drawing: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> tuple[str, str]:
        """Return the tag and the text of the page as the run is now. Raises :class:`UserError`, or
        one of ``OTHER_FORM`` where a file is damaged.
        """
        with self.drawing:
            tag = _tag(self.root)
            if tag != self.tag or not self.text:
                run = read_run(self.root)
                title = printable(self.root.resolve().name)
                followed = Followed(_state(self.root, run.metrics), tag, _SECONDS)
                self.text = encodable(render_report([run], title, followed))
                self.tag = tag
            return self.tag, self.text


def live_server(run: str | Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on this machine only; with ``port`` 0 on any free port. Raises
    :class:`UserError`.
    """
    root = Path(run)
    if not root.is_dir():
        raise UserError(f"{root}: no such run directory; start the training first")
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(_Handler, LivePage(root)))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {ADDRESS}:{port} ({reason}); give another --port"
        ) from None


def _state(root: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how far the run has come, in a line."""
    step = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=None)
    if step is None:
        return "waiting for the first step"
    steps = total_steps(root)
    parts = [f"step {step} of {steps}" if steps else f"step {step}"]
    speed = next((row["tokens/s/step"] for row in reversed(rows) if row.get("tokens/s/step")), None)
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    left = seconds_left(rows, max(steps - step, 0)) if steps else None
    if left is not None:
        parts.append(f"about {_duration(left)} left" if left else "done")
    return " · ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {seconds % 3600 / 60:.0f} min"


def _tag(root: Path) -> str:
    """Return a text that changes whenever the run writes something that the page shows."""
    newest_samples = sorted((root / "samples").glob("*.jsonl"))[-1:]
    parts = []
    for path in (root / "metrics.jsonl", *newest_samples):
        if path.exists():
            parts.append(f"{path.stat().st_mtime_ns}.{path.stat().st_size}")
    return "-".join(parts)


class _Handler(BaseHTTPRequestHandler):
    """Answers ``/`` with the page, and ``/page?have=TAG`` too, or with status 204 if that page is
    the current one.
    """

    def __init__(self, page: LivePage, *request: Any) -> None:  # noqa: ANN401 -- of http.server
        self.page = page
        super().__init__(*request)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        requested = urlsplit(self.path)
        if not is_local_host(host):
            self._reply(403, "ask for 127.0.0.1 or localhost")
            return
        if origin is not None and not is_same_origin(origin, host):
            self._reply(403, "a page of another origin may not ask")
            return
        if requested.path not in ("/", "/page"):
            self._reply(404, "not here")
            return
        try:
            tag, text = self.page.current()
        except UserError as error:  # a file that is being rewritten
            self._reply(503, str(error))
        except OTHER_FORM as error:
            why = f"{type(error).__name__}: {one_line(error, 200)}"
            self._reply(503, f"a file of {self.page.root} is damaged ({why})")
        else:
            if requested.path == "/page" and parse_qs(requested.query).get("have") == [tag]:
                self._reply(204, "")
            else:
                self._reply(200, text, kind="text/html", tag=tag)

    def _reply(self, status: int, text: str, kind: str = "text/plain", tag: str = "") -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if tag:
            self.send_header("ETag", tag)
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            "script-src 'unsafe-inline'; connect-src 'self'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, since the page asks every few seconds."""
