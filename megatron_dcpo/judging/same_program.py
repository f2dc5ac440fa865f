"""Whether two programs are the same as text, for the agreement among sampled programs.

Layout, comments, docstrings, annotations and names of local variables do not count. The comparison
reads no tests and runs nothing, so it cannot know what is right, and programs that do the same by
other means count as different.
"""

from __future__ import annotations

import ast

MAX_PROGRAM = 20_000  # characters; longer programs are compared as they are


def normal_form(program: str) -> str:
    """Return a text that is the same for programs that differ only in layout and names; the program
    itself if Python cannot parse it.

    Names that the program assigns are renamed. Parameters, functions, classes, imported names, and
    names that are also used as an attribute or a keyword are kept, because tests and other parts of
    the program refer to them.
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
    """Return the names that a program assigns and that nothing outside may refer to."""
    assigned = set()
    kept = set()
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
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                kept.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                kept.update(names)
            case ast.alias(name=name, asname=other):
                kept.add(other or name.partition(".")[0])
    return assigned - kept


class _Renamed(ast.NodeTransformer):
    """Renames assigned names to ``_0``, ``_1`` and so on, in order of appearance, and drops
    docstrings and annotations.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.numbers: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            return node
        new_name = self.numbers.setdefault(node.id, f"_{len(self.numbers)}")
        return ast.Name(new_name, node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        node.body = _without_docstring(node.body)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return self.generic_visit(node)
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    if not is_text:
        return body
    return body[1:] or [ast.Pass()]
