"""``dcpo train`` and ``dcpo evaluate`` on vLLM: in process, over two ranks, behind a server that is
killed. Needs vLLM.

The figures of the whole quickstart are compared in ``test_quickstart.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launch import launched, worker
from tests.helpers.paths import REPOSITORY
from tests.helpers.quickstart import SMALL
from tests.helpers.vllm import HELDOUT, POLICY, Server, at_length, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]

CONFIG = REPOSITORY / "examples" / "quickstart" / "dcpo.yaml"
ENGINE = [
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_memory_bytes=67108864",
    "training.steps=3",
    *SMALL,
]


def start(run_dir: Path, *overrides: str, processes: int = 1) -> subprocess.Popen[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
    return subprocess.Popen(
        [
            *launcher,
            "-m",
            "megatron_dcpo",
            "train",
            "--config",
            str(CONFIG),
            f"run_dir={run_dir}",
            *overrides,
        ],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def train(run_dir: Path, *overrides: str, processes: int = 1) -> list[dict[str, float]]:
    process = start(run_dir, *overrides, processes=processes)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said[-4000:]
    return metrics(run_dir)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("alone") / "run", *ENGINE)


def test_training_on_vllm(alone: list[dict[str, float]]) -> None:
    assert [record["step"] for record in alone] == [1, 2, 3]
    assert all(record["engine/logprob_diff_max"] <= 1e-4 for record in alone)
    assert all(record["reshard/bytes"] == record["reshard/bytes_min"] == 0 for record in alone)


@at_length
def test_training_of_experts_on_vllm(tmp_path: Path) -> None:
    """EP 2 over two ranks, which are one engine."""
    options = [
        f"model.path={POLICY.parent / 'moe' / 'policy'}",
        "rollout.tensor_model_parallel_size=2",
    ]
    options += ["parallel.expert_model_parallel_size=2", "parallel.use_distributed_optimizer=true"]
    records = train(tmp_path / "run", *ENGINE, *options, processes=2)
    assert len(records) == 3
    for record in records:
        assert record["engine/logprob_diff_max"] <= 1e-4
        assert record["engine/routing_mismatch"] == 0 < record["grad_norm/total"]
        assert record["reshard/bytes"] == record["reshard/bytes_min"] > 0


@at_length
@pytest.mark.parametrize("processes", [1, 2])
def test_validation_changes_nothing_of_the_run(alone, tmp_path: Path, processes: int) -> None:
    """By the run's engine, of one rank or of two: the same validation, and the training that there
    is without one.
    """
    options = [f"evaluation.benchmarks={HELDOUT}", "evaluation.interval=1", "evaluation.limit=8"]
    size = [f"{key}.tensor_model_parallel_size={processes}" for key in ("parallel", "rollout")]
    rows = train(tmp_path / "run", *ENGINE, *options, *size, processes=processes)
    validated = [row["evaluation/heldout/accuracy"] for row in rows]
    assert len(validated) == 4
    assert len(set(validated)) > 1
    for ours, single in zip(rows[1:], alone, strict=True):
        assert ours["reward/accuracy"] == single["reward/accuracy"]
        assert ours["loss/policy"] == pytest.approx(
            single["loss/policy"], abs=0 if processes == 1 else 1e-4
        )


@at_length
@pytest.mark.parametrize(
    "option",
    ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", "seed=1"],
)
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_two_ranks_sample_the_same(alone, tmp_path: Path, option: str, engine_tp: int) -> None:
    """Seeds are counted per sample: neither the layout nor the engine's ranks change what is
    trained on.
    """
    records = train(
        tmp_path / "run",
        *ENGINE,
        option,
        f"rollout.tensor_model_parallel_size={engine_tp}",
        processes=2,
    )
    for ours, single in zip(records, alone, strict=True):
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["reshard/bytes"] == ours["reshard/bytes_min"]
        assert ours["reward/accuracy"] == single["reward/accuracy"]
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-4)
        assert ours["grad_norm/total"] == pytest.approx(single["grad_norm/total"], rel=1e-3)


@at_length
def test_one_rank_of_an_engine_fails_alone(alone, tmp_path: Path) -> None:
    """The other waits for it in a collective of vLLM's. Both end, by name, and the run continues as
    if nothing had been.
    """
    options = [
        *ENGINE,
        "rollout.tensor_model_parallel_size=2",
        "training.save_interval=1",
        "--resume",
        "auto",
    ]
    run_dir = tmp_path / "run"
    started = time.monotonic()
    arguments = ["train", "--config", str(CONFIG), f"run_dir={run_dir}", *options]
    done = launched(
        2, worker(tmp_path / "out", ("failing_rank", {"arguments": arguments})), timeout=900
    )
    print(f"ended after {time.monotonic() - started:.0f} s")
    assert done.returncode != 0
    for rank in (0, 1):
        assert (
            f"dcpo: rank {rank} ends: the engine of ranks 0-1 failed on rank 1 alone: "
            in done.stderr
        )
    assert "out of memory, on this rank alone; rank(s) 0 cannot go on without it" in done.stderr
    assert len(metrics(run_dir)) == 1
    records = train(run_dir, *options, processes=2)
    for ours, single in zip(records, alone, strict=True):
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["reward/accuracy"] == single["reward/accuracy"]


@at_length
@pytest.mark.parametrize("mode", ["generate", "update"])
def test_one_engine_of_two_fails_and_both_start_anew(alone, tmp_path: Path, mode: str) -> None:
    """vLLM's start waits for every rank of the job where it measures memory: an engine alone would
    wait for ever.
    """
    arguments = ["train", "--config", str(CONFIG), f"run_dir={tmp_path / 'run'}", *ENGINE]
    arguments += ["parallel.distributed_timeout_minutes=3"]
    job = ("failing_vllm", {"mode": mode, "arguments": arguments})
    done = launched(2, worker(tmp_path / "out", job), timeout=900)
    assert done.stdout.count("restarted 1") == 2, done.stderr[-4000:]
    assert "this engine alone" in done.stderr
    assert "every engine is restarted" in done.stderr
    for ours, single in zip(metrics(tmp_path / "run"), alone, strict=True):
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["reward/accuracy"] == single["reward/accuracy"]


@at_length
def test_a_server_that_is_killed_comes_back(alone, tmp_path: Path) -> None:
    """Weights through files into ``vllm serve``; it dies in a rollout, is started again, and the
    run goes on as before.
    """
    server = Server(
        tmp_path / "serve.log", "--logprobs-mode", "processed_logprobs", VLLM_SERVER_DEV_MODE="1"
    )
    server.start()
    try:
        options = [*ENGINE, "rollout.engine=server", f"rollout.endpoint={server.url}"]
        run = start(tmp_path / "run", *options)
        deadline = time.monotonic() + 300
        while len(metrics(tmp_path / "run")) < 1:
            assert run.poll() is None, run.communicate()[1][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.kill()
        server.start()
        _, said = run.communicate(timeout=600)
        assert run.returncode == 0, said[-4000:]
        assert "every engine is restarted" in said
    finally:
        server.kill()
    records = metrics(tmp_path / "run")
    for ours, single in zip(records, alone, strict=True):
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["reward/accuracy"] == single["reward/accuracy"], (
            "the same seeds, the same responses"
        )
    left = sorted(path.name for path in (tmp_path / "run" / "engine_weights").iterdir())
    assert left == ["version_3"]


@at_length
def test_a_server_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path / "serve.log")
    server.start()
    try:
        run = start(
            tmp_path / "run", *ENGINE, "rollout.engine=server", f"rollout.endpoint={server.url}"
        )
        _, said = run.communicate(timeout=300)
        assert run.returncode == 2
        assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in said
    finally:
        server.kill()


@at_length
def test_a_signal_ends_the_rollout_in_order(tmp_path: Path) -> None:
    run = start(tmp_path / "run", *ENGINE, "training.steps=500")
    deadline = time.monotonic() + 300
    while len(metrics(tmp_path / "run")) < 2:
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=120)
    assert run.returncode not in (0, -signal.SIGTERM), said[-2000:]
    done = int((tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert len(metrics(tmp_path / "run")) == done


@at_length
def test_evaluation_is_the_same_on_both_engines(tmp_path: Path) -> None:
    """With ``--top-k 1`` both say the same; raw log-probs and entropies agree."""
    from megatron_dcpo.evaluation.samples import read_samples

    found = {}
    for engine in ("vllm", "transformers"):
        out = tmp_path / engine
        arguments = [
            "evaluate",
            "--model",
            str(POLICY),
            "--engine",
            engine,
            "--benchmarks",
            HELDOUT,
            "--out",
            str(out),
        ]
        arguments += [
            "--template",
            "raw",
            "--max-tokens",
            "32",
            "--repeats",
            "1",
            "--top-k",
            "1",
            "--resamples",
            "0",
        ]
        arguments += ["--limit", "20", "--confidence", "verbal,token,token_entropy"]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_dcpo", *arguments],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
        )
        assert done.returncode == 0, done.stderr[-3000:].decode()
        found[engine] = {s.prompt.prompt_id: s for s in read_samples(out / "samples.jsonl")}
    for name, ours in found["transformers"].items():
        other = found["vllm"][name]
        assert (other.response.text, other.judgement.length) == (
            ours.response.text,
            ours.judgement.length,
        )
        assert other.token_confidence == pytest.approx(ours.token_confidence, abs=1e-4)
        assert other.mean_entropy == pytest.approx(ours.mean_entropy, abs=1e-3)
