"""Checkpoints through the command line: damaged, torn, on a full disk, in the background, at
another layout.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron_dcpo.checkpoints.manifest import MANIFEST, digest, latest_iteration
from tests.helpers import warm
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import FEW_PROBLEMS, metrics, run
from tests.helpers.resumed import assert_same_end, checkpoint_of, contents

SMALL = (
    FEW_PROBLEMS,
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "training.micro_batch_size=8",
    "logging.to=[]",
)
COMMON = (
    "train",
    "--config",
    QUICKSTART / "dcpo.yaml",
    "--resume",
    "auto",
    *SMALL,
    "logging.samples_interval=0",
)
KILLS = int(os.environ.get("DCPO_KILLS", "2"))


def train(run_dir, *overrides, processes=1, status=0):
    done = run(
        *COMMON, f"run_dir={run_dir}", "training.save_interval=1", *overrides, processes=processes
    )
    assert done.returncode == status, done.stderr[-3000:]
    assert status or "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train(run_dir, "training.steps=4", "training.keep_checkpoints=3")
    return run_dir


@pytest.fixture
def copied(four_steps, tmp_path):
    return Path(shutil.copytree(four_steps, tmp_path / "run"))


def test_damaged_checkpoint_is_named_and_the_one_before_is_used(copied, four_steps):
    shard = checkpoint_of(copied, 4) / "__0_1.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    (checkpoint_of(copied, 3) / "common.pt").write_bytes(b"")
    said = train(copied, "training.steps=4")
    assert (
        f"{checkpoint_of(copied, 4)} is damaged: __0_1.distcp has changed since it was written "
        "(SHA-256)" in said
    )
    assert f"{checkpoint_of(copied, 3)} is damaged: common.pt has 0 bytes" in said
    assert "continuing" in said
    assert "after step 2" in said
    assert_same_end(copied, four_steps)


def test_nothing_intact_is_an_error_and_no_fresh_start(copied):
    for iteration in (2, 3, 4):
        (checkpoint_of(copied, iteration) / MANIFEST).unlink()
    said = train(copied, "training.steps=5", status=2)
    assert "no intact checkpoint to resume from" in said
    for iteration in (2, 3, 4):
        assert f"{checkpoint_of(copied, iteration)}: integrity.json is missing" in said
    assert "Traceback" not in said
    assert len(metrics(copied)) == 4, "nothing was overwritten"


@pytest.mark.parametrize(
    "part", ["rng_state", "parts", "engine", "data", "optimizer", "opt_param_scheduler"]
)
def test_missing_component_is_an_error(copied, part):
    path = checkpoint_of(copied)
    common = torch.load(path / "common.pt", weights_only=True)
    del (common["run"] if part in common["run"] else common)[part]
    torch.save(common, path / "common.pt")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["common.pt"] = digest(path / "common.pt")
    (path / MANIFEST).write_text(json.dumps(manifest))
    said = train(copied, "training.steps=5", status=2)
    assert f"checkpoint {path} cannot be read" in said
    assert part in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=9", "was started with seed=1, not 9"),
        ("data.prompts_per_step=8", "was started with data.prompts_per_step=4, not 8"),
        ("data.limit=7", "was started with other prompts than data.path holds now"),
        (
            "parallel.use_distributed_optimizer=true",
            "was saved with parallel.use_distributed_optimizer=false",
        ),
    ],
)
def test_another_run_is_not_a_resumption(copied, override, said):
    assert said in train(copied, "training.steps=5", override, status=2)


def test_background_save_equals_foreground_save(four_steps, tmp_path):
    train(
        tmp_path / "run",
        "training.steps=4",
        "training.keep_checkpoints=3",
        "training.async_save=true",
    )
    assert_same_end(tmp_path / "run", four_steps)
    for iteration in (2, 3):
        ours, theirs = (
            contents(checkpoint_of(d, iteration)) for d in (tmp_path / "run", four_steps)
        )
        assert ours == theirs, "the state of that step, not of the training that went on meanwhile"


def test_resumption_at_other_layouts(copied):
    """1 rank -> TP 2 with sequence parallel -> PP 2 -> DP 2 packed; the end equals a run of one
    process.
    """
    reference = copied.with_name("reference")
    shutil.copytree(copied, reference)
    train(reference, "training.steps=7")
    layouts = (
        ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
        ("parallel.pipeline_model_parallel_size=2",),
        ("parallel.sequence_packing=true",),
    )
    for steps, layout in enumerate(layouts, start=5):
        train(copied, f"training.steps={steps}", *layout, processes=2)
    for ours, theirs in zip(metrics(copied), metrics(reference), strict=True):
        assert ours["reward/accuracy"] == theirs["reward/accuracy"]
        assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-6)
        assert ours["grad_norm/total"] == pytest.approx(theirs["grad_norm/total"], rel=1e-5)
    from safetensors.torch import load_file

    final = [
        load_file(directory / "policy" / "model.safetensors") for directory in (copied, reference)
    ]
    for name, tensor in final[1].items():
        torch.testing.assert_close(final[0][name], tensor, rtol=1e-6, atol=1e-6)


@contextmanager
def small_disk(path, megabytes):
    path.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path]
        ).returncode
    ):
        pytest.skip("a disk of a few megabytes needs root and the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize(("processes", "background"), [(1, False), (2, True)])
def test_full_disk_leaves_the_last_checkpoint_usable(tmp_path, processes, background):
    run_dir = tmp_path / "disk" / "run"
    options = (
        "training.steps=4",
        "training.keep_checkpoints=4",
        f"training.async_save={background}",
    )
    with small_disk(tmp_path / "disk", 5):
        words = (*COMMON, f"run_dir={run_dir}", "training.save_interval=1", *options)
        done = run(*words, processes=processes, torchrun=processes > 1)
        assert done.returncode == (2 if processes == 1 else 1), done.stderr[
            -3000:
        ]  # torchrun says 1
        lines = [
            line for line in done.stderr.splitlines() if "dcpo train: error: cannot write" in line
        ]
        assert lines, done.stderr
        assert "No space left on device" in lines[0]
        assert "the last complete checkpoint is iteration 2" in lines[0]
        assert not list((run_dir / "checkpoints").glob("*.tmp")), (
            "the torn checkpoint does not keep the disk full"
        )
        subprocess.run(["mount", "-o", "remount,size=50m", tmp_path / "disk"], check=True)
        said = train(run_dir, *options, processes=processes)
        assert "after step 2" in said
        assert [record["step"] for record in metrics(run_dir)] == [1, 2, 3, 4]


def kill_at_a_random_moment(run_dir, background, rng, during_save):
    """Start the run, let it make a step of progress, SIGKILL it."""
    checkpoints = run_dir / "checkpoints"
    done_before = latest_iteration(checkpoints) or 0
    wait = rng.uniform(0, 0.03 if during_save else 1.0)
    reached = []

    def is_time():
        progress = reached or (latest_iteration(checkpoints) or 0) > done_before
        if progress and not reached and (not during_save or list(checkpoints.glob("*.tmp"))):
            reached.append(time.monotonic())
        return bool(reached) and time.monotonic() >= reached[0] + wait

    options = (f"run_dir={run_dir}", "training.save_interval=1", "training.steps=100000")
    words = [*map(str, (*COMMON, *options)), background]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = warm.kill("megatron_dcpo", words, environment, is_time)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]


@pytest.mark.parametrize(
    "background",
    [pytest.param("training.async_save=false", marks=pytest.mark.full), "training.async_save=true"],
)
def test_killed_at_random_moments_continues_bit_for_bit(tmp_path, background):
    """DCPO_KILLS of them (``make test-resilience``: 20), every other one in the middle of a
    save.
    """
    rng = random.Random(KILLS)
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    kills = -(-KILLS // 2)
    for number in range(kills):
        kill_at_a_random_moment(run_dir, background, rng, during_save=number % 2 == 0)
    steps = latest_iteration(run_dir / "checkpoints") + 2
    train(run_dir, f"training.steps={steps}", background)
    train(reference, f"training.steps={steps}")
    assert_same_end(run_dir, reference)
