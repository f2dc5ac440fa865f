"""The API reference documents what a user imports: every public name of it has a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "reference").glob("*.md"))
SHOWN = [
    name
    for page in PAGES
    for name in re.findall(r"^::: ([\w.]+)", page.read_text(), flags=re.MULTILINE)
]


def module_of(name: str) -> tuple[Path, list[str]]:
    """Return the file of the module in a dotted name, and what follows its name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = REPOSITORY.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file, parts[length:]
    raise AssertionError(f"{name} is no module of the package")


def definitions(name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the public functions and classes, and their methods, that a page shows for ``name``."""
    file, rest = module_of(name)
    tree = ast.parse(file.read_text())
    if not rest and file.name == "__init__.py":  # a package shows what it exports
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    yield from definitions(f"{node.module}.{alias.name}")
        return
    wanted = rest[0] if rest else None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and wanted in [alias.name for alias in node.names]:
            yield from definitions(f"{node.module}.{wanted}")
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == wanted or (wanted is None and not node.name.startswith("_")):
            yield f"{file.stem}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                        yield f"{file.stem}.{node.name}.{part.name}", part


def test_the_reference_shows_what_a_user_imports() -> None:
    assert {
        "megatron_dcpo.calibration",
        "megatron_dcpo.objectives.Method",
        "megatron_dcpo.data.prompts.Template",
        "megatron_dcpo.serving.middleware.ConfidenceMiddleware",
    } <= set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_name_is_documented(name: str) -> None:
    found = list(definitions(name))
    assert found
    assert not [
        title
        for title, node in found
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not ast.get_docstring(node)
    ]
