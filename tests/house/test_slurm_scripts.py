"""The shipped batch scripts ask Slurm for what they use: without CPUs a task gets one, without
memory a site's default.
"""

import argparse
import os
import re
import shlex
import subprocess

import pytest

from megatron_dcpo.cli import evaluate, launch
from tests.helpers.paths import EXAMPLES

SCRIPTS = sorted(EXAMPLES.rglob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_cpus_and_memory(script):
    text = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("# "))
    header = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", text, flags=re.MULTILINE)
    asked = dict(header)
    assert "exclusive" in asked or "cpus-per-task" in asked
    assert asked["mem"] == ("0" if "exclusive" in asked else asked["mem"])
    # since Slurm 22.05 srun does not take it from the job
    (options,) = re.findall(r"step_options=\((.*)\)", text)
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK:-' in options
    assert set(re.findall(r"\bsrun (\S+)", text)) == {'"${step_options[@]}"'}


def test_all_are_here():
    assert [path.name for path in SCRIPTS] == [
        "reproduce.sbatch",
        "async.sbatch",
        "convert.sbatch",
        "evaluate.sbatch",
        "train.sbatch",
    ]


def test_the_evaluation_is_that_of_the_training():
    text = next(path for path in SCRIPTS if path.name == "reproduce.sbatch").read_text()
    assert '--as-trained "$run/config.yaml"' in text, (
        "the template, the marker and the longest response of the run"
    )
    assert ". .venv/bin/activate" in text


@pytest.mark.parametrize("name", ["reproduce.sbatch", "evaluate.sbatch"])
def test_every_gpu_of_the_node_has_an_engine(name):
    """The command as written is one that ``dcpo launch`` and ``dcpo evaluate`` take."""
    text = next(path for path in SCRIPTS if path.name == name).read_text().replace("\\\n", " ")
    (gpus,) = re.findall(r"^#SBATCH --gpus-per-node=(\d+)", text, flags=re.MULTILINE)
    (command,) = re.findall(r"launch (.*-- evaluate .*)$", text, flags=re.MULTILINE)
    command = command.replace('"${DCPO_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}"', gpus)
    command = command.replace('"$@"', "--model M --benchmarks math500 --out OUT")
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    launch.add_parser(verbs)
    evaluate.add_parser(verbs)
    processes, _, words = command.partition(" -- ")
    assert parser.parse_args(["launch", processes]).processes == gpus == "8"
    verb = parser.parse_args(shlex.split(words))
    assert verb.model
    assert getattr(verb, "dtype", "bfloat16") == "bfloat16"  # the default on a GPU


CACHES = (
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
)


