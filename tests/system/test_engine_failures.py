"""An engine that fails is started anew and the run goes on as if nothing had been; what cannot be
mended is named.
"""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launch import alone, forked, worker
from tests.helpers.quickstart import metrics, without_clocks

SMALL = ["data.prompts_per_step=4", "rollout.group_size=4", "training.steps=3", "logging.to=[]"]


def train(run_dir, mode, *overrides):
    options = {"mode": mode, "overrides": [f"run_dir={run_dir}", *SMALL, *overrides]}
    return alone("failing_engine", run_dir.parent / "out", options)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("good") / "run"
    done = train(run_dir, "none")
    assert done.returncode == 0, done.stderr[-2000:]
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run):
    return metrics(undisturbed_run)


def test_the_order_of_finishing_changes_nothing(tmp_path, undisturbed_run):
    """One by one, in a random order: the same samples, metrics and weights."""
    done = train(tmp_path / "run", "shuffled")
    assert done.returncode == 0, done.stderr[-2000:]
    assert without_clocks(metrics(tmp_path / "run")) == without_clocks(metrics(undisturbed_run))
    for name in (
        "samples/step_000001.jsonl",
        "samples/step_000003.jsonl",
        "policy/model.safetensors",
    ):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed_run / name).read_bytes(), name


@pytest.mark.parametrize(
    ("mode", "reason"), [("generate", "killed in generation"), ("update", "lost in the middle")]
)
def test_the_run_continues_after_a_restart(tmp_path, undisturbed, mode, reason):
    """The weights are handed over again and the same responses sampled: every number is that of the
    undisturbed run.
    """
    done = train(tmp_path / "run", mode)
    assert done.returncode == 0, done.stderr[-2000:]
    assert reason in done.stderr
    assert "is restarted" in done.stderr
    assert "restarted 1 updated 5" in done.stdout
    assert without_clocks(metrics(tmp_path / "run")) == without_clocks(undisturbed)


def test_a_batch_whose_engine_failed_midway_is_the_undisturbed_one(tmp_path, undisturbed):
    """Some responses were handed over before: all are generated again, in the same batches, so that
    every number is that of the undisturbed run.
    """
    done = train(tmp_path / "run", "midway")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "is restarted" in done.stderr
    requested, handed_over = re.search(r"asked \[(.*)\] handed over (\d+)", done.stdout).groups()
    assert 0 < int(handed_over) < 16
    assert [int(n) for n in requested.split(", ")] == [16, 16, 16, 16]
    assert without_clocks(metrics(tmp_path / "run")) == without_clocks(undisturbed)


@pytest.mark.parametrize(
    ("mode", "reason"), [("generate", "killed in generation"), ("update", "lost in the middle")]
)
def test_one_engine_of_two_fails_and_both_start_anew(tmp_path, undisturbed, mode, reason):
    """A restart is a collective of all engines here, as vLLM's is: one that restarts alone would
    wait for ever.
    """
    overrides = [f"run_dir={tmp_path / 'run'}", *SMALL, "parallel.distributed_timeout_minutes=1"]
    arguments = worker(
        tmp_path / "out", ("failing_engine", {"mode": mode, "overrides": overrides})
    )[2:]
    done = forked(2, arguments, timeout=300)
    assert "restarted 1 updated 5" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("restarted 1 updated 5") == 2
    assert f"rank 1: {reason}" in done.stderr
    for ours, single in zip(metrics(tmp_path / "run"), undisturbed, strict=True):
        assert ours["reward/accuracy"] == single["reward/accuracy"]
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("device", "CUDA error: an illegal memory access was encountered"),
        # vLLM's and Transformer Engine's, which tests/unit/runtime/test_device.py knows
        pytest.param(
            "device",
            "CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:245",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "device",
            "x.cu:9 in function f: cuBLAS Error: the GPU program failed to execute",
            marks=pytest.mark.full,
        ),
        (
            "wake",
            "vLLM could not wake up its kv_cache: RuntimeError: CUDA Error: out of memory at ...",
        ),
    ],
)
def test_a_device_that_fails_ends_the_job(tmp_path, undisturbed, mode, message):
    """An error of the CUDA context, or memory that does not come back, leaves neither engine nor
    policy: 98, for whoever starts it again, which goes on as if nothing had been.
    """
    saving = "training.save_interval=1"
    options = {
        "mode": mode,
        "message": message,
        "overrides": [f"run_dir={tmp_path / 'run'}", *SMALL, saving],
    }
    done = alone("failing_engine", tmp_path / "out", options)
    assert done.returncode == 98, done.stderr[-2000:]
    assert f"the device of rank 0 failed ({message})" in done.stderr
    assert "is restarted" not in done.stderr
    assert len(metrics(tmp_path / "run")) == 1
    done = train(tmp_path / "run", "none", saving, "training.resume=auto")
    assert done.returncode == 0, done.stderr[-2000:]
    resumed = without_clocks(metrics(tmp_path / "run"))
    assert [record["step"] for record in resumed] == [1, 2, 3][-len(resumed) :]
    for ours, single in zip(resumed[::-1], without_clocks(undisturbed)[::-1], strict=False):
        assert {name: ours[name] for name in single} == single


