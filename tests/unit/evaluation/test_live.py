"""The page that follows a run: what it is told, what is new, and that nobody else is answered."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.codec import VERSION
from megatron_dcpo.evaluation.live import live_server
from megatron_dcpo.training.recorder import token_pieces
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING
from tests.helpers.evaluated import trained
from tests.helpers.samples import bare

SAMPLE = {
    "version": VERSION,
    "training_step": 10,
    "prompt_id": "p",
    "problem": "1+1?",
    "ground_truth": "2",
    "correct": 1.0,
    "confidence": 0.8,
    "status": "ok",
    "text": "</script>0.8",
    "pieces": [["</script>", "reasoning", 0.5], ["0.8", "confidence", -0.25]],
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    trained(tmp_path / "run")
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / "step_000010.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    with live_server(tmp_path / "run", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path / "run", server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str, host: str | None = None) -> tuple[int, str, str]:
    """Status, text and tag of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.getheader("ETag") or ""


@pytest.mark.draws
def test_new_steps_are_a_new_page_and_old_ones_are_not(served: Any) -> None:
    root, port = served
    status, first, tag = get(port, "/")
    assert status == 200
    assert "step 11" in first
    assert get(port, f"/page?have={tag}")[:2] == (204, "")
    row = {
        "step": 12,
        "reward/accuracy": 0.9,
        "evaluation/mine/ece": 0.1,
        "evaluation/mine/brier": None,
    }
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + '\n{"step": 13, "rew')  # a row that is being written
    status, second, newer = get(port, f"/page?have={tag}")
    assert status == 200
    assert newer != tag
    assert "step 12" in second
    assert "mine: ECE" in second
    assert "mine: ECE" not in first


def test_rollouts_have_blocks_and_advantages(served: Any) -> None:
    page = get(served[1], "/")[1]
    for text, (block, advantage) in {
        "&lt;/script&gt;": ("reasoning", "+0.5"),
        "0.8": ("confidence", "-0.25"),
    }.items():
        assert f'title="{block}, advantage {advantage}">{text}</span>' in page


def test_the_page_loads_nothing_else(served: Any) -> None:
    status, page, _ = get(served[1], "/")
    assert status == 200
    assert not re.findall(
        r'(?:src|href)="(?!data:|#)|url\((?!#)|@import|https?://(?!www\.w3\.org/)', page
    )
    assert get(served[1], "/metrics.jsonl")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:8765"])
def test_only_names_of_this_machine_are_answered(served: Any, host: str) -> None:
    assert get(served[1], "/", host)[0] == 403
    assert get(served[1], "/", "localhost:1")[0] == 200


def test_bad_input_is_one_line(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, port = str(served[0]), str(served[1])
    for arguments, said in (
        ([str(tmp_path / "none"), "--serve"], "no such run directory"),
        ([root, "--serve", "--port", port], "give another --port"),
        ([root, "--serve", "--port", "99999"], "give another --port"),
        ([root, root, "--serve"], "shows one run, not 2"),
    ):
        assert main(["report", *arguments]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert said in lines[0]


def test_pieces_are_tokens_of_one_block_and_advantage() -> None:
    blocks = np.array([BLOCK_REASONING] * 3 + [BLOCK_CONFIDENCE] * 2, np.int8)
    advantages = np.array([0.5, 0.5, 0.25, -1 / 3, -1 / 3])
    sample = dataclasses.replace(
        bare([7], [1, 2, 3, 4, 5]), advantages=advantages, block_ids=blocks
    )

    def decode(ids: Sequence[int]) -> str:
        return "".join(map(str, ids))

    assert token_pieces(sample, decode, {}) == [
        ("12", "reasoning", 0.5),
        ("3", "reasoning", 0.25),
        ("45", "confidence", -0.3333),
    ]
    assert token_pieces(sample, decode, {1: 0.25, 4: 1.00004}) == [
        ("1", "reasoning", 0.5),
        ("2", "reasoning", 0.5, 0.25),
        ("3", "reasoning", 0.25),
        ("4", "confidence", -0.3333),
        ("5", "confidence", -0.3333, 1.0),
    ]
