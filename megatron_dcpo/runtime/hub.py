"""Models that are named as the hub names them: ``OWNER/NAME``, or ``OWNER/NAME@REVISION`` for a
branch, a tag or a commit. huggingface_hub downloads them, once per node: processes that start
together share its cache and its locks. It obeys HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.

    directory = model_directory("Qwen/Qwen3-0.6B")    -> a directory of the cache, at one commit
    name_of(directory)                                -> "Qwen/Qwen3-0.6B"
    commit_of(directory)                              -> the commit
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.nearby_paths import places
from megatron_dcpo.runtime.signals import launched_rank

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"(?P<repository>(?!\.)[\w.-]+/(?!\.)[\w.-]+)(@(?P<revision>[\w./-]+))?")

# What is downloaded: what describes the model, and the weights. Other formats of the weights, and
# copies in subdirectories, are left out.
_DESCRIPTION = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template*", "additional_chat_templates/*", "README.md", "LICENSE*", "NOTICE*"),
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_LEFT_OUT = ("consolidated*", "*/*.safetensors", "*/*.safetensors.index.json")
_SECONDS = 10.0  # that the hub has to say where a branch is

# by directory: the models that this process took from the hub
_TAKEN: dict[str, HubModel] = {}


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: its ``name`` as it was written, repository and revision. An empty
    revision is the default branch.
    """

    name: str
    repository: str
    revision: str


def parse(name: str) -> HubModel | None:
    """Return the model of the hub that ``name`` means; None for a path. A name whose first part is
    a directory here is a path: one with an error in it must not become a download.
    """
    match = HUB_NAME.fullmatch(name)
    if match is None or Path(name).exists() or Path(match["repository"]).parent.is_dir():
        return None
    return HubModel(name=name, repository=match["repository"], revision=match["revision"] or "")


def model_directory(name: str, *, commit: str = "", weights: bool = True) -> str:
    """Return the directory of a model: ``name`` itself if it is a path. A model of the hub is
    downloaded as far as it is not in the cache, at the ``commit`` if one is given; without
    ``weights`` only its configuration and tokenizer. Raises :class:`UserError`.
    """
    model = parse(name)
    if model is None:
        return name
    if commit and launched_rank() == 0:
        _warn_if_moved(model, commit)
    directory = _downloaded(model, commit or model.revision, weights)
    _TAKEN[directory] = model
    if launched_rank() == 0:
        logger.info("%s is commit %s of the hub, in %s", name, Path(directory).name, directory)
    return directory


def name_of(path: str) -> str:
    """Return the name by which a model was taken from the hub; other paths as they are."""
    model = _TAKEN.get(path)
    return model.name if model else path


def commit_of(path: str) -> str | None:
    """Return the commit of a model that was taken from the hub; None for other paths."""
    return Path(path).name if path in _TAKEN else None


def repository_of(path: str) -> str | None:
    """Return the repository of a model that was taken from the hub; None for other paths."""
    model = _TAKEN.get(path)
    return model.repository if model else None


def exact_name(path: str) -> str:
    """Return ``OWNER/NAME@COMMIT`` for a model that was taken from the hub; other paths as they
    are.
    """
    model = _TAKEN.get(path)
    return f"{model.repository}@{commit_of(path)}" if model else path


def recorded_commit(name: str, launches: Sequence[Mapping[str, Any]]) -> str:
    """Return the commit of the model ``name`` that the newest entry of ``run.json`` has; "" if it
    has none.
    """
    model = launches[-1].get("model") if launches else None
    if not isinstance(model, Mapping) or model.get("path") != name:
        return ""
    return str(model.get("commit") or "")


def recorded_name(name: str, launches: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a run's model, with the commit that its ``run.json`` has."""
    commit = recorded_commit(name, launches)
    return f"{name.partition('@')[0]}@{commit}" if commit else name


def _downloaded(model: HubModel, revision: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr.isatty():
        disable_progress_bars()
    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        return snapshot_download(
            model.repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=list(_LEFT_OUT),
        )
    except Exception as error:
        refusal = _why_not_downloaded(model, revision, error)
        if refusal is None:
            raise
        raise UserError(refusal) from None


def _why_not_downloaded(model: HubModel, revision: str, error: Exception) -> str | None:
    """Return the line that says why a model cannot be had, and what to do; None for an error of the
    program.
    """
    from huggingface_hub import constants, errors

    what = f"{model.name} is no directory here{places(model.repository)}, and"
    page = f"{constants.ENDPOINT}/{model.repository}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{what} {page} is gated: ask for access on that page, then set HF_TOKEN or run "
            "hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{what} there is no such model on the hub, or it is private: look at {page} for the "
            "spelling; for a private one set HF_TOKEN or run hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no branch, tag or commit {revision}; name one that it has"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"{what} it is not whole in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is "
            f"set; unset it, or download where there is a network: hf download {model.repository}"
        )
    return _broken_off(what, error)


def _broken_off(what: str, error: Exception) -> str | None:
    """Return the line about a hub that cannot be reached, or a cache that cannot be written; None
    for other errors.
    """
    import httpx2
    from huggingface_hub import constants, errors

    of_network = (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.HfHubHTTPError)
    if isinstance(error, (*of_network, errors.FileMetadataError, errors.XetDownloadError)):
        return (
            f"{what} the hub at {constants.ENDPOINT} does not give it ({one_line(error, 200)}); "
            "start again when the network is there: what has been downloaded is kept"
        )
    if isinstance(error, OSError):
        return (
            f"{what} the cache {constants.HF_HUB_CACHE} cannot be written "
            f"({error.strerror or one_line(error, 150)}); free space, or set HF_HOME to a "
            "directory elsewhere"
        )
    if isinstance(error, ValueError):  # the hub's rules for names
        return f"{what} it is no name of the hub ({one_line(error, 200)})"
    return None


def _warn_if_moved(model: HubModel, commit: str) -> None:
    """Warn if the revision that a run names is no longer the ``commit`` that it began with; not if
    the hub cannot be reached.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = HfApi().model_info(
            model.repository, revision=model.revision or None, timeout=_SECONDS
        )
    except (httpx2.HTTPError, OfflineModeIsEnabled, OSError):
        return
    if info.sha != commit:
        logger.warning(
            "%s is commit %s by now; this run goes on with %s, which it began with",
            model.name,
            info.sha,
            commit,
        )
