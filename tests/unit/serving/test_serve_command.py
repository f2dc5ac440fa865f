"""``dcpo serve``: what it refuses in one line, and the real command between curl's kind of request
and an upstream.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from megatron_dcpo.cli import main
from tests.helpers.serving import CHAT, FITTED_ON, halving
from tests.helpers.upstream import Served, Upstream


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--endpoint", "http://127.0.0.1:1/v1"], "no server accepts connections"),
        (["--endpoint", "{url}/chat/completions"], "address of a request"),
        (["--endpoint", "{root}"], "--endpoint {url}"),
        (["--endpoint", "{url}", "--calibrator", "none.npz"], "none.npz"),
        (["--endpoint", "{url}", "--calibrator", "other.npz"], "other model"),
        (["--endpoint", "{url}", "--calibrator", "old.npz"], "--accept-mismatch"),
        (["--endpoint", "{url}", "--accept-mismatch"], "--calibrator"),
        (["--endpoint", "{url}", "--abstain-above", "0.1"], "--calibrator"),
        (["--endpoint", "{url}", "--abstain-text", "x"], "--abstain-above"),
        (["--endpoint", "{url}", "--calibrator", "c.npz", "--marker", "<x>"], "<conf>"),
        (["--endpoint", "{url}", "--port", "70000"], "--port"),
        (["--endpoint", "{url}", "--port", "{port}"], "choose another one"),
        (["--endpoint", "{url}", "--host", "no.such.host.invalid", "--allow-anyone"], "--host"),
        (["--endpoint", "{url}", "--host", "0.0.0.0"], "--allow-anyone"),
        (["--endpoint", "{url}", "--host", "::"], "--api-key-file"),
        (["--endpoint", "{url}", "--api-key-file", "none"], "--api-key-file none"),
    ],
)
def test_it_refuses_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    halving().save("c.npz")
    halving(replace(FITTED_ON, models=("other model",))).save("other.npz")
    replace(halving(), record=None).save("old.npz")
    with Served(Upstream().app) as served:
        places = {"url": served.url, "root": served.root, "port": served.port}
        words = [option.format(**places) for option in options]
        assert main(["serve", *words]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("dcpo serve: error:")
        assert named.format(**places) in line


def test_no_line_has_the_password_of_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("/v1", "", "/v1/models"):
        assert main(["serve", "--endpoint", f"http://user:passw0rd@127.0.0.1:1{path}"]) == 2
        said = capsys.readouterr()
        assert "passw0rd" not in said.err + said.out


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_is_printed_can_be_opened(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(server: object, sockets: list[socket.socket]) -> None:
        url = httpx2.URL(capsys.readouterr().out.split()[0])
        socket.create_connection((url.host, url.port)).close()
        sockets[0].close()

    monkeypatch.setattr("megatron_dcpo.serving.server.QuietServer.run", run)
    with Served(Upstream().app) as upstream:
        assert main(["serve", "--endpoint", upstream.url, "--host", host, "--port", "0"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(tmp_path: Path, number: int) -> None:
    halving().save(tmp_path / "c.npz")
    with Served(Upstream().app) as upstream:
        endpoint = upstream.url.replace("//", "//user:passw0rd@")
        options = ["--endpoint", endpoint, "--calibrator", str(tmp_path / "c.npz")]
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dcpo", "serve", *options, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "passw0rd" not in line
        url = line.split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
        reply = httpx2.post(f"{url}/chat/completions", json=CHAT)
        assert reply.json()["choices"][0]["confidence"] == pytest.approx(0.415)
        assert reply.headers.get_list("server") == ["uvicorn"], "the upstream's alone"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in out + err
        with socket.socket() as free:
            free.bind(("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/v1"))))
