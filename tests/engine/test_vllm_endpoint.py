"""A real ``vllm serve`` of the quickstart policy, evaluated through ``--endpoint``.

Needs vLLM: in this environment, or in another whose Python ``DCPO_VLLM`` names. The server is
started by its module, which is what ``vllm serve`` runs: the console script of the CPU build asks
for the metadata of a package named vllm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.samples import Sample, read_samples
from tests.helpers.paths import REPOSITORY
from tests.helpers.vllm import HELDOUT, POLICY, PYTHON, Server

pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="vLLM is not installed; set DCPO_VLLM to the Python of an environment that has it",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("vllm") / "serve.log")
    made.start()
    yield made
    made.kill()


def command(source: list[str], out: Path, *more: str) -> list[str]:
    fixed = [
        "--benchmarks",
        HELDOUT,
        "--template",
        "raw",
        "--max-tokens",
        "32",
        "--repeats",
        "4",
        "--resamples",
        "0",
    ]
    return ["evaluate", *source, *fixed, "--out", str(out), *more]


def by_name(path: Path) -> dict[tuple[str, int], Sample]:
    return {
        (sample.prompt.prompt_id, sample.response.sample_index): sample
        for sample in read_samples(path / "samples.jsonl")
    }


@pytest.mark.timeout(1200)
def test_killed_in_the_middle_and_restarted(server: Server, tmp_path: Path) -> None:
    out, limit = (tmp_path / "run", ["--limit", "60", "--concurrency", "4", "--attempts", "40"])
    arguments = command(["--endpoint", server.url], out, *limit)
    client = subprocess.Popen([sys.executable, "-m", "megatron_dcpo", *arguments], cwd=REPOSITORY)
    samples = out / "samples.jsonl"

    def written() -> list[str]:
        return samples.read_text().splitlines(keepends=True) if samples.exists() else []

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 300
        while len(written()) < count:
            assert client.poll() is None, "the client ended early"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    wait_for(30)
    server.kill()  # the client waits for it to come back
    assert client.poll() is None
    server.start()
    wait_for(len(written()) + 10)
    client.kill()
    client.wait()
    before = [line for line in written() if line.endswith("\n")]
    assert 40 <= len(before) < 240
    assert main(arguments) == 0
    found = [json.loads(line) for line in written()]
    assert len(found) == len({(row["prompt_id"], row["sample_index"]) for row in found}) == 240
    after = {(row["prompt_id"], row["sample_index"]): row["text"] for row in found}
    for row in map(json.loads, before):
        assert after[row["prompt_id"], row["sample_index"]] == row["text"]


@pytest.mark.timeout(600)
def test_same_samples_as_the_embedded_engine(server: Server, tmp_path: Path) -> None:
    """With ``--top-k 1`` both engines say the same, and their raw log-probs agree."""
    options = [
        "--limit",
        "20",
        "--repeats",
        "1",
        "--top-k",
        "1",
        "--confidence",
        "verbal,token,token_entropy",
    ]
    assert main(command(["--endpoint", server.url], tmp_path / "vllm", *options)) == 0
    assert (
        main(
            command(
                ["--model", str(POLICY), "--engine", "transformers"], tmp_path / "here", *options
            )
        )
        == 0
    )
    theirs, ours = by_name(tmp_path / "vllm"), by_name(tmp_path / "here")
    assert theirs.keys() == ours.keys()
    for name, sample in ours.items():
        other = theirs[name]
        assert (other.response.text, other.judgement.length, other.correct) == (
            sample.response.text,
            sample.judgement.length,
            sample.correct,
        )
        assert other.measures.token_confidence == pytest.approx(
            sample.measures.token_confidence, abs=1e-4
        )
        assert other.measures.min_logprob == pytest.approx(sample.measures.min_logprob, abs=1e-3)
        assert other.measures.mean_entropy == pytest.approx(sample.measures.mean_entropy, abs=1e-3)
