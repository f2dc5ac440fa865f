"""Uploading a model to the hub, and what is not uploaded: everything but the files of a model, and
files that hold a key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.hub import HUB_NAME

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# what a model consists of; anything else in its directory is refused by name
_OF_A_MODEL = (
    *("README.md", "LICENSE*", "NOTICE*", "reliability.png"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("additional_chat_templates/*.jinja", "model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
_KEYS = {
    "a token of Hugging Face": r"(?<!\w)hf_[A-Za-z0-9]{20,}",
    "an API key (sk-...)": r"(?<!\w)sk-[A-Za-z0-9_-]{20,}",
    "a key of AWS": r"(?<!\w)AKIA[0-9A-Z]{16}(?!\w)",
    "a key (-----BEGIN ...)": r"-----BEGIN [A-Z]",
}
_WEIGHTS = ".safetensors"

Contents = Mapping[str, "Path | bytes"]  # by the name in the repository


def files_of_model(directory: Path) -> dict[str, Path | bytes]:
    """Return the files of a directory by their names there. Raises :class:`UserError` for a file
    that is none of a model's, and for a link.
    """
    found: dict[str, Path | bytes] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            raise UserError(f"{path} is a link, which is not uploaded; put the file in its place")
        if path.is_dir():
            continue
        if not any(fnmatch(name, pattern) for pattern in _OF_A_MODEL):
            raise UserError(f"{path} is no file of a model and is not uploaded; remove it")
        found[name] = path
    if not any(name.endswith(_WEIGHTS) for name in found):
        raise UserError(f"{directory} holds no weights (*.safetensors)")
    return found


def check_no_keys(files: Contents) -> None:
    """Raise :class:`UserError` if a text file holds something that looks like a key."""
    for name, content in files.items():
        if name.endswith((_WEIGHTS, ".png")):
            continue
        data = content if isinstance(content, bytes) else content.read_bytes()
        text = data.decode("utf-8", errors="replace")
        for what, pattern in _KEYS.items():
            match = re.search(pattern, text)
            if match:
                line = text.count("\n", 0, match.start()) + 1
                raise UserError(
                    f"{name}, line {line}, holds what looks like {what}; nothing was uploaded: "
                    "remove it, and revoke the key if it is one"
                )


def size_of(content: Path | bytes) -> int:
    """Return the number of bytes of a file that is uploaded."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def upload(files: Contents, name: str, *, private: bool, revision: str, message: str) -> str:
    """Put the files on the hub as one commit of the repository ``name``, which is made if it does
    not exist; return the address of the commit. ``revision``: a branch, made if it does not exist;
    a repository that has files already is only changed if one is named. Raises :class:`UserError`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    match = HUB_NAME.fullmatch(name)
    if match is None or match["revision"]:
        raise UserError(
            f"--to {name}: name the repository as OWNER/NAME, and a branch by --revision"
        )
    api = HfApi()
    operations = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=content)
        for file, content in files.items()
    ]
    try:
        _make_repository(api, name, private=private, revision=revision)
        if revision and revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.create_commit(
            name, operations=operations, commit_message=message, revision=revision or None
        )
    except Exception as error:
        refusal = _why_not_uploaded(name, error)
        if refusal is None:
            raise
        raise UserError(refusal) from None
    return str(commit.commit_url)


def _make_repository(api: HfApi, name: str, *, private: bool, revision: str) -> None:
    """Make the repository, or check that the one that exists may be changed."""
    if not api.repo_exists(name):
        # without --private what the owner's account says
        api.create_repo(name, private=private or None)
        return
    files = set(api.list_repo_files(name)) - {".gitattributes"}
    if files and not revision:
        raise UserError(
            f"{name} exists and holds {len(files)} files; name another one by --to, or say where "
            "the new files go: --revision main changes it, --revision NAME makes a branch"
        )
    if private and not api.model_info(name).private:
        raise UserError(
            f"{name} exists and is public, so that --private would not hide anything; name another "
            "one by --to, or leave out --private"
        )


def _why_not_uploaded(name: str, error: Exception) -> str | None:
    """Return the line that says why the hub has not taken the files; None for an error of the
    program.
    """
    import httpx2
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status == 401 or isinstance(error, errors.LocalTokenNotFoundError):
        return (
            f"{constants.ENDPOINT} takes no files for {name} without a token that may write; make "
            "one there (Settings, Access Tokens), and set HF_TOKEN or run hf auth login"
        )
    if status == 403:
        return (
            f"the token has no right to write to {name}; take a token that may write, and an OWNER "
            "that is you or an organization of yours"
        )
    if constants.HF_HUB_OFFLINE:
        return f"nothing can be uploaded to {name} while HF_HUB_OFFLINE is set; unset it"
    if isinstance(error, errors.HFValidationError):
        return f"--to {name} is no name of the hub ({one_line(error, 200)})"
    # ValueError: the hub finds a mistake in the metadata of a card, or no hub answers
    if isinstance(error, (httpx2.HTTPError, errors.HfHubHTTPError, ValueError)):
        return (
            f"{constants.ENDPOINT} has not taken the files for {name} ({one_line(error, 200)}); "
            "the same command tries again"
        )
    return None
