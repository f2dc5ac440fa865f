"""docs/one_step.md is what tools/one_step.py makes of the code as it is; numbers may round differently on another CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def test_the_page_of_one_step_is_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "one_step.py"), "--out", str(tmp_path / "one_step.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made, shown = (tmp_path / "one_step.md").read_text(), (ROOT / "docs" / "one_step.md").read_text()
    assert NUMBER.sub("0", made) == NUMBER.sub("0", shown)
    numbers = zip(NUMBER.findall(made), NUMBER.findall(shown), strict=True)
    assert not [(new, old) for new, old in numbers if float(new) != pytest.approx(float(old), abs=2e-3)]
