"""The worked examples of CONTRIBUTING.md: their edits are applied to a copy of the package, their
checks executed there.

A comment before a block says what it is: ``test: file PATH`` (the whole file), ``test: PATH,
behind: LINE`` (lines to insert), ``test: PATH, as it is`` (lines of this repository, which are
taken out to see what it is without them), ``test: run`` (executed in a process of its own).
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


AS_IT_IS = ", as it is"


def apply(edit: str, block: str, root: Path) -> None:
    """Write a file, or insert lines where ``edit`` says, unless they are there."""
    if edit.endswith(AS_IT_IS):
        path = ROOT / edit.removesuffix(AS_IT_IS)
        assert path.read_text().count(block) == 1, f"{edit}: {block}"
        return
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
    assert all([edit for edit, _ in blocks].count("run") == 1 for blocks in SECTIONS.values())


@pytest.mark.parametrize("title", SECTIONS)
def test_example_works_as_written(title: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron_dcpo", tmp_path / "megatron_dcpo")
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


def test_a_family_is_an_entry_in_one_file_of_the_package() -> None:
    edits = [edit for edit, _ in SECTIONS["An architecture"] if edit != "run"]
    assert edits == [
        f"megatron_dcpo/architectures/families.py{AS_IT_IS}",
        f"tests/helpers/families.py{AS_IT_IS}",
    ]
    naming = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron_dcpo").rglob("*.py")
        if re.search(r"glm4\b|Glm4For", path.read_text())
    ]
    assert naming == ["megatron_dcpo/architectures/families.py"]


def test_without_its_edits_every_check_fails(tmp_path: Path) -> None:
    package = tmp_path / "megatron_dcpo"
    shutil.copytree(ROOT / "megatron_dcpo", package, ignore=shutil.ignore_patterns("__pycache__"))
    for blocks in SECTIONS.values():
        for edit, block in blocks:
            path = tmp_path / edit.removesuffix(AS_IT_IS)
            if edit.endswith(AS_IT_IS) and path.is_file():
                path.write_text(path.read_text().replace(block, ""))
    lines = ["from megatron_dcpo.errors import UserError"]
    for blocks in SECTIONS.values():
        code = next(block for edit, block in blocks if edit == "run")
        lines += ["try:", f"    exec({code!r}, {{}})", "except UserError:", "    print('refused')"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["refused"] * len(SECTIONS)
