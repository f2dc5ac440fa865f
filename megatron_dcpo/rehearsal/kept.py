"""Rehearsals that were carried out, kept for ``dcpo plan``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_dcpo
from megatron_dcpo.config import Config
from megatron_dcpo.planning.plan import architecture_of
from megatron_dcpo.runtime.files import write_atomically

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "megatron-core")
_WITHOUT_A_CACHE = (OSError, RuntimeError)  # RuntimeError: a user without a home


def keep(config: Config, gpus: int, ranks: list[dict[str, Any]]) -> None:
    """Keep what a rehearsal of ``config`` on ``gpus`` said, if the file can be written."""
    text = json.dumps(ranks)
    try:
        file = _file(config, gpus)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{_digest(text)}\n{text}")
    except _WITHOUT_A_CACHE as error:
        logger.warning("the rehearsal is not kept for dcpo plan: %s", error)


def kept(config: Config, gpus: int) -> list[dict[str, Any]] | None:
    """Return what a rehearsal of the same job by the same code said; None if there was none, or if
    its file is damaged.
    """
    try:
        digest, _, text = _file(config, gpus).read_text().partition("\n")
    except (*_WITHOUT_A_CACHE, UnicodeDecodeError):
        return None
    if digest != _digest(text):
        return None
    ranks: list[dict[str, Any]] = json.loads(text)
    return ranks


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file(config: Config, gpus: int) -> Path:
    """Return the file of a rehearsal, named by everything that its result depends on."""
    of_job = dataclasses.asdict(dataclasses.replace(config, run_dir=""))
    job = {
        "config": of_job,
        "model": dataclasses.asdict(architecture_of(config.model.path)),
        "gpus": gpus,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    digest = hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode())
    package = Path(megatron_dcpo.__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "megatron_dcpo", "rehearsals", f"{digest.hexdigest()}.json")
