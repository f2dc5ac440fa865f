"""Which files a model had when it was sampled or fitted: its directory may later hold other weights
under the same name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dcpo.runtime import hub

# what settings.json says of a model's files
_SETTINGS = ("commit", "weights", "adapter")


def files_of(model: str, adapter: str = "") -> dict[str, Any]:
    """Return what the files of a model, and of its adapter, are in ``settings.json``: a model of
    the hub is named by its commit.
    """
    commit = hub.commit_of(model)
    files: dict[str, Any] = {"commit": commit}
    if commit is None:
        files = {"weights": _sizes_and_times(Path(model))}
    if adapter:
        files["adapter"] = _sizes_and_times(Path(adapter))
    return files


def digest_of_files(settings: Mapping[str, Any]) -> str:
    """Return a digest of what :func:`files_of` has put into ``settings``; "" if it is not there, as
    in the settings of a server's answers.
    """
    files = {name: settings[name] for name in _SETTINGS if name in settings}
    if not files:
        return ""
    text = json.dumps(files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sizes_and_times(directory: Path) -> dict[str, list[int]]:
    """Return size (bytes) and modification time (ns) of a model's files."""
    found = {}
    for path in sorted(directory.glob("*")):
        if path.suffix in (".safetensors", ".bin", ".json"):
            found[path.name] = [path.stat().st_size, path.stat().st_mtime_ns]
    return found
