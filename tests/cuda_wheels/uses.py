"""What the package takes from Megatron, vLLM and Transformer Engine, read from its source, and
whether it is there.

A use is an imported name, an attribute of one, of its instances, or of an object in :data:`TYPES`,
a call of any of these with its arguments, or a method that overrides one. A release that moves a
name, drops a keyword or asks for one more argument is found without running anything.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.paths import REPOSITORY

PACKAGE = REPOSITORY / "megatron_dcpo"
FOREIGN = ("megatron", "vllm", "transformer_engine")

_SHARDED = ("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",)
_PART = (
    *_SHARDED,
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
    "megatron.core.optimizer.optimizer:FP32Optimizer",
)
_WRAPPED = ("megatron.core.distributed:DistributedDataParallel",)
_WRITER = ("megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",)
_CONFIG = ("megatron.core.transformer.transformer_config:TransformerConfig",)
_NCCL = ("vllm.distributed.device_communicators.pynccl:PyNcclCommunicator",)
_COMPLETION = ("vllm.outputs:CompletionOutput",)
# Objects that the code names without a type: file, expression, and the classes one of which it is.
TYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "checkpoints/optimizer_shards.py": {"part": _SHARDED},
    "checkpoints/saver.py": {"writer": _WRITER},
    "policy/model.py": {"ddp": _WRAPPED, "chunk": _WRAPPED},
    "policy/optimizer.py": {
        "chunk": _WRAPPED,
        "optimizer": ("megatron.core.optimizer.optimizer:ChainedOptimizer",),
        "part": _PART,
        "policy.config": _CONFIG,
        "self.megatron": ("megatron.core.optimizer.optimizer:ChainedOptimizer",),
    },
    "rollout/vllm_engine.py": {
        "self.llm": ("vllm:LLM",),
        "llm": ("vllm:LLM",),
        "engine": ("vllm.v1.engine.llm_engine:LLMEngine",),
        "output": ("vllm.outputs:RequestOutput",),
        "output.outputs[0]": _COMPLETION,
        "completion": _COMPLETION,
        "c": _COMPLETION,
        "completion.logprobs": ("vllm.logprobs:FlatLogprobs",),
        "span": ("vllm.outputs:WeightVersionSpan",),
        "scheduler": ("vllm.v1.core.sched.scheduler:Scheduler",),
    },
    "runtime/megatron_private.py": {"part": _SHARDED},
    "rollout/vllm_server.py": {"group": _NCCL, "self.group": _NCCL},
    "rollout/vllm_weights.py": {
        "info": ("vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",),
        "method": (
            "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
            "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ),
        "self.parallel_config": ("vllm.config:ParallelConfig",),
    },
}
_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"
# The class of an attribute, where its own source does not say.
MEMBERS = {
    "vllm.entrypoints.llm:LLM.llm_engine": "vllm.v1.engine.llm_engine:LLMEngine",
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": "vllm.v1.engine.core_client:InprocClient",
    "vllm.v1.engine.core_client:InprocClient.engine_core": "vllm.v1.engine.core:EngineCore",
    "vllm.v1.engine.core:EngineCore.scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "megatron.core.models.gpt.gpt_model:GPTModel.rotary_pos_emb": f"{_ROTARY}:RotaryEmbedding",
}
_MISSING = object()
# Who reads the keywords that a function passes on.
PASSED_ON = {"vllm.entrypoints.llm:LLM": "vllm.engine.arg_utils:EngineArgs"}


@dataclass(frozen=True)
class Instance:
    """Of one of these classes; none are known for ``()``."""

    classes: tuple[type, ...]


@dataclass
class Uses:
    """``found``: what the file uses; ``problems``: one line for each use that the installed release
    does not have.
    """

    found: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def files(foreign: str) -> list[Path]:
    """The files of the package that import from ``foreign``; those that do not have the word are
    not parsed.
    """
    named = re.compile(rf"\b{foreign}\b")
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        path
        for path, source in sources.items()
        if named.search(source) and any(_imports(ast.parse(source), (foreign,)))
    ]


def uses(source: str, name: str, foreign: tuple[str, ...] = FOREIGN) -> Uses:
    """Of the file ``name`` (below the package) with this ``source``."""
    reader = _Reader(ast.parse(source), name, foreign)
    reader.read()
    return reader.uses


class _Reader:
    def __init__(self, tree: ast.Module, name: str, foreign: tuple[str, ...]) -> None:
        self.tree, self.name, self.foreign, self.uses = tree, name, foreign, Uses()
        self.names: dict[str, Any] = {}
        for module, imported, alias in _imports(tree, foreign):
            self._note(f"{module}.{imported}".removesuffix("."))
            try:
                self.names[alias] = _load(f"{module}:{imported}")
            except (ImportError, AttributeError) as error:
                self._problem(tree, f"{module}.{imported}: {type(error).__name__}: {error}")
        for expression, classes in TYPES.get(name, {}).items():
            if all(one.split(".")[0].split(":")[0] in foreign for one in classes):
                self.names[expression] = Instance(tuple(map(_load, classes)))

    def read(self) -> None:
        self._visit(self.tree, {})

    def _visit(self, node: ast.AST, annotated: dict[str, Any]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotated = annotated | self._annotated(node)
        elif isinstance(node, ast.ClassDef):
            annotated = annotated | self._inherited(node)
        elif isinstance(node, ast.Attribute):
            self._resolve(node, annotated, report=True)
        elif isinstance(node, ast.Call):
            self._call(node, annotated)
        for child in ast.iter_child_nodes(node):
            self._visit(child, annotated)

    def _annotated(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
        """The arguments whose annotation is an imported class, or a choice of such."""
        found: dict[str, Any] = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            parts = [argument.annotation]
            while isinstance(parts[-1], ast.BinOp):
                parts[-1:] = [parts[-1].right, parts[-1].left]
            classes = [
                self._resolve(part, {}) for part in parts if not isinstance(part, ast.Constant)
            ]
            if classes and all(isinstance(one, type) for one in classes):
                found[argument.arg] = Instance(tuple(classes))
        return found

    def _inherited(self, node: ast.ClassDef) -> dict[str, Any]:
        bases = [
            self._resolve(base.value if isinstance(base, ast.Subscript) else base, {})
            for base in node.bases
        ]
        foreign = tuple(base for base in bases if isinstance(base, type))
        if not foreign:
            return {}
        own = {
            statement.target.id for statement in node.body if isinstance(statement, ast.AnnAssign)
        }
        own |= {
            target.id
            for line in node.body
            if isinstance(line, ast.Assign)
            for target in line.targets
        }
        own |= {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        for method in (item for item in node.body if isinstance(item, ast.FunctionDef)):
            own.add(method.name)
            theirs = next(
                (getattr(base, method.name) for base in foreign if hasattr(base, method.name)), None
            )
            if method.name.startswith("__") or not inspect.isfunction(theirs):
                continue
            self._note(f"{foreign[0].__name__}.{method.name} overridden")
            mine = len(method.args.args) + (100 if method.args.vararg else 0)
            needed = [
                p
                for p in inspect.signature(theirs).parameters.values()
                if p.kind == p.POSITIONAL_OR_KEYWORD
            ]
            if len(needed) > mine:
                self._problem(
                    method, f"{foreign[0].__name__}.{method.name} takes {[p.name for p in needed]}"
                )
        return {"self": Instance(foreign), "self.": own}

    def _resolve(
        self, node: ast.AST | None, annotated: dict[str, Any], report: bool = False
    ) -> Any:
        """What an expression is: an object, an :class:`Instance`, or None where that is not
        known.
        """
        if node is None:
            return None
        text = ast.unparse(node)
        known = annotated.get(text, self.names.get(text))
        if known is not None and not isinstance(node, ast.Attribute):
            return known
        if isinstance(node, ast.Call):
            return _returned(self._resolve(node.func, annotated))
        if not isinstance(node, ast.Attribute):
            return None
        base = self._resolve(node.value, annotated)
        if base is None or (
            ast.unparse(node.value) == "self" and node.attr in annotated.get("self.", ())
        ):
            return known
        member = _member(base, node.attr)
        if report:
            self._note(f"{_describe(base)}.{node.attr}")
            if member is _MISSING:
                self._problem(node, f"{_describe(base)} has no {node.attr}")
        return known if known is not None or member is _MISSING else member

    def _call(self, node: ast.Call, annotated: dict[str, Any]) -> None:
        function = self._resolve(node.func, annotated)
        if function is None or isinstance(function, Instance) or not callable(function):
            return
        method = isinstance(node.func, ast.Attribute) and isinstance(
            self._resolve(node.func.value, annotated), Instance
        )
        method = method and inspect.isfunction(function)
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
        partly = len(keywords) < len(node.keywords) or any(
            isinstance(a, ast.Starred) for a in node.args
        )
        self._note(f"{_describe(function)}({len(node.args)}, {', '.join(sorted(keywords))})")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # a builtin
        reader = PASSED_ON.get(_path(function))
        if reader:
            missing = set(keywords) - {
                *signature.parameters,
                *inspect.signature(_load(reader)).parameters,
            }
            if missing:
                self._problem(node, f"{reader} takes no {', '.join(sorted(missing))}")
        bind = signature.bind_partial if partly else signature.bind
        try:
            bind(*[None] * (len(node.args) + method), **dict.fromkeys(keywords))
        except TypeError as error:
            self._problem(node, f"{_describe(function)}: {error}")

    def _note(self, what: str) -> None:
        self.uses.found.add(what)

    def _problem(self, node: ast.AST, what: str) -> None:
        self.uses.problems.append(f"{self.name}:{getattr(node, 'lineno', 1)}: {what}")


def _imports(tree: ast.Module, foreign: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """(module, name or empty, name in the file) of every import from ``foreign``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in foreign
        ):
            yield from (
                (node.module, alias.name, alias.asname or alias.name) for alias in node.names
            )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in foreign:
                    yield alias.name, "", alias.asname or alias.name


