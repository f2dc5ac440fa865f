"""What only a GPU can show: the same commands on CUDA, NCCL and (where installed) Transformer
Engine.

The CPU is the reference. Run with ``make test-gpu`` on a machine with a GPU.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu import needs
from tests.helpers.paths import QUICKSTART, REPOSITORY

pytestmark = needs.CUDA


def dcpo(*arguments, processes=1, cuda=True):
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
    environment = os.environ | ({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        [*launcher, "-m", "megatron_dcpo", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train(run_dir, *overrides, processes=1, cuda=True):
    small = [
        "data.prompts_per_step=8",
        "rollout.group_size=4",
        "training.steps=3",
        "training.save_interval=3",
    ]
    small.append("logging.to=[]")  # not on a bare machine
    dcpo(
        *("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={run_dir}", *small, *overrides),
        processes=processes,
        cuda=cuda,
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_first_step_equals_the_cpu(tmp_path):
    """Counted random numbers: the first rollout is the same one, so its gradient is too (fp32,
    local layers).
    """
    gpu = train(tmp_path / "gpu", "model.transformer_impl=local")
    cpu = train(tmp_path / "cpu", "model.transformer_impl=local", cuda=False)
    assert gpu[0]["reward/accuracy"] == cpu[0]["reward/accuracy"]
    assert gpu[0]["grad_norm/total"] == pytest.approx(cpu[0]["grad_norm/total"], rel=1e-3)
    assert gpu[0]["loss/policy"] == pytest.approx(cpu[0]["loss/policy"], abs=1e-4)
    assert max(record["engine/logprob_diff_max"] for record in gpu) <= 1e-3


@needs.TRANSFORMER_ENGINE
@pytest.mark.parametrize("packing", [False, True])
def test_transformer_engine_in_bf16(tmp_path, packing):
    """Fused norms, varlen attention and fp32 main parameters; the engine holds the same bf16
    weights.
    """
    records = train(
        tmp_path / "run",
        "model.transformer_impl=transformer_engine",
        "model.params_dtype=bf16",
        f"parallel.sequence_packing={str(packing).lower()}",
    )
    assert len(records) == 3
    assert all(0 < record["grad_norm/total"] < 1e3 for record in records)
    assert max(record["engine/kl"] for record in records) < 1e-2


@needs.gpus(2)
@pytest.mark.parametrize("parallel", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_two_gpus_over_nccl_equal_one(tmp_path, parallel):
    one = train(tmp_path / "one", "model.transformer_impl=local")
    two = train(
        tmp_path / "two", "model.transformer_impl=local", f"parallel.{parallel}=2", processes=2
    )
    assert two[0]["grad_norm/total"] == pytest.approx(one[0]["grad_norm/total"], rel=1e-3)
    assert max(record["engine/logprob_diff_max"] for record in two) <= 1e-3


def test_evaluation_on_gpu(tmp_path):
    """The starting policy of the quickstart is as over-confident on a GPU as on the CPU."""
    dcpo(
        *(
            "evaluate",
            "--model",
            QUICKSTART / "policy",
            "--out",
            tmp_path / "out",
            "--template",
            "raw",
        ),
        *(
            "--benchmarks",
            f"heldout={QUICKSTART / 'data' / 'heldout.jsonl'}",
            "--repeats",
            "2",
            "--max-tokens",
            "32",
        ),
        *("--temperature", "1.0", "--top-p", "1.0", "--top-k", "0", "--engine", "transformers"),
    )
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())["benchmarks"]["heldout"]
    assert 0.35 < result["accuracy"] < 0.55
    assert 0.3 < result["verbal"]["ece"] < 0.5
