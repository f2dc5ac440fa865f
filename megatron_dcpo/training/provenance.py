"""Where a run comes from: ``run.json`` and ``config.yaml`` in its directory, what a resumption
changes, and what becomes of an earlier run there.

``run.json`` has an entry for every start and resumption: time, command line, version and commit,
host, libraries, device, model, tokenizer and functions of ``data.row`` by their digests, a model of
the hub by its commit. A
configuration that differs from ``config.yaml`` leaves a dated copy of the old one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from megatron_dcpo import __version__
from megatron_dcpo.checkpoints.manifest import check_fresh, latest_iteration
from megatron_dcpo.config import Config, RunConfig, flat, to_yaml
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.device import device_name
from megatron_dcpo.runtime.distributed import broadcast_object
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.http_json import without_password
from megatron_dcpo.runtime.plugins import source_digest
from megatron_dcpo.runtime.run_records import (
    CONFIG,
    RUN,
    WARNINGS,
    differing,
    first_date,
    read_launches,
    today,
)

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "megatron-core", "transformers", "vllm", "transformer-engine", "numpy")
# What a training leaves in its directory.
WRITTEN = (
    CONFIG,
    RUN,
    "config.until-*.yaml",
    "metrics.jsonl",
    "mismatch.jsonl",
    WARNINGS,
    "samples",
    "evaluation",
    "tensorboard",
    "wandb",
    "swanlab",
    "trackio",
    "logger_ids.json",
    "profile",
    "policy",
    "adapter",
    "checkpoints",
    "report.html",
)
# An option that makes it another run. A checkpoint knows by itself which others it depends on.
METHOD = "objective.name"
# Options that say how a run is carried out, not what it computes.
FREE = ("run_dir", "training.resume", "training.steps", "logging.")

AnyRunConfig = TypeVar("AnyRunConfig", bound=RunConfig)


def with_model_here(config: AnyRunConfig, *, weights: bool = True) -> AnyRunConfig:
    """Return the configuration with the directory of its model (:func:`hub.model_directory`). A
    resumed run takes the commit that ``run.json`` has. Raises :class:`UserError`.
    """
    directory = Path(config.run_dir)
    commit = ""
    if config.training.resume != "none" and has_checkpoint(directory):
        commit = hub.recorded_commit(config.model.path, read_launches(directory))
    path = hub.model_directory(config.model.path, commit=commit, weights=weights)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))


def date_of(config: RunConfig) -> date:
    """Return the date that a chat template writes in this run's prompts: that of its start if it is
    resumed, otherwise today's.
    """
    directory = Path(config.run_dir)
    if config.training.resume != "none" and has_checkpoint(directory):
        return first_date(read_launches(directory)) or today()
    return today()


def has_checkpoint(directory: Path) -> bool:
    return latest_iteration(directory / "checkpoints") is not None


def launch(
    config: RunConfig, processes: int, done: int, counts: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the entry of ``run.json`` for this start, after ``done`` steps, with ``processes``
    ranks. ``counts``: the problems, or examples, of each path of the data.
    """
    commit, dirty = source()
    libraries = {name: _version(name) for name in LIBRARIES}
    path = config.model.path
    model: dict[str, Any] = {"path": hub.name_of(path)}
    model |= {**digests(Path(path)), **license_of(Path(path))}
    commit_of_model = hub.commit_of(path)
    if commit_of_model:
        model["commit"] = commit_of_model
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "date": date_of(config).isoformat(),
        "after_step": done,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "version": __version__,
        "commit": commit,
        "uncommitted_changes": dirty,
        "host": socket.gethostname(),
        "device": device_name(),
        "processes": processes,
        "python": platform.python_version(),
        "libraries": {name: version for name, version in libraries.items() if version},
        "model": model,
        **_teacher_of(config),
        "data": dict(counts or {}),
        "row_functions": row_functions(config),
    }


