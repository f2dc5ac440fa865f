"""What works without torch, transformers and Megatron-core, which ``pip install .`` leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.paths import QUICKSTART, REPOSITORY

BLOCKED = """
import sys

class Blocked:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
# verbs one after the other, in a process that imports once: of each, its status and what it says
VERBS = """
import contextlib, io, json, sys
from megatron_dcpo.cli import main

ended = []
for words in json.loads(sys.argv[1]):
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        status = main(words)
    ended.append((status, said.getvalue()))
print(json.dumps(ended))
"""
SAMPLE = {
    "version": 2,
    "ground_truth": "6",
    "task": "mine",
    "problem": "2*3=",
    "kind": "products",
    "finish_reason": "stop",
    "weights_version": 0,
    "status": "ok",
    "boundary": 8,
    "length": 14,
}


def train_packages() -> set[str]:
    """The packages of the extra ``train`` of pyproject.toml, by the names that are imported."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name for text in project["optional-dependencies"]["train"]}
    return {name.replace("megatron-core", "megatron") for name in names}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python without the packages of training."""
    names = train_packages() | {"tokenizers", "huggingface_hub", "accelerate"}
    assert {"torch", "megatron", "transformers", "safetensors"} <= names
    directory = tmp_path_factory.mktemp("blocked")
    (directory / "sitecustomize.py").write_text(BLOCKED.format(names=sorted(names)))
    path = os.pathsep.join((str(directory), str(REPOSITORY)))
    return os.environ | {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    with path.open("w") as file:
        for index in range(80):
            right = index % 3 != 0
            row = SAMPLE | {
                "prompt_id": f"mine/{index // 2}",
                "sample_index": index % 2,
                "text": "\\boxed{6}\n<conf> Confidence: 0.8",
                "correct": float(right),
                "confidence": 0.8 if right else 0.7,
                "token_confidence": 0.9 if right else 0.4,
                "reasoning_logprob": -0.1 if right else -3.0,
            }
            file.write(json.dumps(row) + "\n")
    return path


def dcpo(light: dict[str, str], *verbs: tuple[object, ...]) -> list[tuple[int, str]]:
    words = json.dumps([[*map(str, verb)] for verb in verbs])
    done = subprocess.run(
        [sys.executable, "-c", VERBS, words],
        env=light,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ended: list[tuple[int, str]] = json.loads(done.stdout)
    return ended


def test_the_block_works(light: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", "import torch"], env=light, capture_output=True)
    assert done.returncode == 1


def test_samples_are_scored_calibrated_and_reported_and_pairs_judged(
    light: dict[str, str], samples: Path, tmp_path: Path
) -> None:
    predictor = tmp_path / "confidence.npz"
    scored = tmp_path / "scored"
    page = tmp_path / "page.html"
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prediction": "1/2", "reference": "0.5"}\n')
    verbs: list[tuple[object, ...]] = [
        ("calibrate", "--samples", samples, "--out", predictor),
        (
            *("evaluate", "--samples", samples, "--out", scored),
            *("--calibrator", predictor, "--resamples", 10),
        ),
        ("report", scored, "--out", page),
        ("plan", "--config", "examples/qwen3_8b/math/dcpo.yaml", "--gpus", 8),
        ("config", "rollout"),
        ("judge", "--pairs", pairs, "--json"),
    ]
    for verb, (status, said) in zip(verbs, dcpo(light, *verbs), strict=True):
        assert status == 0, (verb, said[-2000:])
    assert "<svg" in page.read_text()
    evaluation = json.loads((scored / "evaluation.json").read_text())
    assert evaluation["overall"]["verbal"]["n"] == 80


def test_training_says_what_to_install(light: dict[str, str], tmp_path: Path) -> None:
    verbs: list[tuple[object, ...]] = [
        ("train", "--config", "examples/quickstart/dcpo.yaml"),
        ("sft", "--config", "examples/quickstart/sft.yaml"),
        ("launch", "1", "--", "train", "--config", "examples/quickstart/dcpo.yaml"),
        (
            *("evaluate", "--model", QUICKSTART / "policy", "--out", tmp_path / "out"),
            *("--benchmarks", f"a={QUICKSTART / 'data' / 'heldout.jsonl'}"),
        ),
    ]
    for verb, (status, said) in zip(verbs, dcpo(light, *verbs), strict=True):
        assert status == 2, verb
        *_, line = said.strip().splitlines()
        assert "train" in line
        assert "make setup" in line


def test_a_public_module_imports_no_more_than_numpy(light: dict[str, str]) -> None:
    """Calibration for other trainers: quickly imported, without what draws and fits."""
    code = (
        "import sys; import megatron_dcpo.calibration as c; c.ece([.8], [1.]);"
        "print(sorted(set(sys.modules) & {'matplotlib', 'sklearn', 'scipy', 'pydantic'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=light, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