@pytest.mark.parametrize(
    "name", ["reproduce.sbatch", "async.sbatch", "evaluate.sbatch", "train.sbatch"]
)
def test_compiled_kernels_stay_on_the_node(tmp_path, name):
    """What the step gets: no cache below HOME, which a container often lacks; what a user has set
    stays.
    """
    path = next(path for path in SCRIPTS if path.name == name)
    for command, text in (
        ("srun", f"env > {tmp_path}/step"),
        ("scontrol", "echo node1; echo node2"),
    ):
        (tmp_path / command).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / command).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_TMPDIR": "/scratch/7",
        "TRITON_CACHE_DIR": "/own",
    }
    home = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/nobody"}
    done = subprocess.run(
        ["bash", path, "x/y"],
        env=home | job,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    step = dict(
        line.split("=", 1) for line in (tmp_path / "step").read_text().splitlines() if "=" in line
    )
    assert step["TRITON_CACHE_DIR"] == "/own"
    others = {
        step[variable].rsplit("/", 1)[0] for variable in CACHES if variable != "TRITON_CACHE_DIR"
    }
    assert all(cache.startswith("/scratch/7") for cache in others)


# runs the command of a step on each of its nodes, one after the other
SRUN = """#!/bin/bash
for word in "$@"; do
    case $word in --nodelist=*) nodes=${word#*=} ;; --nodes=*) number=${word#*=} ;; esac
done
while [[ $1 == --* ]]; do shift; done
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node STEP_NODES=$number "$@"; done
"""
# notes what it was called with, on which node; a training lasts until every engine was started
PYTHON = """#!/bin/bash
printf '%s\\n' "$SLURMD_NODENAME" "$STEP_NODES" "$@" > "$RAN/$SLURMD_NODENAME"
if [[ " $* " == *" --nnodes "* ]]; then
    for engine in $(grep -o 'n[0-9]*:8000' <<< "$*"); do
        for _ in {1..200}; do [[ -s $RAN/${engine%:*} ]] && break; sleep 0.1; done
    done
fi
"""


def run_beside(folder, nodes, **environment):
    """Run async.sbatch as Slurm would on so many nodes; what each node was told, by its name."""
    ran = folder / "ran"
    ran.mkdir()
    hosts = "".join(f"echo n{number}; " for number in range(1, nodes + 1))
    commands = {"srun": SRUN, "python": PYTHON, "scontrol": f"#!/bin/sh\n{hosts}\n"}
    for command, text in commands.items():
        (folder / command).write_text(text)
        (folder / command).chmod(0o755)
    path = next(path for path in SCRIPTS if path.name == "async.sbatch")
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RAN": str(ran),
        "SLURM_JOB_ID": "30007",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run(
        ["bash", path, "x.yaml", "seed=2"],
        env=job | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, {file.name: file.read_text().splitlines() for file in ran.iterdir()}


@pytest.mark.parametrize(
    ("nodes", "environment", "trainers"),
    [
        (2, {}, 1),
        (5, {}, 3),
        (4, {"DCPO_TRAINER_NODES": "3"}, 3),
        (4, {"DCPO_ENGINE_NODES": "3"}, 1),
        (3, {"DCPO_TRAINER_NODES": "1", "DCPO_ENGINE_NODES": "2"}, 1),
    ],
)
def test_nodes_train_and_generate(tmp_path, nodes, environment, trainers):
    done, told = run_beside(tmp_path, nodes, **environment)
    assert done.returncode == 0, done.stderr
    names = [f"n{number}" for number in range(1, nodes + 1)]
    assert sorted(told) == names
    addresses = [f"http://{name}:8000/v1" for name in names[trainers:]]
    for name in names[:trainers]:
        words = told[name]
        assert words[:6] == [name, str(trainers), "-m", "megatron_dcpo", "launch", "8"]
        assert words[words.index("--nnodes") + 1] == str(trainers)
        assert words[words.index("--rdzv-endpoint") + 1] == "n1:20007"
        assert words[words.index("--local-addr") + 1] == name
        own = words[words.index("--") + 1 :]
        assert own[:5] == ["train", "--resume", "auto", "--config", "x.yaml"]
        assert own[-1] == f"rollout.endpoint={','.join(addresses)}"
        status = tmp_path / "slurm-logs" / "30007-0" / name / "status"
        assert status.read_text() == "0\n"
    for name, address in zip(names[trainers:], addresses, strict=True):
        words = told[name]
        assert words[:6] == [name, "1", "-m", "megatron_dcpo", "launch", "0"]
        assert words[words.index("--engines") + 1] == "8"
        assert words[-2:] == ["rollout.engine=server", f"rollout.endpoint={address}"]
        assert "seed=2" in words


@pytest.mark.parametrize(
    ("nodes", "environment"),
    [
        (1, {}),
        (4, {"DCPO_TRAINER_NODES": "4"}),
        (4, {"DCPO_ENGINE_NODES": "5"}),
        (4, {"DCPO_TRAINER_NODES": "1", "DCPO_ENGINE_NODES": "2"}),
    ],
)
def test_nodes_that_do_not_add_up_are_refused(tmp_path, nodes, environment):
    done, told = run_beside(tmp_path, nodes, **environment)
    assert done.returncode == 2
    assert "DCPO_TRAINER_NODES" in done.stderr
    assert not told
