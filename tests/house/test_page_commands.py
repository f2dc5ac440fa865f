"""Every ``dcpo`` command of README and of the pages can be typed, in the order in which it stands:
its options exist, and what it reads is in the repository, was written by an earlier command of the
page, is shown on the page, or is the reader's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_dcpo.cli import _parsed
from tests.helpers.page_commands import PAGES, Page, read, read_page, written
from tests.helpers.paths import REPOSITORY

WITH_COMMANDS = [page for page in map(read_page, PAGES) if page.commands]
# what the reader brings, by page
READERS_OWN = {
    "docs/algorithms.md": {"my_run.yaml"},
    "docs/conversion.md": {"runs/x/checkpoints"},
    "docs/evaluate.md": {"pairs.jsonl", "runs/other", "runs/train/samples.jsonl"},
    "docs/metrics.md": {"runs/eval", "runs/fit/samples.jsonl", "runs/other"},
    "docs/is_it_worth_anything.md": {"train.jsonl", "runs/eval/samples.jsonl"},
    "docs/serve.md": {"train.jsonl", "RUN"},
    "docs/supervised.md": {"runs/fit/samples.jsonl", "runs/eval/samples.jsonl"},
}


def run_dir_of(config: Path) -> str:
    """The directory in which a shipped configuration leaves its run."""
    found = yaml.safe_load(config.read_text())
    if "run_dir" in found or "base" not in found:
        return str(found.get("run_dir", ""))
    return run_dir_of(config.parent / found["base"])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_options_exist(page: Page) -> None:
    for command in page.commands:
        if command.words[0] == "launch":
            continue  # its own words are checked by the verb behind --
        try:
            _parsed(list(command.words))
        except SystemExit:
            pytest.fail(str(command))


# this page is run as it stands, with the files that it shows, by test_bring_your_own
NOT_RUN = [page for page in WITH_COMMANDS if page.name != "docs/bring_your_own.md"]


@pytest.mark.parametrize("page", NOT_RUN, ids=lambda page: page.name)
def test_what_is_read_is_there(page: Page) -> None:
    there = set(page.shown) | READERS_OWN.get(page.name, set())
    missing = []
    for command in page.commands:
        for path in read(command):
            made = any(path == made or path.startswith(f"{made}/") for made in there)
            if not made and not (REPOSITORY / path).exists():
                missing.append(f"{command}: {path}")
            if path.endswith(".yaml") and (REPOSITORY / path).is_file():
                there.add(run_dir_of(REPOSITORY / path))
        there.update(written(command))
    assert not missing


def test_there_are_pages_to_look_at() -> None:
    assert "README.md" in [page.name for page in WITH_COMMANDS]
    assert sum(len(page.commands) for page in WITH_COMMANDS) > 40
