"""What a light verb imports: a process of its own says which libraries are there at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY

HEAVY = ("torch", "transformers", "numpy", "pydantic", "omegaconf", "rich")
# a model without weights here, whose tensors cannot be looked at
PLAN = ["--config", "examples/quickstart/dcpo.yaml", "--gpus", "8"]
PLAN += ["model.path=Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["train", "--config", "nowhere.yaml"], set()),
        (["plan", "--config", "nowhere.yaml", "--gpus", "8"], set()),
        (["plan", *PLAN, "--json"], {"numpy", "pydantic", "omegaconf"}),
        (["plan", *PLAN], {"numpy", "pydantic", "omegaconf", "rich"}),
        (
            ["train", "--config", "examples/quickstart/dcpo.yaml", "objective.lam=3"],
            {"numpy", "pydantic", "omegaconf"},
        ),
    ],
    ids=["train", "plan", "plan as JSON", "plan as tables", "a refused option"],
)
def test_a_light_verb_imports_what_it_uses(arguments: list[str], imported: set[str]) -> None:
    code = (
        "import sys; from megatron_dcpo.cli import main\n"
        "main(sys.argv[1:])\n"
        f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.splitlines()[-1].split()) == imported


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m megatron_dcpo config rollout"
    script = f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_python_without_the_libraries_is_told_so() -> None:
    """``-S``: no site-packages."""
    command = [sys.executable, "-S", "-m", "megatron_dcpo", "config"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("dcpo config: error: omegaconf is not installed")
    assert "make setup" in line
