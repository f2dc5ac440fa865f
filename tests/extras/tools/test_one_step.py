"""docs/one_step.md is what tools/one_step.py makes of the code as it is; numbers may round
differently on another CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


CLASSES = re.compile(r"^\* `(?:types|training|objectives|policy)[\w.]*`: (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("page") / "one_step.md"
    command = [sys.executable, str(REPOSITORY / "tools" / "one_step.py"), "--out", str(page)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return page.read_text()


def test_the_page_of_one_step_is_up_to_date(made: str) -> None:
    shown = (REPOSITORY / "docs" / "one_step.md").read_text()
    assert NUMBER.sub("0", made) == NUMBER.sub("0", shown)
    numbers = zip(NUMBER.findall(made), NUMBER.findall(shown), strict=True)
    assert not [
        (new, old) for new, old in numbers if float(new) != pytest.approx(float(old), abs=2e-3)
    ]


def test_the_page_lists_the_classes_of_a_step(made: str) -> None:
    """Counted in a run, under ``sys.setprofile`` and ``threading.setprofile``: records, methods,
    and parts of the run.
    """
    lines = made.replace("\n  ", " ")  # long ones go on below
    classes = [name for names in CLASSES.findall(lines) for name in names.split(", ")]
    assert {
        "Prompt",
        "Response",
        "Judgement",
        "TrainingSample",
        "MicroBatch",
        "TokenOutputs",
    } <= set(classes)
    assert {"Method", "Sampler", "Updater"} <= set(classes), "the list has other subpackages too"
    assert len(set(classes)) == len(classes)
