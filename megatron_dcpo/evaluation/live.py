"""``dcpo report RUN --serve``: a page on this machine that follows a run while it trains.

The page asks for JSON every two seconds and draws what is new; it loads nothing else. The server
listens on the loopback address only and answers only requests for a local host name, so that no
page of the internet can read a run (DNS rebinding).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.report import OTHER_FORM, choose_samples, pages
from megatron_dcpo.evaluation.run_description import total_steps
from megatron_dcpo.evaluation.runs import read_run
from megatron_dcpo.runtime.local_names import is_local_host, is_same_origin
from megatron_dcpo.runtime.run_records import seconds_left
from megatron_dcpo.runtime.text import printable

ADDRESS = "127.0.0.1"
_POINTS = 1000  # per curve, as many as a screen shows


def live_server(run: str | Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on this machine only; with ``port`` 0 on any free port. Raises
    :class:`UserError`.
    """
    root = Path(run)
    if not root.is_dir():
        raise UserError(f"{root}: no such run directory; start the training first")
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(_Handler, root))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {ADDRESS}:{port} ({reason}); give another --port"
        ) from None


def state(root: Path) -> dict[str, Any]:
    """Return the data of the page: ``step`` of ``steps``, ``tokens_per_second``, ``seconds_left``,
    ``curves`` (title, percent, lines of [step, value] points) and ``samples``.
    """
    run = read_run(root)
    trained = {run.name: run.metrics}
    known = (*diagrams.TRAINING_CURVES, *diagrams.validation_curves(trained))
    curves = []
    for curve in diagrams.logged_curves(trained, known):
        lines = [_line(run.metrics, key) for key in curve.keys]
        curves.append({"title": curve.title, "percent": curve.percent, "lines": lines})
    values = {
        "name": root.resolve().name,
        **_progress(root, run.metrics),
        "curves": curves,
        "samples": [_shown(row) for row in choose_samples(run.samples)],
    }
    return json_ready(values)  # type: ignore[no-any-return]


def _progress(root: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far the run has come; unknown values are None."""
    steps_done = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    step = max(steps_done, default=None)
    steps = total_steps(root)
    left = None
    if steps and step is not None:
        left = seconds_left(rows, max(steps - step, 0))
    speed = None
    for row in reversed(rows):
        if row.get("tokens/s/step"):
            speed = row["tokens/s/step"]
            break
    return {"step": step, "steps": steps, "tokens_per_second": speed, "seconds_left": left}


def _line(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Return the [step, value] points of a metric, at most ``_POINTS`` of them."""
    steps, values = diagrams.series(rows, key)
    points = []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        points.append([step, value])
    stride = max(1, math.ceil(len(points) / _POINTS))
    return points[::stride]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample. Its ``pieces`` are runs of adjacent tokens as [text, block, advantage or
    None]; the text of an evaluation, whose tokens are not kept, is one piece without a block.
    """
    kept = ("training_step", "problem", "ground_truth", "correct", "confidence", "status")
    shown = {key: row.get(key) for key in kept}
    shown["pieces"] = row.get("pieces") or [[row.get("text", ""), "", None]]
    return shown


def _tag(root: Path) -> str:
    """Return a text that changes whenever the run writes something that the page shows."""
    newest_samples = sorted((root / "samples").glob("*.jsonl"))[-1:]
    parts = []
    for path in (root / "metrics.jsonl", *newest_samples):
        if path.exists():
            parts.append(f"{path.stat().st_mtime_ns}.{path.stat().st_size}")
    return "-".join(parts)


class _Handler(BaseHTTPRequestHandler):
    """Answers ``/`` with the page, and ``/data?have=TAG`` with the state, or with status 204 if the
    page has the current one already.
    """

    def __init__(self, root: Path, *request: Any) -> None:  # noqa: ANN401 -- of http.server
        self.root = root
        super().__init__(*request)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        requested = urlsplit(self.path)
        if not is_local_host(host):
            self._reply(403, "text/plain", "ask for 127.0.0.1 or localhost")
        elif origin is not None and not is_same_origin(origin, host):
            self._reply(403, "text/plain", "a page of another origin may not ask")
        elif requested.path == "/":
            template = pages().get_template("live.html.j2")
            page = template.render(title=printable(self.root.resolve().name))
            self._reply(200, "text/html", page)
        elif requested.path == "/data":
            tag = _tag(self.root)
            if parse_qs(requested.query).get("have") == [tag]:
                self._reply(204, "application/json", "")
                return
            try:
                values = {"tag": tag, **state(self.root)}
                text = json.dumps(values, allow_nan=False)
                self._reply(200, "application/json", text)
            except UserError as error:  # a file that is being rewritten
                self._reply(503, "text/plain", str(error))
            except OTHER_FORM as error:
                why = f"{type(error).__name__}: {one_line(error, 200)}"
                self._reply(503, "text/plain", f"a file of {self.root} is damaged ({why})")
        else:
            self._reply(404, "text/plain", "not here")

    def _reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            "script-src 'unsafe-inline'; connect-src 'self'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, since the page asks every two seconds."""
