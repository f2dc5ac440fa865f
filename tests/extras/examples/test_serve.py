"""``make serve``: the quickstart's policy, its fitted confidence and ``dcpo serve``, asked as by
curl, and the page in headless Chromium (``make test-browser``).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.helpers.paths import REPOSITORY
from tools.pictures import CHROMIUM

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the proxy; in the end Ctrl-C, after which nothing is left."""
    out = tmp_path_factory.mktemp("serve")
    port, upstream = free_port(), free_port()
    command = [sys.executable, "examples/serve/run.py", "--out", str(out / "run")]
    sizes = ["--problems", "60", "--port", str(port), "--upstream-port", str(upstream)]
    log = out / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *sizes],
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    deadline = time.monotonic() + 240
    while "passes requests on" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) in (0, 130)
    assert "Traceback" not in log.read_text()
    for one in (port, upstream):
        with socket.socket() as closed:
            assert closed.connect_ex(("127.0.0.1", one)) != 0


def test_answers_have_confidences_that_know_easy_from_hard(served: str) -> None:
    def mean(prompt: str) -> float:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 32, "n": 8}
        reply = httpx2.post(f"{served}/v1/completions", json=body, timeout=60)
        confidences = []
        for choice in reply.json()["choices"]:
            assert choice["confidence_reason"] is None
            assert "<conf>" not in choice["text"]
            assert choice["logprobs"] is None
            confidences.append(choice["confidence"])
        return sum(confidences) / len(confidences)

    assert mean("3*4=") > mean("941*72=") + 0.2
    metrics = httpx2.get(f"{served}/metrics").text
    assert re.search(r"dcpo_confidence_count 16\.0", metrics)
    body = {"model": "policy", "prompt": "3*4=", "temperature": 0.1, "max_tokens": 32}
    (choice,) = httpx2.post(f"{served}/v1/completions", json=body).json()["choices"]
    assert choice["confidence"] is None
    assert "temperature" in choice["confidence_reason"]


def test_the_page_shows_question_answer_and_confidence(served: str, tmp_path: Path) -> None:
    if not os.environ.get("DCPO_TEST_BROWSER") or CHROMIUM is None:
        pytest.skip("make test-browser runs this; it needs chromium")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"{served}/?q=3*4=",
    ]
    page = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    assert re.search(r'id="answer">[^<]*\\boxed\{\d+\}\s*</div>', page)
    assert re.search(r'id="confidence">\d+ %</span>', page)
    assert re.search(r'id="about">logistic of response · before calibration 0\.', page)