def _teacher_of(config: RunConfig) -> dict[str, Any]:
    """Return what defines the teacher, if the run has one."""
    if not isinstance(config, Config) or not config.objective.teacher:
        return {}
    teacher = config.objective.teacher
    if config.objective.teacher_is_served:
        addresses = [one.teacher for one in config.data.sources if one.teacher]
        found: dict[str, Any] = {"url": without_password(teacher)}
        if addresses:
            found["of_sources"] = [without_password(one) for one in addresses]
        return {"teacher": found}
    return {"teacher": {"path": teacher, **digests(Path(teacher))}}


def row_functions(config: RunConfig) -> dict[str, str]:
    """Return the digest of the file of each function that reads the rows of the data."""
    data = getattr(config, "data", None)
    sources = (data, *getattr(data, "sources", ()))
    names = {str(getattr(source, "row", "")) for source in sources} - {""}
    return {name: source_digest(name, "data.row") for name in sorted(names)}


def source() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package is in, and whether files differ from it;
    None outside one.
    """
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    # an installed package may lie in somebody else's checkout
    if not (package.parent / ".git").exists():
        return None, None
    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(changes)


def digests(model: Path) -> dict[str, str]:
    """Return the SHA-256 of what defines the architecture and of what defines the tokenizer, as far
    as there are files.
    """
    files = {"config_sha256": "config.json", "tokenizer_sha256": "tokenizer.json"}
    digests = {}
    for key, name in files.items():
        path = model / name
        if path.is_file():
            digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def license_of(model: Path) -> dict[str, str]:
    """Return what the card of a model says of its license, in the keys of the hub; nothing if
    there is no card, or if it does not say it.
    """
    card = model / "README.md"
    if not card.is_file():
        return {}
    _, *parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", maxsplit=2)
    try:
        metadata = OmegaConf.to_container(OmegaConf.create(parts[0] if len(parts) == 2 else ""))
    except Exception:  # whatever YAML's readers raise: a card is free text
        return {}
    if not isinstance(metadata, dict):
        return {}
    keys = ("license", "license_name", "license_link")
    return {key: metadata[key] for key in keys if isinstance(metadata.get(key), str)}


def prepare(directory: Path, config: RunConfig, rank: int, without_effect: Sequence[str]) -> None:
    """Check what ``directory`` holds before anything is written there: a run to continue, or one to
    move aside. Lines on options ``without_effect`` are logged. Collective; raises
    :class:`UserError` on every rank.
    """
    refused = None
    if rank == 0:
        try:
            _prepare(directory, config)
        except (UserError, OSError) as error:
            refused = str(error)
        for line in without_effect:
            logger.warning("%s", line)
    refused = broadcast_object(refused)
    if refused is not None:
        raise UserError(refused)


def _prepare(directory: Path, config: RunConfig) -> None:
    if has_checkpoint(directory):
        if config.training.resume != "none":
            check_resume(directory, config)
        return  # without --resume, the checkpointer refuses
    aside = move_aside(directory)
    if aside is not None:
        logger.warning("%s held a run without a checkpoint: it is in %s now", directory, aside)


def check_run_dir(run_dir: str, resume: str) -> None:
    """Raise :class:`UserError` if a run could not write its directory, or would overwrite another
    run's checkpoints. A directory is made, to see that it can be, and removed; nothing is left.
    """
    directory = Path(run_dir)
    check_fresh(directory, latest_iteration(directory / "checkpoints"), resume)
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"run_dir={run_dir} cannot be made: {existing} is "
            f"{'not writable' if existing.is_dir() else 'not a directory'}; change run_dir"
        )
    try:
        # the administrator may write everywhere by the permissions, and not in /proc
        tempfile.TemporaryDirectory(prefix=".dcpo", dir=existing).cleanup()
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be made: no directory can be made in {existing} "
            f"({error.strerror or error}); change run_dir"
        ) from None


def check_resume(directory: Path, config: RunConfig) -> None:
    """Raise :class:`UserError` when the configuration changes what a resumed run cannot change: the
    method, the model, its tokenizer.
    """
    path = config.model.path
    now = digests(Path(path))
    commit = hub.commit_of(path)
    if commit:
        now["commit"] = commit
    launches = read_launches(directory)
    before = launches[-1].get("model", {}) if launches else {}
    for key, what in (
        ("config_sha256", "another model"),
        ("tokenizer_sha256", "another tokenizer"),
        ("commit", "another commit of its model"),
    ):
        if key == "commit" and key not in now:
            continue  # a directory, whose files have been compared
        if key in before and before[key] != now.get(key):
            started_with = hub.recorded_name(str(before.get("path")), launches)
            raise UserError(
                f"{directory} was started with {what}, {started_with}, than "
                f"model.path={hub.exact_name(path)}; name that one to resume, or another run_dir "
                "to start again"
            )
    teacher = _teacher_of(config).get("teacher", {})
    taught_by = launches[-1].get("teacher", {}) if launches else {}
    same_place = "path" in teacher and teacher["path"] == taught_by.get("path")
    if same_place and teacher != taught_by:
        raise UserError(
            f"objective.teacher={teacher['path']} is another model than when {directory} was "
            "started; bring that one back to resume, or name the new one by another path"
        )
    for name, old, new in differences(directory, config):
        if name == METHOD:
            raise UserError(
                f"{directory} was started with {name}={old}, not {new}; keep it to resume, or "
                "change run_dir"
            )


def differences(directory: Path, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (option, old, new) for every option that differs from ``config.yaml`` of the run."""
    path = directory / CONFIG
    if not path.is_file():
        return
    try:
        old = dict(flat(OmegaConf.to_container(OmegaConf.load(path))))
    except Exception as error:  # whatever YAML's readers raise
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}); restore it, or remove it to resume"
        ) from None
    new = dict(flat(OmegaConf.to_container(OmegaConf.create(to_yaml(config)))))
    for name, (before, now) in differing(old, new):
        yield name, before, now


