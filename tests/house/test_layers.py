"""The rules of docs/architecture.md, held against the code: layers, circles, who asks for CUDA,
private names,
calls that hide their arguments.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

PACKAGE = REPOSITORY / "megatron_dcpo"

# A module imports its own subpackage and lower layers, never its own layer's other subpackages or a
# higher one.
LAYERS = (
    ("types", "errors"),
    ("codec", "runtime"),
    ("objectives", "calibration", "sandbox"),
    ("data", "config"),
    ("judging", "architectures"),
    ("weights",),
    ("policy", "rollout", "conversion"),
    ("checkpoints", "planning", "evaluation"),
    ("training", "serving"),
    ("rehearsal",),
    ("cli", "api"),
)
LAYER = {
    subpackage: layer for layer, subpackages in enumerate(LAYERS) for subpackage in subpackages
}
# where private names of torch and Megatron may stand
FOREIGN = ("torch", "megatron")
PRIVATE_NAMES = (
    "megatron_dcpo.runtime.megatron_private",
    "megatron_dcpo.runtime.megatron_on_cpu",
    "megatron_dcpo.runtime.rehearsed_world",
    "megatron_dcpo.runtime.rehearsed_values",
    "megatron_dcpo.runtime.rehearsed_kernels",
    "megatron_dcpo.rehearsal.ledger",
)
PURE = ("data", "judging", "sandbox", "objectives", "calibration")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


# without the packages that stand for others, under whose names they are imported
MODULES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "stand_in" not in path.parts
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Return every module that one imports, at import or later, for a type checker too."""
    names: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in deeper}
    return frozenset(names)


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: {*imports_of(name)} & MODULES.keys() - {name} for name in MODULES}


# what runtime.plugins.load_part is given
PART = re.compile(r"(megatron_dcpo(?:\.\w+)+):(\w+)")


@functools.cache
def parts_of(module: str) -> frozenset[tuple[str, str]]:
    """Return the parts that a module names, which are imported when a configuration needs them."""
    return frozenset(
        (match[1], match[2])
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (match := PART.fullmatch(node.value))
    )


# modules that a command hangs on: what they import, and what that imports
LIMITS = {"training.loop": 140, "cli.calibrate": 45, "cli.serve": 67}


def subpackage(module: str) -> str:
    return (
        module.split(".")[1] if "." in module else "cli"
    )  # the package itself and __main__ are the command line


def test_every_subpackage_has_a_layer() -> None:
    assert {subpackage(module) for module in MODULES} - {"__main__"} == set(LAYER)


def test_arrows_point_down() -> None:
    upward = [
        f"{module} -> {target}"
        for module, targets in graph().items()
        for target in targets | {part for part, _ in parts_of(module)}
        if subpackage(module) not in (subpackage(target), "__main__")
        and target != "megatron_dcpo"
        and LAYER[subpackage(target)] >= LAYER[subpackage(module)]
    ]
    assert not upward, "\n".join(upward)


def test_there_is_no_circle() -> None:
    """Deferred imports counted, and those for type checkers: peel off modules that import nothing
    of what is left.
    """
    left = {module: set(targets) for module, targets in graph().items()}
    while ready := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"in or above a circle: {sorted(left)}"


