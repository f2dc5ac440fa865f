"""What ``make release`` refuses: versions that differ, a changelog without its section."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY
from tools import release

GOOD = (
    "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-11-25\n\n### Added\n\n* A "
    "thing.\n\n## 1.1.0\n\nOld.\n"
)


def test_this_checkout_names_its_version_once_and_has_its_section() -> None:
    version = release.version_of(REPOSITORY)
    assert not list(release.version_problems(REPOSITORY, version))
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"\n## {version} - 20" in text
    after = text[text.index(f"\n## {version} - ") :].split("\n## ")[1]
    assert len(after.splitlines()) <= 90


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("* A thing.", "* A thing.", None),
        ("## Unreleased\n", "## Unreleased\n\n* More.\n", "must be an empty Unreleased"),
        ("## Unreleased\n\n", "", "must be an empty Unreleased"),
        ("1.2.0 - 2026-11-25", "1.2.0", "as ## 1.2.0 - YYYY-MM-DD, not '1.2.0'"),
        ("2026-11-25", "2026-13-25", "as ## 1.2.0 - YYYY-MM-DD"),
        ("* A thing.", "", "1.2.0 has no entries"),
        ("1.2.0 -", "1.2.0.1 -", "1.2.0 must be the one section"),
        ("1.1.0", "1.2.0", "1.2.0 must be the one section"),
    ],
)
def test_the_changelog_has_the_section(before: str, after: str, problem: str | None) -> None:
    assert before in GOOD
    found = list(release.changelog_problems(GOOD.replace(before, after, 1), "1.2.0"))
    assert bool(found) == bool(problem)
    assert not problem or any(problem in one for one in found)


def test_versions_that_differ_are_found(tmp_path: Path) -> None:
    (tmp_path / "megatron_dcpo").mkdir()
    for name in ("megatron_dcpo/__init__.py", "CITATION.cff", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    version = release.version_of(tmp_path)
    assert not list(release.version_problems(tmp_path, version))
    cited = tmp_path / "CITATION.cff"
    cited.write_text(cited.read_text().replace(f"version: {version}", "version: 0.0.1"))
    assert list(release.version_problems(tmp_path, version)) == [
        f"CITATION.cff has the version 0.0.1, megatron_dcpo/__init__.py {version}"
    ]
    with (tmp_path / "setup.py").open("a") as file:
        file.write(f'version="{version}"\n')
    assert "setup.py names a version" in list(release.version_problems(tmp_path, version))[1]


def test_what_is_not_committed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {"status": " M README.md\n?? new.py\n", "tag": "v1.2.0\n"}
    monkeypatch.setattr(release, "_output", lambda _, verb, *__: printed[verb])
    assert list(release.git_problems("1.2.0")) == [
        "2 files are not committed, README.md among them",
        "the tag v1.2.0 exists; raise __version__",
    ]
    monkeypatch.setattr(release, "_output", lambda *_: "")
    assert not list(release.git_problems("1.2.0"))
