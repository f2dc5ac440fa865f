"""The worked examples of CONTRIBUTING.md: their edits are applied to a copy of the package, their
checks executed there.

A comment before a block says what it is: ``test: file PATH`` (the whole file), ``test: PATH,
behind: LINE`` (lines to insert), ``test: run`` (executed in a process of its own).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- test: (.+?) -->\n```\w+\n(.*?)```", re.DOTALL)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
SECTIONS = {
    title: blocks
    for title, text in SECTION.findall((ROOT / "CONTRIBUTING.md").read_text())
    if (blocks := BLOCK.findall(text))
}


def apply(edit: str, block: str, root: Path) -> None:
    """Write a file, or insert lines where ``edit`` says."""
    if edit.startswith("file "):
        path = root / edit.removeprefix("file ")
        assert not path.exists(), f"{edit}: the package has one of that name"
        path.write_text(block)
        return
    name, line = edit.split(", behind: ")
    text = (root / name).read_text()
    assert text.count(line + "\n") == 1, f"{name} has not exactly one line {line!r}"
    (root / name).write_text(text.replace(f"{line}\n", f"{line}\n{block}"))


def test_the_page_has_five_examples_with_a_check_each() -> None:
    own = ["A method of your own", "A prompt template"]
    assert list(SECTIONS) == ["A method", *own, "An architecture", "A benchmark"]
    assert all(
        [edit for edit, _ in blocks].count("run") == 1 for blocks in SECTIONS.values()
    )


@pytest.mark.parametrize("title", SECTIONS)
def test_example_works_as_written(title: str, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "megatron_dcpo",
        tmp_path / "megatron_dcpo",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for edit, block in SECTIONS[title]:
        if edit != "run":
            apply(edit, block, tmp_path)
    code = "\n".join(block for edit, block in SECTIONS[title] if edit == "run")
    where = (
        "import megatron_dcpo, pathlib; assert "
        "pathlib.Path(megatron_dcpo.__file__).is_relative_to(pathlib.Path.cwd())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", where + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_its_edits_every_check_fails() -> None:
    lines = ["from megatron_dcpo.errors import UserError"]
    for blocks in SECTIONS.values():
        code = next(block for edit, block in blocks if edit == "run")
        lines += [
            "try:",
            f"    exec({code!r}, {{}})",
            "except UserError:",
            "    print('refused')",
        ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["refused"] * len(SECTIONS)
