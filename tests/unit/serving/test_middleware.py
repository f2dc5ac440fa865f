"""The middleware inside another server, as vLLM loads it: options from the environment, metrics
among the server's own, other paths and errors of the application as they were.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client import REGISTRY, generate_latest
from starlette.applications import Starlette

from megatron_dcpo.errors import UserError
from megatron_dcpo.serving.middleware import ConfidenceMiddleware
from tests.helpers.serving import CHAT, halving
from tests.helpers.upstream import Served, Upstream, chunks_of, events_of


@pytest.fixture
def registry() -> Iterator[None]:
    """The default registry, without what a test has added."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("registry")
def test_an_application_has_confidences(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    halving().save(tmp_path / "c.npz")
    monkeypatch.setenv("DCPO_SERVE", f"--calibrator '{tmp_path / 'c.npz'}' --abstain-above 0.1")
    upstream = Upstream()
    app: Starlette = upstream.app
    app.add_middleware(ConfidenceMiddleware)
    with Served(app) as served:
        url = f"{served.url}/chat/completions"
        (choice,) = httpx2.post(url, json=CHAT).json()["choices"]
        assert choice["confidence"] == pytest.approx(0.415)
        assert choice["confidence_abstains"] is True
        streamed = httpx2.post(url, json={**CHAT, "stream": True}).content
        assert chunks_of(events_of(streamed))[-1]["choices"][0]["confidence"] is not None
        assert httpx2.get(f"{served.root}/health").text == "well"
        assert httpx2.get(f"{served.root}/metrics").status_code == 404, "the server's"
        assert b"dcpo_abstentions_total 2.0" in generate_latest(REGISTRY)
        upstream.error = (404, {"error": "no such model"})
        assert httpx2.post(url, json=CHAT).json() == {"error": "no such model"}


@pytest.mark.usefixtures("registry")
def test_wrong_options_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPO_SERVE", "--calibrator none.npz")
    with pytest.raises(UserError, match=r"none\.npz"):
        ConfidenceMiddleware(Upstream().app)
    monkeypatch.setenv("DCPO_SERVE", "--kalibrator none.npz")
    with pytest.raises(SystemExit):
        ConfidenceMiddleware(Upstream().app)


def test_serving_does_without_torch() -> None:
    """In a process of its own: the modules that an import really brings in."""
    code = (
        "import sys, megatron_dcpo.serving.middleware, megatron_dcpo.serving.proxy, "
        "megatron_dcpo.serving.server;"
        "sys.exit(','.join(m for m in ('torch', 'megatron.core', 'transformers', 'vllm') if m in "
        "sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
