"""What a middleware needs besides the application that it wraps: how choices are scored, what is
counted, and the pages that it answers itself.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route, Router

from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.serving.asking import read_body
from megatron_dcpo.serving.calibrator import PLAIN, Calibrator, Names
from megatron_dcpo.serving.ending import Shutdown
from megatron_dcpo.serving.feedback import MOST_ANSWERS, Feedback, UnknownAnswerError
from megatron_dcpo.serving.limits import Gate, ServeLimits
from megatron_dcpo.serving.metrics import ServingMetrics
from megatron_dcpo.serving.refusals import Refusals
from megatron_dcpo.serving.replies import error_body
from megatron_dcpo.serving.scorer import Scorer

_LARGEST_INDEX = 1 << 31

Page = Callable[[HttpRequest], Awaitable[HttpResponse]]

_PAGE = Path(__file__).with_name("page.html")
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Service:
    """``paths`` are those that ``pages`` answers; all others are the application's. ``names`` are
    those of the upstream's models. ``refusals`` knows with which requests the upstream refuses
    log-probs. ``gate`` lets as many requests through as ``limits`` say, ``ending`` ends them when
    the server does. ``is_proxy`` is false inside another server, which reads the bodies for other
    paths itself.
    """

    scorer: Scorer
    metrics: ServingMetrics
    feedback: Feedback
    pages: Router
    paths: frozenset[str]
    names: Names = field(default_factory=dict)
    limits: ServeLimits = field(default_factory=ServeLimits)
    gate: Gate = field(default_factory=lambda: Gate(ServeLimits()))
    refusals: Refusals = field(default_factory=Refusals)
    ending: Shutdown = field(default_factory=Shutdown)
    is_proxy: bool = True


def build_service(
    scorer: Scorer,
    registry: CollectorRegistry,
    names: Names | None = None,
    is_proxy: bool = True,
    limits: ServeLimits | None = None,
    example: str = "",
) -> Service:
    """Return the service of a proxy, with a page and its metrics; or of a middleware, whose
    application shows the metrics of its ``registry`` itself. ``example`` is a question that the
    page offers.
    """
    limits = limits or ServeLimits()
    feedback = Feedback()
    fitted = None
    if scorer.calibrator is not None and scorer.calibrator.record is not None:
        fitted = scorer.calibrator.record.counts
    metrics = ServingMetrics(registry, feedback, fitted)
    verdicts = _feedback_page(feedback)
    routes = [Route("/feedback", verdicts, methods=["GET", "POST"])]
    if is_proxy:
        routes += [
            Route("/metrics", _metrics_page(registry)),
            Route("/", _question_page(scorer, example)),
        ]
    return Service(
        scorer=scorer,
        metrics=metrics,
        feedback=feedback,
        pages=Router(routes),
        paths=frozenset(route.path for route in routes),
        names=names or {},
        limits=limits,
        gate=Gate(limits),
        is_proxy=is_proxy,
    )


def _feedback_page(feedback: Feedback) -> Page:
    """Return what answers ``/feedback``: a verdict is taken, or the running error is told."""

    async def page(request: HttpRequest) -> HttpResponse:
        if request.method == "GET":
            error = await run_in_threadpool(feedback.error)
            values = {
                "verdicts": error.n,
                "ece": error.ece,
                "ece_corrected": error.corrected.estimate,
                "ece_interval": [error.corrected.low, error.corrected.high],
            }
            return JSONResponse(json_ready(values))
        try:
            verdict = _verdict(await request.body())
            confidence = feedback.judge(verdict.answer, verdict.index, verdict.correct)
        except UnknownAnswerError as error:
            words = (
                f"no answer with the id {error} and this index is remembered; the last "
                f"{MOST_ANSWERS} are"
            )
            return _refusal(404, words)
        except ValueError as error:
            words = f'{error}; send {{"id": "chatcmpl-...", "index": 0, "correct": true}}'
            return _refusal(400, words)
        counted = confidence is not None
        return JSONResponse({"confidence": confidence, "counted": counted})

    return page


@dataclass(frozen=True)
class _Verdict:
    answer: str
    index: int
    correct: bool


def _verdict(content: bytes) -> _Verdict:
    """Return the verdict in a body. Raises ValueError for anything else."""
    body = read_body(content)
    answer = body.get("id")
    index = body.get("index", 0)
    correct = body.get("correct")
    if not isinstance(answer, str):
        raise ValueError("id is not the id of an answer")
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError("index is not the number of a choice")
    if abs(index) > _LARGEST_INDEX:
        raise ValueError("index is not the number of a choice")
    if correct not in (True, False, 0, 1):
        raise ValueError("correct is neither true nor false")
    return _Verdict(answer, index, bool(correct))


def _refusal(status: int, words: str) -> HttpResponse:
    return JSONResponse(error_body(status, words), status_code=status)


def _metrics_page(registry: CollectorRegistry) -> Page:
    async def page(request: HttpRequest) -> HttpResponse:
        text = await run_in_threadpool(generate_latest, registry)
        return HttpResponse(text, media_type=_TEXT_FORMAT)

    return page


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


def _question_page(scorer: Scorer, example: str) -> Page:
    """Return what answers ``/``: a page that asks as the predictor was fitted, and offers an
    ``example`` of a question, "" for none.
    """
    asked = {**_asked_as_fitted(scorer.calibrator), "example": example}
    given = json.dumps(asked).replace("<", "\\u003c")
    html = _PAGE.read_text(encoding="utf-8").replace("{{given}}", given)

    async def page(request: HttpRequest) -> HttpResponse:
        return HTMLResponse(html)

    return page