def test_an_engine_that_keeps_failing_ends_the_run_by_name(tmp_path):
    done = train(tmp_path / "run", "always")
    assert done.returncode == 2
    assert "an engine failed 3 times with a rollout: rank 0: killed in generation" in done.stderr


def test_stale_samples_are_not_trained_on(tmp_path):
    done = train(tmp_path / "run", "stale")
    assert done.returncode == 2
    assert "was sampled by weights version 0" in done.stderr
    assert len(metrics(tmp_path / "run")) == 1


def test_not_finite_weights_never_reach_the_engine(tmp_path):
    done = train(tmp_path / "run", "nan")
    assert done.returncode == 2
    assert "after step 2 model.layers.1.mlp.down_proj.weight on rank 0 is not finite" in done.stderr
    assert "updated 2" in done.stdout


def test_alarm_threshold(tmp_path, undisturbed):
    """A warning changes nothing."""
    done = train(tmp_path / "warn", "none", "rollout.logprob_diff_alarm=1e-12")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differ by up to" in done.stderr
    assert without_clocks(metrics(tmp_path / "warn")) == without_clocks(undisturbed)


def test_a_corrupted_bucket_raises_the_alarm(tmp_path):
    """The first update is right; after the second the engine is not the trainer, which the next
    step finds out.
    """
    done = train(tmp_path / "run", "corrupt", "rollout.logprob_diff_alarm=1e-3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 1: engine and trainer differ" not in done.stderr
    assert "step 2: engine and trainer differ" in done.stderr


def test_a_slow_synchronization_is_reported(tmp_path, undisturbed):
    done = train(tmp_path / "run", "slow")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reshard of step 1 has taken" in done.stderr
    assert without_clocks(metrics(tmp_path / "run")) == without_clocks(undisturbed)


def test_truncated_sampling_wants_a_correction(tmp_path):
    done = train(tmp_path / "run", "none", "rollout.top_p=0.9")
    assert done.returncode == 2
    assert "correct for it with objective.tis_level" in done.stderr
    done = train(
        tmp_path / "run",
        "none",
        "rollout.top_p=0.9",
        "objective.tis_level=token",
        "training.steps=1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = metrics(tmp_path / "run")
    assert record["tis_weight"] < 1  # the engine's distribution is sharper


def test_ledger_and_histogram(tmp_path, undisturbed):
    done = train(tmp_path / "run", "none", "training.offload_optimizer_during_rollout=true")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no device to offload from" in done.stderr
    for record in metrics(tmp_path / "run"):
        assert all(
            record[f"memory/{phase}/rss"] > 0.01
            for phase in ("rollout", "judge", "train", "reshard")
        )
    mismatch = [
        json.loads(line)
        for line in Path(tmp_path, "run", "mismatch.jsonl").read_text().splitlines()
    ]
    for row, record in zip(mismatch, undisturbed, strict=True):
        tokens = sum(row["reasoning"]) + sum(row["confidence"])
        assert tokens == pytest.approx(16 * record["length/mean"])
        for block in ("reasoning", "confidence"):
            assert len(row[block]) == len(row["edges"]) + 1
            largest = max(i for i, count in enumerate(row[block]) if count)
            low = row["edges"][largest - 1] if largest else 0.0
            assert low <= record[f"engine/logprob_diff_max_{block}"] < row["edges"][largest]
    assert {record["reshard/bytes"] for record in undisturbed} == {0}
