"""The commands of README and of the pages in ``docs``, in the order in which they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```(?P<kind>bash|sh|yaml|python|json)\n(?P<text>.*?)^```", re.M | re.S)
_NAME = re.compile(r"^#\s*(?P<name>[\w./-]+\.(?:yaml|py|jsonl))\b", re.M)
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
# what a command writes
_OUT = ("--out", "--to")
_OUT_OPTION = "run_dir="
_MODEL_OPTION = "model.path="  # a directory of the reader, or a name of the hub
# what stands for something of the reader's: MODEL, /models/Qwen3-8B, http://host, my_run.yaml
_READERS = re.compile(r"[A-Z][A-Z_]*$|/|https?://|~")


@dataclass(frozen=True)
class Command:
    """A ``dcpo`` command: its ``words`` behind the program's name, as they stand on the page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: dcpo {' '.join(self.words)}"


@dataclass(frozen=True)
class Page:
    """A page: its commands, and the files that it shows."""

    name: str
    commands: tuple[Command, ...]
    shown: frozenset[str]


def read_page(path: Path) -> Page:
    """Return the ``dcpo`` commands of a page, in order, and the names of the files it shows."""
    name = str(path.relative_to(REPOSITORY))
    commands: list[Command] = []
    shown: set[str] = set()
    for block in _BLOCK.finditer(path.read_text()):
        if block["kind"] in ("bash", "sh"):
            commands += [Command(name, words) for words in _dcpo_commands(block["text"])]
        else:
            shown.update(match["name"] for match in _NAME.finditer(block["text"]))
    return Page(name=name, commands=tuple(commands), shown=frozenset(shown))


def _dcpo_commands(text: str) -> Iterator[tuple[str, ...]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        # VARIABLE=value in front of a command
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        for part in _split_at(words, ("&&", "|", "&", ";")):
            if part[:1] == ["dcpo"]:
                yield tuple(part[1:])
            elif part[:1] == ["torchrun"]:
                yield tuple(part[part.index("megatron_dcpo") + 1 :])


def _split_at(words: Sequence[str], separators: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in separators:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def written(command: Command) -> list[str]:
    """Return the paths that a command writes."""
    found = []
    for word, behind in zip(command.words, (*command.words[1:], ""), strict=True):
        if word in _OUT:
            found.append(behind)
        elif word.startswith(_OUT_OPTION):
            found.append(word.removeprefix(_OUT_OPTION))
    return found


def read(command: Command) -> list[str]:
    """Return the relative paths that a command reads: with a directory or a suffix of ours."""
    out = set(written(command))
    found = []
    for word in command.words:
        if word.startswith(_MODEL_OPTION):
            continue
        for part in re.split(r"[=,]", word):
            is_path = _PATH.fullmatch(part) and ("/" in part or _has_suffix(part))
            if is_path and part not in out and not _READERS.match(part):
                found.append(part)
    return found


def _has_suffix(word: str) -> bool:
    return word.endswith((".yaml", ".jsonl", ".npz", ".parquet", ".py", ".csv"))