@functools.cache
def _load(path: str) -> Any:
    """``module:name``; the name may be empty, or a module."""
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    if name and not hasattr(loaded, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(loaded, name) if name else loaded


def _member(base: Any, name: str) -> Any:
    """The attribute of an object, or what is known of an instance's; None where its type is not
    known.
    """
    if not isinstance(base, Instance):
        return getattr(base, name, _MISSING)
    one = next((one for one in base.classes if name in _attributes(one)), None)
    if one is None:
        return _MISSING
    declared = next(
        (MEMBERS[path] for parent in one.__mro__ if (path := f"{_path(parent)}.{name}") in MEMBERS),
        None,
    )
    method = getattr(one, name, None)
    return (
        Instance((_load(declared),)) if declared else method if inspect.isroutine(method) else None
    )


@functools.cache
def _attributes(cls: type) -> frozenset[str]:
    """What instances have: methods, fields, and what any method of the class or its parents assigns
    to ``self``.
    """
    names = set(dir(cls))
    for parent in cls.__mro__:
        names |= set(getattr(parent, "__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return frozenset(names)


def _returned(function: Any) -> Any:
    """What a call gives, where the function says so by its class or its annotation."""
    if isinstance(function, type):
        return Instance((function,))
    try:
        result = typing.get_type_hints(function).get("return")
    except Exception:  # names that only a type checker imports
        return None
    return (
        Instance((result,))
        if isinstance(result, type) and result.__module__.split(".")[0] in FOREIGN
        else None
    )


def _path(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"


def _describe(thing: Any) -> str:
    if isinstance(thing, Instance):
        return " or ".join(one.__name__ for one in thing.classes)
    return getattr(thing, "__qualname__", None) or getattr(thing, "__name__", repr(thing))