def hangs_on(module: str) -> set[str]:
    reached = {module}
    waiting = [module]
    while waiting:
        new = graph()[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


@pytest.mark.parametrize("name", LIMITS)
def test_a_command_hangs_on_few_modules(name: str) -> None:
    """What only some configurations use is named by a path and imported when it is."""
    reached = hangs_on(f"megatron_dcpo.{name}")
    assert len(reached) <= LIMITS[name], sorted(reached)


def test_the_loop_knows_neither_engines_nor_benchmarks_nor_sandboxes() -> None:
    reached = {
        module.removeprefix("megatron_dcpo.") for module in hangs_on("megatron_dcpo.training.loop")
    }
    for module in ("rollout.vllm_engine", "rollout.transformers_engine", "rollout.agents"):
        assert module not in reached
    assert not {module for module in reached if module.startswith(("planning.", "sandbox.local"))}


def test_parts_that_are_named_exist() -> None:
    named = {part for module in MODULES for part in parts_of(module)}
    assert ("megatron_dcpo.judging.programs", "CODE") in named, "the test sees what it is for"
    missing = []
    for module, name in named:
        tree = tree_of(module)
        bound = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        bound |= {node.name for node in tree.body if hasattr(node, "name")}
        bound |= {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if name not in bound:
            missing.append(f"{module}:{name}")
    assert not missing


@pytest.mark.parametrize("name", PURE)
def test_pure_subpackages_know_neither_megatron_nor_vllm(name: str) -> None:
    for module in MODULES:
        if subpackage(module) == name:
            outside = {target.split(".")[0] for target in imports_of(module)}
            assert not outside & {"megatron", "vllm", "lab"}, module


def test_the_package_does_not_import_the_lab() -> None:
    assert not [
        module for module in MODULES for name in imports_of(module) if name.split(".")[0] == "lab"
    ]


def test_calibration_does_without_torch() -> None:
    """In a process of its own: the modules that an import really brings in."""
    code = (
        "import sys, megatron_dcpo.calibration as c, megatron_dcpo.calibration.diagrams;"
        "c.summarize([0.5, 0.9], [1, 0], statuses=['ok', 'ok']);"
        "sys.exit(','.join(m for m in ('torch', 'megatron.core', 'transformers', 'vllm') if m in "
        "sys.modules) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_runtime_asks_for_cuda() -> None:
    """Other subpackages read ``runtime.device.capabilities()``."""
    asking = []
    for module in MODULES:
        if subpackage(module) == "runtime":
            continue
        for node in ast.walk(tree_of(module)):
            if (
                isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "has_cuda")
            ) or (
                isinstance(node, ast.ImportFrom)
                and "has_cuda" in {alias.name for alias in node.names}
            ):
                asking.append(f"{module}:{node.lineno}")
    assert not asking, asking


def names_of(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a module imports stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, attributes of its
    objects.
    """
    names = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    return names | {
        node.attr
        for node in stored
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "made")
    }


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_uses(tree: ast.Module, known: set[str] | None) -> Iterator[tuple[int, str]]:
    """Yield line and text of every private name of torch or Megatron that a module uses: imported,
    got from what is imported, or got from an object, where no module of the package defines an
    attribute of that name (``known``; None: objects are not judged).
    """
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if is_private(f"{node.module}.{alias.name}")
            )
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            origin = names.get(ast.unparse(node).split(".")[0].split("(")[0], "").split(".")[0]
            if origin in FOREIGN or (not origin and known is not None and node.attr not in known):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and known is not None and name not in known:
                yield node.lineno, ast.unparse(node)


def test_private_names_of_torch_and_megatron_stand_in_one_place() -> None:
    trees = {module: tree_of(module) for module in MODULES}
    known = set().union(*map(own_names, trees.values()))
    elsewhere = {
        module: found
        for module, tree in trees.items()
        if module not in PRIVATE_NAMES  # what vLLM's objects keep private, modules of its name use
        and (found := list(private_uses(tree, None if "vllm" in module else known)))
    }
    assert not elsewhere
    assert all(list(private_uses(trees[module], known)) for module in PRIVATE_NAMES), (
        "the rule sees what it is for"
    )


def test_a_class_name_means_one_class() -> None:
    owners: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in owners.items() if len(modules) > 1}


def test_a_file_name_means_one_room() -> None:
    """The verbs of the command line aside, each in a file of its name."""
    places: dict[str, list[str]] = {}
    for module in MODULES:
        subpackage_of, _, name = module.removeprefix("megatron_dcpo.").rpartition(".")
        if subpackage_of not in ("", "cli"):
            places.setdefault(name, []).append(subpackage_of)
    several = {name: rooms for name, rooms in places.items() if len(rooms) > 1}
    assert not several


def splats(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of calls that take a tuple apart which was packed for them: a literal, a name
    to which the same function assigns a literal, or anything at all that a constructor is given.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        packed = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple | ast.List)
            and node.value.elts
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            for argument in call.args:
                if not isinstance(argument, ast.Starred):
                    continue
                value = argument.value
                literal = isinstance(value, ast.Tuple | ast.List)
                if (
                    literal
                    or (isinstance(value, ast.Name) and value.id in packed)
                    or name[0].isupper()
                ):
                    yield argument.lineno


def test_no_call_takes_a_tuple_apart_that_was_packed_for_it() -> None:
    """``build(*parts)`` hides from reader and type checker which argument is which."""
    found = {f"{module}:{line}" for module in MODULES for line in splats(tree_of(module))}
    assert not found
    packed = (
        "def f():\n    parts = 1, 2\n    g(*parts)\n    h(*(1, 2))\n    "
        "C(*given)\n    rows = []\n    k(*rows)\n"
    )
    assert list(splats(ast.parse(packed))) == [3, 4, 5], "the rule sees what it is for"
