"""Load what is named by import path: a user's object, ``file.py:name`` or ``package.module:name``,
or a part of this package that only some configurations need.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.runtime.nearby_paths import places

_PACKAGE = Path(__file__).resolve().parents[1]
_STDLIB = sysconfig.get_path("stdlib")


def is_import_path(text: str) -> bool:
    """Return whether ``text`` is an import path; names of the package's own parts have no colon."""
    return ":" in text


def load_object(path: str, option: str) -> Any:  # noqa: ANN401 - an object of the user's
    """Return the object that ``path`` names, for the configuration's ``option``.

    The path of a file is relative to the working directory; the file's directory is not put on
    ``sys.path``. Raises :class:`UserError` if there is no such file, module or name, or if
    importing it fails.
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(f"{option}={path}: expected file.py:name or package.module:name")
    try:
        if source.endswith(".py"):
            module = _load_file(Path(source), path, option)
        else:
            module = importlib.import_module(source)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"{option}={path}: no module named {error.name!r}; install it or set PYTHONPATH"
        ) from None
    except Exception as error:
        raise UserError(f"{option}={path}: importing it failed with {raised(error)}") from error
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"{option}={path}: {source} has no {name!r}{did_you_mean(name, known)}")
    return getattr(module, name)


def load_part(path: str) -> Any:  # noqa: ANN401 - the caller says what it is
    """Return the object of this package that ``path`` (``megatron_dcpo.module:name``) names, and
    import its module if that has not been done.

    A registry of such paths keeps a caller from importing what its configuration does not use.
    ``tests/house/test_layers.py`` looks at them as at imports.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def source_digest(path: str, option: str) -> str:
    """Return a short digest of the source of the object that ``path`` names: of its file, and of
    the modules in the same directory or below it that it imports at its top level, also by way of
    others.

    Raises :class:`UserError` as :func:`load_object` does, or if the file cannot be read.
    """
    load_object(path, option)
    source = path.rpartition(":")[0]
    module = _load_file(Path(source), path, option) if source.endswith(".py") else None
    module = module or importlib.import_module(source)
    digest = hashlib.sha256()
    for file in sorted(_source_files(module)):
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise UserError(
                f"{option}={path}: cannot read {file} ({error.strerror or error})"
            ) from None
    return digest.hexdigest()[:16]


def _source_files(module: ModuleType) -> set[Path]:
    """Return the file of a module and those of the modules beside or below it that it uses; the
    libraries of the environment are not among them.
    """
    first = getattr(module, "__file__", None)
    if first is None:  # of a namespace package, or built in
        return set()
    root = Path(first).resolve().parent
    files: set[Path] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        name = getattr(current, "__file__", None)
        if name is None:
            continue
        file = Path(name).resolve()
        is_users = root in file.parents and "site-packages" not in file.parts
        if file in files or not (is_users or current is module):
            continue
        files.add(file)
        for value in list(vars(current).values()):
            used = value
            if not isinstance(value, ModuleType):
                used = sys.modules.get(str(getattr(value, "__module__", "")))
            if isinstance(used, ModuleType) and not _is_ours(used):
                waiting.append(used)
    return files


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == __name__.partition(".")[0]


def check_signature(function: object, path: str, option: str, *arguments: str) -> None:
    """Raise :class:`UserError` unless ``function`` can be called with these positional
    ``arguments``.
    """
    expected = f"expected a function ({', '.join(arguments)})"
    if not callable(function):
        raise UserError(f"{option}={path}: {expected}, got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin, which has none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UserError(f"{option}={path}: {expected}, got {signature}") from None


def _load_file(file: Path, path: str, option: str) -> ModuleType:
    if not file.is_file():
        raise UserError(f"{option}={path}: no such file {file}{places(file)}")
    # a file is loaded once, as a module with a name that no other file has
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()
    name = f"megatron_dcpo_user_{file.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def raised(error: BaseException) -> str:
    """Return an exception of a user's code on one line, with the innermost line of the user's own
    file. If there is none, it is the innermost line outside this package.
    """
    text = f"{type(error).__name__}: {one_line(error, 150)}"
    if isinstance(error, SyntaxError):
        return text  # which names its file and line
    outside = []
    users = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            continue
        outside.append(frame)
        is_library = "site-packages" in frame.filename or "<" in frame.filename
        if not is_library and not Path(frame.filename).is_relative_to(_STDLIB):
            users.append(frame)
    for frame in (users or outside)[-1:]:
        text += f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return text
