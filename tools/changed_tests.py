"""Name the files of tests that can see what has changed: changed_tests.py [REVISION [FOLDER...]]

Compared is the working tree, new files included, with REVISION (HEAD). A file of tests sees what it
imports, or names in a text (a module, as ``-m`` takes it, a file or its folder), what that sees,
and ``conftest.py`` of its folder and of those above. Tests of the house see every file. Where the
revision is not known, everything has changed.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# a module in a text, perhaps with what is taken from it; with a dot, one whose name is made there
MODULE = re.compile(r"(\w+(?:\.\w+)*)(?::\w+|(\.))?")
# they say what runs, and how: every test sees them
FOR_ALL = {"pyproject.toml", "constraints.txt", "setup.py"}
HOUSE = "tests/house/"
PACKAGE = "megatron_dcpo/"


def main(revision: str = "HEAD", *folders: str) -> int:
    changed = changed_since(revision)
    if changed is None:
        print(f"{revision} is not here: all tests", file=sys.stderr)
    for file in tests_below(*(folders or ("tests",))):
        if changed is None or sees(file, changed):
            print(file)
    return 0


def changed_since(revision: str) -> set[str] | None:
    """Return the files that differ from a revision; None where git does not know it."""
    words = (("diff", "--name-only", revision), ("ls-files", "--others", "--exclude-standard"))
    found: set[str] = set()
    for arguments in words:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return None
        found |= {*done.stdout.splitlines()}
    return found


def tests_below(*folders: str) -> list[str]:
    files = {file for folder in folders for file in (ROOT / folder).rglob("test_*.py")}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def sees(file: str, changed: set[str]) -> bool:
    """Whether a file of tests, or what it imports, is or names a file that has changed."""
    if FOR_ALL & changed or (changed and file.startswith(HOUSE)):
        return True
    files = closure(file)
    # the package names files of its own, and other people's
    outside = set().union(*(words_of(seen) for seen in files if not seen.startswith(PACKAGE)))
    words = outside.union(*map(words_of, files))
    return not files.isdisjoint(changed) or any(
        not names_of(name).isdisjoint(words if name.startswith(PACKAGE) else outside)
        for name in changed
    )


def names_of(file: str) -> set[str]:
    """Return the words by which a text may name a file that is not Python."""
    path = Path(file)
    return set() if path.suffix == ".py" else {path.name, path.stem, path.parent.name}


def closure(file: str) -> set[str]:
    """Return a file of tests, its ``conftest.py``, what they import, and what that imports."""
    above = (str(folder / "conftest.py") for folder in Path(file).parents)
    waiting = [file, *(name for name in above if (ROOT / name).is_file())]
    reached = set(waiting)
    while waiting:
        new = named_in(waiting.pop()) - reached
        reached |= new
        waiting += new
    return reached


@functools.cache
def named_in(file: str) -> frozenset[str]:
    """Return the Python files of the repository that a file imports, or names in a text."""
    tree = parsed(file)
    imported = [name for node in ast.walk(tree) for name in imported_by(node)]
    found = {other for name in imported for other in files_of(name, beside=file)}
    for text in texts_of(file):
        if match := MODULE.fullmatch(text):
            found |= {*(modules_in(match[1]) if match[2] else files_of(match[1]))}
    by_path = (ROOT / text for text in texts_of(file) if text.endswith(".py"))
    found |= {str(path.relative_to(ROOT)) for path in by_path if path.is_file()}
    words = words_of(file)
    found |= {script for script in scripts() if Path(script).name in words}
    return frozenset(found - {file})


def imported_by(node: ast.AST) -> Iterable[str]:
    """Yield what a statement imports, a name of a module as if it were a module of its own."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def files_of(name: str, beside: str = "") -> tuple[str, ...]:
    """Return the files of a module by its name: as a package is imported and run; of a script, one
    ``beside`` or anywhere.
    """
    path = ROOT / name.replace(".", "/")
    module, package = path.with_suffix(".py"), path / "__init__.py"
    found = [file for file in (module, package, path / "__main__.py") if file.is_file()]
    if beside and not found and "." not in name:
        here = [(ROOT / beside).with_name(f"{name}.py")]
        others = [ROOT / script for script in scripts() if Path(script).stem == name]
        found = [file for file in here if file.is_file()] or others
    return tuple(str(file.relative_to(ROOT)) for file in found)


@functools.cache
def modules_in(name: str) -> tuple[str, ...]:
    """Return the files of all modules of a package."""
    files = (ROOT / name.replace(".", "/")).glob("*.py")
    return tuple(str(file.relative_to(ROOT)) for file in files)


@functools.cache
def scripts() -> tuple[str, ...]:
    """Return the programs outside packages, which tests name by their files."""
    folders = (ROOT / "benchmarks", ROOT / "examples", ROOT / "tools", ROOT / "lab")
    files = (file for folder in folders for file in folder.rglob("*.py"))
    return tuple(sorted(str(file.relative_to(ROOT)) for file in files))


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@functools.cache
def texts_of(file: str) -> frozenset[str]:
    constants = (node for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant))
    return frozenset(node.value for node in constants if isinstance(node.value, str))


@functools.cache
def words_of(file: str) -> frozenset[str]:
    """Return the parts of all paths in the texts of a file, as far as they have no spaces."""
    paths = (text for text in texts_of(file) if len(text) < 200 and " " not in text)
    return frozenset(part for path in paths for part in path.split("/") if part)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
