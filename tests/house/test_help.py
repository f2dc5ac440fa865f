"""``--help`` answers at once: it imports neither torch nor Megatron nor transformers. Verbs import
what they use.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_dcpo.cli import VERBS
from tests.helpers.paths import QUICKSTART

HEAVY = (
    "torch",
    "megatron",
    "transformers",
    "numpy",
    "scipy",
    "sklearn",
    "matplotlib",
    "pandas",
    "vllm",
)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb: str) -> None:
    code = f"""
import sys
from megatron_dcpo.cli import main
try:
    main([*{verb!r}.split(), "--help"])
except SystemExit as stopped:
    assert stopped.code == 0
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


def imported(code: str, *names: str) -> set[str]:
    """Those of ``names`` that a new interpreter has imported after ``code``."""
    code = f"import sys\n{code}\nprint(*sys.modules, sep=chr(10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split()) & set(names)


def test_a_plan_without_weights_does_without_torch() -> None:
    code = "from megatron_dcpo.cli import main\n"
    code += f"main(['plan', '--config', {str(QUICKSTART / 'dcpo.yaml')!r}, '--gpus', '8', "
    code += "'model.path=Qwen/Qwen3-0.6B'])"
    assert imported(code, "torch", "numpy") == {"numpy"}


def test_the_embedded_engine_does_without_scikit_learn() -> None:
    """transformers imports it for a kind of generation that is not used here."""
    code = "from megatron_dcpo.rollout.transformers_engine import TransformersEngine\n"
    code += f"TransformersEngine.from_pretrained({str(QUICKSTART / 'policy')!r})"
    assert imported(code, "sklearn", "pandas", "transformers") == {"transformers"}


def test_a_rank_does_without_what_draws() -> None:
    code = "import megatron_dcpo.training.run"
    assert imported(code, "matplotlib", "torch") == {"torch"}
