"""A run directory as a kill behind a step leaves it, and whether two runs have come to one end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.checkpoints.manifest import MANIFEST, iteration_dir, latest_iteration
from tests.helpers.quickstart import metrics, without_clocks

WEIGHTS = ("policy/model.safetensors", "adapter/adapter_model.safetensors")


def cut_behind(step: int, run_dir: Path, target: Path) -> Path:
    """Copy a finished run to ``target``, without its policy and the checkpoints behind a step; its
    metrics are those of all steps, as of one that was killed before its next checkpoint.
    """
    shutil.copytree(run_dir, target, ignore=shutil.ignore_patterns("policy", "adapter", "*.html"))
    checkpoints = target / "checkpoints"
    for later in checkpoints.glob("iter_*"):
        if later != iteration_dir(checkpoints, step):
            shutil.rmtree(later)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    return target


def checkpoint_of(run_dir: Path, iteration: int | None = None) -> Path:
    directory = Path(run_dir) / "checkpoints"
    return iteration_dir(directory, latest_iteration(directory) if iteration is None else iteration)


def contents(path: Path) -> tuple[dict[str, Any], Any]:
    """Digests of the tensor files of a checkpoint, as its manifest has them, and the values of
    everything else.

    The other files do not compare as bytes: a pickle shows which strings were one object, the
    metadata have an id.
    """
    tensors = {
        name: f
        for name, f in json.loads((path / MANIFEST).read_text())["files"].items()
        if "distcp" in name
    }
    assert len(tensors) >= 2
    return tensors, plain(torch.load(path / "common.pt", weights_only=True))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def assert_same_end(
    run_dir: Path, reference: Path, repeats: Callable[[str], bool] = lambda name: True
) -> None:
    """Assert that metrics (whose names ``repeats``), exported weights and the last checkpoint are
    the same: parameters, moments, generators.
    """
    for ours, theirs in zip(
        without_clocks(metrics(run_dir)), without_clocks(metrics(reference)), strict=True
    ):
        names = [name for name in {**ours, **theirs} if repeats(name)]
        assert {name: ours.get(name) for name in names} == {
            name: theirs.get(name) for name in names
        }
    for name in WEIGHTS:
        assert (run_dir / name).exists() == (reference / name).exists()
        if (reference / name).exists():
            assert (run_dir / name).read_bytes() == (reference / name).read_bytes(), name
    assert contents(checkpoint_of(run_dir)) == contents(checkpoint_of(reference))
