"""A proxy of ``dcpo serve`` in front of a stand-in, in threads of the tests' process, and
predictors for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import numpy as np
from prometheus_client import CollectorRegistry

from megatron_dcpo.data.prompts import confidence_instruction
from megatron_dcpo.evaluation.fit_record import FitRecord, FittedOn, instruction
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from megatron_dcpo.serving.calibrator import Calibrator
from megatron_dcpo.serving.middleware import Service, service_of
from megatron_dcpo.serving.proxy import proxy_app
from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.upstream import Served, Upstream

FITTED_ON = FittedOn(
    models=("policy",),
    templates=("paper",),
    instructions=(instruction("paper", "<conf>", "math"),),
    temperatures=(1.0,),
    top_ps=(1.0,),
    top_ks=(0,),
    markers=("<conf>",),
    forms=("math",),
)
QUESTION = confidence_instruction("2*3=")
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}]}
COMPLETION: dict[str, Any] = {"model": "policy", "prompt": QUESTION}


def record(fitted_on: FittedOn | None = FITTED_ON) -> FitRecord:
    """Of 100 held-out answers those above .5 are right."""
    confidences = np.arange(100) / 100
    return FitRecord(
        fitted_on=fitted_on,
        held_out_confidences=confidences,
        held_out_correct=(confidences >= 0.5).astype(float),
        counts=np.full(20, 5),
    )


def logistic(fitted_on: FittedOn | None = FITTED_ON) -> Posthoc:
    """Reads log-probs and what is stated."""
    weights = {
        "mean": np.zeros(6),
        "deviation": np.ones(6),
        "slopes": np.array([0.1, 0.5, 0.2, -0.1, 0.3, -0.01]),
        "intercept": np.array(0.3),
    }
    return Posthoc("logistic", "response", weights, record(fitted_on))


def halving(fitted_on: FittedOn | None = FITTED_ON) -> Posthoc:
    """Half of what is stated; reads no log-probs."""
    weights = {"x": np.array([0.0, 1.0]), "y": np.array([0.0, 0.5])}
    return Posthoc("isotonic", "verbal", weights, record(fitted_on))


def by_turn(fitted_on: FittedOn | None = FITTED_ON) -> Posthoc:
    """At turn 1 the number itself; from turn 2 on sigmoid(1.5 logit - 1)."""
    weights = {
        "mean": np.zeros(1),
        "deviation": np.ones(1),
        "slopes": np.ones(1),
        "intercept": np.array(0.0),
        "tasks": np.array(["1", "2"]),
        "task_intercepts": np.array([0.0, -1.0]),
        "task_slopes": np.array([0.0, 0.5]),
    }
    return Posthoc("logistic", "turns", weights, record(fitted_on))


def second_curve(confidence: float) -> float:
    """What :func:`by_turn` makes of a number from turn 2 on."""
    logit = np.log(confidence / (1 - confidence))
    return float(1 / (1 + np.exp(1 - 1.5 * logit)))


def scorer_with(predictor: Posthoc, **options: Any) -> Scorer:
    assert predictor.record is not None
    calibrator = Calibrator(predictor, predictor.record.fitted_on)
    return replace(Scorer(calibrator), **options)


@dataclass
class Proxied:
    """What a test asks, and the two that answer."""

    upstream: Upstream
    service: Service
    at: Served
    behind: Served

    def post(self, body: Any, path: str = "") -> httpx2.Response:
        if not path:
            path = "/chat/completions" if "messages" in body else "/completions"
        return httpx2.post(self.at.url + path, json=body, timeout=30)

    def choice(self, body: Any) -> dict[str, Any]:
        reply = self.post(body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["choices"][0])


@contextmanager
def proxied(scorer: Scorer, upstream: Upstream | None = None, **names: Any) -> Iterator[Proxied]:
    upstream = upstream or Upstream()
    with Served(upstream.app) as behind:
        registry = CollectorRegistry()
        service = service_of(scorer, registry, **names)
        with Served(proxy_app(behind.url, service, registry)) as at:
            yield Proxied(upstream, service, at, behind)
