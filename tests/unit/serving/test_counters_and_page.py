"""``/metrics`` counts what was served and notices a drift; the page asks as the fit did."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import httpx2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_dcpo.serving.counters import drift_of
from tests.helpers.serving import CHAT, Proxied, halving, proxied, scorer_with


def values(proxy: Proxied) -> dict[str, float]:
    """Every sample of ``/metrics``, without those of when it began."""
    reply = httpx2.get(f"{proxy.at.root}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = "".join(f" {name}" for name in sample.labels.values())
            found[sample.name + labels] = sample.value
    return found


def test_metrics_count_requests_confidences_and_reasons() -> None:
    with proxied(scorer_with(halving())) as proxy:
        for _ in range(3):
            proxy.choice({**CHAT, "n": 2})
        proxy.upstream.says = lambda body, index: "no tag"
        proxy.choice(CHAT)
        proxy.upstream.error = (429, {})
        proxy.post(CHAT)
        found = values(proxy)
        path = "/v1/chat/completions"
        assert found[f"dcpo_requests_total {path} 200"] == 4
        assert found[f"dcpo_requests_total {path} 429"] == 1
        assert found[f"dcpo_request_seconds_count {path}"] == 5
        assert found["dcpo_confidence_bucket 0.4"] == 0
        assert found["dcpo_confidence_bucket 0.45"] == 6
        assert found["dcpo_confidence_missing_total missing"] == 1
        # all of six confidences in (.4, .45], where the fit has 40 % at most .4
        assert found["dcpo_confidence_drift"] == pytest.approx(0.55)
        assert found["dcpo_confidence_drift_limit"] == pytest.approx(
            1.358 * math.sqrt(106 / 600), rel=1e-6
        )


def test_drift_is_that_of_the_cumulative_shares() -> None:
    fitted = np.zeros(20, int)
    fitted[0] = 100
    assert drift_of(fitted, [0.01] * 50)[0] == 0
    assert drift_of(fitted, [0.01, 0.99])[0] == pytest.approx(0.5)
    assert drift_of(fitted, [0.99])[0] == 1
    assert math.isnan(drift_of(fitted, [])[0])
    generator = np.random.default_rng(0)
    even = np.full(20, 50)
    beyond = []
    for _ in range(300):
        drift, limit = drift_of(even, generator.random(200).tolist())
        beyond.append(drift > limit)
    assert np.mean(beyond) < 0.07, "the limit is rarely passed without a drift"


def test_the_page_asks_as_the_predictor_was_fitted() -> None:
    with proxied(scorer_with(halving())) as proxy:
        page = httpx2.get(f"{proxy.at.root}/")
        assert page.headers["content-type"].startswith("text/html")
        given = re.search(r"const given = (\{.*\});", page.text)
        assert given is not None
        assert '"api": "chat"' in given[1]
        assert "Please reason step by step" in given[1]
        assert "<conf>" not in given[1], "no tag of HTML"
        assert json.loads(given[1])["kinds"] == []
        assert page.text.count("fit") > 1, "it says what the number means"


def test_the_page_offers_the_kinds_that_were_fitted() -> None:
    weights = {"tasks": np.array(["sum", "pro</script>duct"])}
    of_tasks = replace(halving(), source="task", weights=weights)
    with proxied(scorer_with(of_tasks)) as proxy:
        text = httpx2.get(f"{proxy.at.root}/").text
    assert "pro</script>" not in text
    given = re.search(r"const given = (\{.*\});", text)
    assert given is not None
    asked = json.loads(given[1])
    assert asked["kinds"] == ["sum", "pro</script>duct"]
    assert asked["column"] == "kind"
