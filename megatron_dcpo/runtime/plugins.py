"""Load what a user names by import path: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.runtime.paths import places

_PACKAGE = Path(__file__).resolve().parents[1]


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
        raise UserError(
            f"{option}={path}: expected file.py:name or package.module:name"
        )
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
        raise UserError(
            f"{option}={path}: importing it failed with {raised(error)}"
        ) from error
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(
            f"{option}={path}: {source} has no {name!r}{did_you_mean(name, known)}"
        )
    return getattr(module, name)


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
    """Return an exception of a user's code on one line, with the innermost line of a file that is
    neither this package's nor an installed library's.
    """
    text = f"{type(error).__name__}: {one_line(error, 150)}"
    if isinstance(error, SyntaxError):
        return text  # which names its file and line
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        is_foreign = "site-packages" in frame.filename or "<" in frame.filename
        if not is_foreign and not Path(frame.filename).is_relative_to(_PACKAGE):
            return f"{text} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return text
