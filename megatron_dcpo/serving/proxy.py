"""The application of ``dcpo serve``: the list of its paths. Two have confidences, two are the
upstream's, two its own; there are no others.
"""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router

from megatron_dcpo.runtime.asgi import App, Message, Receive, Send
from megatron_dcpo.serving.asking import PATHS
from megatron_dcpo.serving.calibrator import PLAIN, Calibrator
from megatron_dcpo.serving.json_text import error_body
from megatron_dcpo.serving.middleware import ConfidenceMiddleware, Service
from megatron_dcpo.serving.upstream import Upstream

PASSED_ON = ("/v1/models", "/health")
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = Path(__file__).with_name("page.html")
_GROWTH = 6  # of a body that was read, and written again in ASCII


def proxy_app(
    endpoint: str,
    service: Service,
    registry: CollectorRegistry,
    api_key: str | None = None,
    example: str = "",
) -> App:
    """Return the application in front of the server at ``endpoint``. ``api_key`` is sent there
    instead of the client's, None for the client's; ``example`` is a question that the page offers,
    "" for none.
    """
    bounds = service.bounds
    upstream = Upstream(endpoint, _GROWTH * bounds.request_bytes, bounds.body_seconds, api_key)
    html = _page(service.scorer.calibrator, example)

    async def page(request: Request) -> Response:
        return HTMLResponse(html)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=_TEXT_FORMAT)

    confident = ConfidenceMiddleware(upstream, service)
    routes = [
        Route("/", page),
        Route("/metrics", metrics),
        *(Route(path, upstream, methods=["GET"]) for path in PASSED_ON),
        *(Route(path, confident, methods=["POST"]) for path in PATHS),
    ]
    return Router(routes, redirect_slashes=False, default=_not_found, lifespan=upstream.living)


async def _not_found(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        body = error_body(404, "this path is not passed on")
        await JSONResponse(body, status_code=404)(scope, receive, send)


def _page(calibrator: Calibrator | None, example: str) -> str:
    """Return a page that asks as the predictor was fitted."""
    given = {**_asked_as_fitted(calibrator), "example": example}
    written = json.dumps(given).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("{{given}}", written)


def _asked_as_fitted(calibrator: Calibrator | None) -> dict[str, object]:
    """Return how the page has to ask so that answers are like those that were fitted: which
    ``api``, with what ``instruction``, and of which ``kinds`` a question may be, by the ``column``
    of the metadata. ``source`` is the predictor in words.
    """
    asked: dict[str, object] = {
        "api": "chat",
        "instruction": "",
        "column": "",
        "kinds": [],
        "source": "the model, which states it",
    }
    if calibrator is None:
        return asked
    asked["source"] = calibrator.name
    if calibrator.column is not None:
        asked["column"] = calibrator.column
        asked["kinds"] = calibrator.tasks
    fitted_on = calibrator.fitted_on
    if fitted_on is None:
        return asked
    if set(fitted_on.templates) == {PLAIN}:
        asked["api"] = "completions"
    if fitted_on.instructions and len(fitted_on.instructions[0]) == 1:
        asked["instruction"] = fitted_on.instructions[0][0]
    return asked
