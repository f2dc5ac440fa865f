"""The middleware inside a real ``vllm serve``: choices have confidences, whole and streamed alike,
and vLLM's own ``/metrics`` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from tests.helpers.paths import REPOSITORY
from tests.helpers.serving import FITTED_ON, logistic
from tests.helpers.upstream import events_of
from tests.helpers.vllm import PYTHON, Server

pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="vLLM is not installed; set DCPO_VLLM to the Python of an environment that has it",
)
BODY = {
    "model": "policy",
    "prompt": "58*2=",
    "max_tokens": 32,
    "seed": 1,
    # two requests are sampled alike only without chance
    "top_k": 1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vllm")
    fitted_on = replace(FITTED_ON, templates=("raw",), instructions=((),), top_ks=(0, 1))
    logistic(fitted_on).save(directory / "confidence.npz")
    middleware = "megatron_dcpo.serving.middleware.ConfidenceMiddleware"
    made = Server(
        directory / "serve.log",
        "--middleware",
        middleware,
        PYTHONPATH=str(REPOSITORY),
        DCPO_SERVE=f"--calibrator {directory / 'confidence.npz'}",
    )
    made.start()
    yield made
    made.kill()


@pytest.mark.timeout(600)
def test_choices_have_confidences(server: Server) -> None:
    url = f"{server.url}/completions"
    (choice,) = httpx2.post(url, json=BODY, timeout=120).json()["choices"]
    assert choice["confidence_reason"] is None
    assert 0 < choice["confidence"] < 1
    assert 0 <= choice["confidence_raw"] <= 1
    assert "<conf>" not in choice["text"]
    assert choice["logprobs"] is None
    reply = httpx2.post(url, json={**BODY, "stream": True}, timeout=120)
    events = events_of(reply.content)
    assert events[-1] == b"data: [DONE]"
    last = events[-2]["choices"][0]
    assert last["confidence"] == pytest.approx(choice["confidence"], abs=1e-4)
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == choice["text"]
    other = {**BODY, "temperature": 0.5}
    (refused,) = httpx2.post(url, json=other, timeout=120).json()["choices"]
    assert refused["confidence"] is None
    assert "temperature" in refused["confidence_reason"]


@pytest.mark.timeout(600)
def test_the_servers_own_pages_stay(server: Server) -> None:
    root = server.url.removesuffix("/v1")
    assert httpx2.get(f"{root}/health", timeout=60).status_code == 200
    page = httpx2.get(f"{root}/metrics", timeout=60).text
    assert "vllm:" in page
    assert "dcpo_confidence_count" in page
    wrong = httpx2.post(f"{server.url}/completions", json={"model": "none"}, timeout=60)
    assert wrong.status_code >= 400
    assert "confidence" not in wrong.text