def record_start(
    directory: Path,
    config: RunConfig,
    processes: int,
    *,
    done: int,
    counts: Mapping[str, int],
) -> None:
    """Write ``config.yaml`` and add an entry to ``run.json``. When a run is resumed, warn of the
    options that differ, and keep a dated copy of the configuration that is replaced. A run that is
    done keeps the configuration that it was trained with.
    """
    changed = {}
    for name, old, new in differences(directory, config) if done else ():
        if name not in ("run_dir", "training.resume"):
            changed[name] = (old, new)
    if done >= config.training.steps:
        _say_that_it_is_done(changed)
        return
    entry = launch(config, processes, done, counts)
    path = directory / CONFIG
    for name, (old, new) in changed.items():
        if not name.startswith(FREE):
            logger.warning("resumed with %s=%s, before %s", name, new, old)
    decay = config.optimizer.lr_decay_style
    if "training.steps" in changed and decay != "constant":
        old, new = changed["training.steps"]
        logger.warning(
            "resumed with training.steps=%s, before %s: the %s decay of the learning rate ends at "
            "step %s from now on",
            new,
            old,
            decay,
            new,
        )
    if changed:
        stamp = entry["time"].replace(":", "").removesuffix("+0000")
        shutil.copyfile(path, directory / f"config.until-{stamp}.yaml")
    write_atomically(path, to_yaml(config))
    launches = [*read_launches(directory), entry]
    write_atomically(directory / RUN, json.dumps({"launches": launches}, indent=1) + "\n")


def _say_that_it_is_done(changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Name the options that change nothing about a run that is done."""
    for name, (old, new) in changed.items():
        if not name.startswith((*FREE, "evaluation.")):
            logger.warning("%s=%s changes nothing: the run is done, with %s", name, new, old)


def move_aside(directory: Path) -> Path | None:
    """Move what an earlier training without a checkpoint left in ``directory`` into
    ``directory.N``; return the new place, or None when that training has logged nothing.
    """
    if not any((directory / name).exists() for name in ("metrics.jsonl", "samples", "policy")):
        return None
    number = 1
    while directory.with_name(f"{directory.name}.{number}").exists():
        number += 1
    aside = directory.with_name(f"{directory.name}.{number}")
    aside.mkdir()
    for pattern in WRITTEN:
        for path in list(directory.glob(pattern)):
            path.rename(aside / path.name)
    return aside


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
