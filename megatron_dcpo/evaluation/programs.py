"""Programs in an evaluation: the tests beside ``samples.jsonl``, and whether two programs are the
same text.

Layout, comments, docstrings, annotations and names of local variables do not count. This is what
agreement among sampled programs means (the consistency confidence). It reads no test and runs
nothing, so it cannot know what is right; programs that do the same by other means count as
different.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from megatron_dcpo.data.code_problems import pack_tests, tests_key, unpack_tests
from megatron_dcpo.data.files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.judging.programs import PackedTests
from megatron_dcpo.sandbox.tests import checked_tests


def is_code(sample: Sample) -> bool:
    """Return whether the ground truth of a sample is the key of its tests."""
    return sample.prompt.ground_truth.startswith("tests:")


def write_tests(tests: PackedTests, path: Path) -> None:
    """Write one line per set of tests, so that the samples beside it can be judged again without
    the benchmark's files.
    """
    lines = (
        json.dumps({"key": key, "tests": unpack_tests(packed)}) + "\n"
        for key, packed in sorted(tests.items())
    )
    with (
        open(path, "wb") as file,
        gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed_file,
    ):
        for line in lines:
            packed_file.write(line.encode())


def read_tests(path: Path, keys: Iterable[str]) -> dict[str, bytes]:
    """Return the tests of ``keys``. Raises :class:`UserError` for missing ones and for tests that
    are not the key's.
    """
    missing, tests = set(keys), {}
    if path.exists():
        for where, row in read_json_lines(path):
            checked_tests(row.get("tests"), where)
            packed = pack_tests(row["tests"])
            if row.get("key") != tests_key(packed):
                raise UserError(
                    f"{where}: the tests are not those of {row.get('key')}; evaluate again"
                )
            if row["key"] in missing:
                tests[row["key"]] = packed
    missing -= set(tests)
    if missing:
        raise UserError(
            f"{path}: no tests for {len(missing)} problems; it must lie beside the samples to "
            "judge them"
        )
    return tests


MAX_PROGRAM = 20_000  # characters; beyond it programs are compared as they are


def normal_form(program: str) -> str:
    """Return the same text for programs that differ in layout and names only; the program itself
    where Python cannot read it.

    Renamed are names that the program assigns. Parameters, functions, classes, imported names, and
    whatever is also used as an attribute or a keyword, keep theirs: tests and other parts of the
    program refer to them.
    """
    if len(program) > MAX_PROGRAM:
        return program
    try:
        tree = ast.parse(program)
        return ast.unparse(_Renamed(_local_names(tree)).visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program.strip()


def same_program(a: str, b: str) -> bool:
    """Return whether two programs have the same normal form."""
    return a == b or normal_form(a) == normal_form(b)


def _local_names(tree: ast.AST) -> set[str]:
    assigned, kept = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                assigned.add(name)
            case ast.arg(arg=name) | ast.keyword(arg=name) | ast.Attribute(attr=name):
                kept.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                kept.add(name)
            case (
                ast.ExceptHandler(name=name)
                | ast.MatchAs(name=name)
                | ast.MatchStar(name=name)
            ):
                kept.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                kept.update(names)
            case ast.alias(name=name, asname=other):
                kept.add(other or name.partition(".")[0])
    return assigned - kept


class _Renamed(ast.NodeTransformer):
    """Assigned names become ``_0``, ``_1`` ... in the order in which they are met; docstrings and
    annotations go.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.numbers: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            return node
        return ast.Name(
            self.numbers.setdefault(node.id, f"_{len(self.numbers)}"), node.ctx
        )

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        node.body = _without_docstring(node.body)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return self.generic_visit(node)
        return self.visit(
            ast.copy_location(ast.Assign([node.target], node.value), node)
        )


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return body[1:] or [ast.Pass()] if is_text else body
