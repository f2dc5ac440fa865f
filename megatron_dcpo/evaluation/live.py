"""``dcpo report RUN --serve``: a page on this machine that follows a run while it trains.

The page asks for JSON every two seconds and draws what is new; it loads nothing else. Only
addresses of this machine are answered, and only when they were asked for by a name of it, so that
no page of the internet can read a run (DNS rebinding).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.report import choose_samples, pages
from megatron_dcpo.evaluation.run_description import seconds_left, total_steps
from megatron_dcpo.evaluation.runs import read_run
from megatron_dcpo.runtime.text import printable

ADDRESS = "127.0.0.1"
_POINTS = 1000  # of a curve: what a screen shows


def live_server(run: str | Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on this machine alone; ``port`` 0: any free one. Raises
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
    """Return what the page shows of the run: ``step`` of ``steps``, ``tokens_per_second``,
    ``seconds_left``, ``curves`` (title, percent, lines of [step, value] points), ``samples``.
    """
    run = read_run(root)
    trained = {run.name: run.metrics}
    curves = diagrams.logged_curves(
        trained, (*diagrams.TRAINING_CURVES, *diagrams.validation_curves(trained))
    )
    return json_ready(  # type: ignore[no-any-return]
        {
            "name": root.resolve().name,
            **_progress(root, run.metrics),
            "curves": [
                {
                    "title": c.title,
                    "percent": c.percent,
                    "lines": [_line(run.metrics, key) for key in c.keys],
                }
                for c in curves
            ],
            "samples": [_shown(row) for row in choose_samples(run.samples)],
        }
    )


def _progress(root: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far the run is; None for what is not known."""
    step, steps = (
        max((row.get("step", 0) for row in rows), default=None),
        total_steps(root),
    )
    left = (
        seconds_left(rows, max(steps - step, 0)) if steps and step is not None else None
    )
    speed = next(
        (row["tokens/s/step"] for row in reversed(rows) if row.get("tokens/s/step")),
        None,
    )
    return {
        "step": step,
        "steps": steps,
        "tokens_per_second": speed,
        "seconds_left": left,
    }


def _line(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    steps, values = diagrams.series(rows, key)
    points = [
        list(point) for point in zip(steps.tolist(), values.tolist(), strict=True)
    ]
    return points[:: -(-len(points) // _POINTS) or 1]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample; ``pieces``: [text, block, advantage or None] of tokens that follow one
    another.
    """
    kept = (
        "training_step",
        "problem",
        "ground_truth",
        "correct",
        "confidence",
        "status",
    )
    shown = {key: row.get(key) for key in kept}
    shown["pieces"] = row.get("pieces") or [[row.get("text", ""), "reasoning", None]]
    return shown


def _tag(root: Path) -> str:
    """Return a text that changes when the run has written something that the page shows."""
    files = [root / "metrics.jsonl", *sorted((root / "samples").glob("*.jsonl"))[-1:]]
    return "-".join(
        f"{f.stat().st_mtime_ns}.{f.stat().st_size}" for f in files if f.exists()
    )


class _Handler(BaseHTTPRequestHandler):
    """``/``: the page; ``/data?have=TAG``: the state, or 204 where it is still the one that the
    page has.
    """

    def __init__(self, root: Path, *request: Any) -> None:  # noqa: ANN401 -- of http.server
        self.root = root
        super().__init__(*request)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get(
            "Host", ""
        )
        asked = urlsplit(self.path)
        if host not in (ADDRESS, "localhost"):
            self._reply(403, "text/plain", "ask for 127.0.0.1 or localhost")
        elif asked.path == "/":
            page = (
                pages()
                .get_template("live.html.j2")
                .render(title=printable(self.root.resolve().name))
            )
            self._reply(200, "text/html", page)
        elif asked.path == "/data":
            tag = _tag(self.root)
            if parse_qs(asked.query).get("have") == [tag]:
                self._reply(204, "application/json", "")
                return
            try:
                self._reply(
                    200,
                    "application/json",
                    json.dumps({"tag": tag} | state(self.root), allow_nan=False),
                )
            except UserError as error:  # a file that is being written anew
                self._reply(503, "text/plain", str(error))
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
            "default-src 'none'; style-src "
            "'unsafe-inline'; "
            "script-src 'unsafe-inline'; connect-src 'self'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: two requests a second are no news."""
