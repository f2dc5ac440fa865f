"""``--help`` answers at once: it imports neither torch nor Megatron nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_dcpo.cli import VERBS

HEAVY = ("torch", "megatron", "transformers", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "vllm")


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
