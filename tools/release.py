"""Check what must be true of a release, and say which tag to make. ``make release`` runs it.

Tree, version, changelog, documentation, digests of the long suites, a wheel in an empty
environment. Uses git and pip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (
    ["check_docs.py"],
    ["options_page.py", "--check"],
    ["tested.py", "sandbox"],
    ["tested.py", "fuzz"],
)


def version_of(root: Path) -> str:
    (found,) = re.findall(
        r'^__version__ = "([^"]+)"$', (root / "megatron_dcpo/__init__.py").read_text(), re.MULTILINE
    )
    return found


def version_problems(root: Path, version: str) -> Iterator[str]:
    cited = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited != [version]:
        yield (
            f"CITATION.cff has the version {', '.join(cited) or 'none'}, "
            f"megatron_dcpo/__init__.py {version}"
        )
    if re.search(r"version\s*=\s*[\"']\d", (root / "setup.py").read_text()):
        yield "setup.py names a version; it must read that of megatron_dcpo/__init__.py"


def changelog_problems(text: str, version: str) -> Iterator[str]:
    """The first section is an empty "Unreleased", the second ``## VERSION - DATE`` with entries."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    if not sections or sections[0].strip() != "Unreleased":
        yield (
            "CHANGELOG.md: the first section must be an empty Unreleased; move its "
            "lines into the release"
        )
    of_version = [
        section for section in sections if re.match(rf"{re.escape(version)}\b(?!\.)", section)
    ]
    if len(of_version) != 1 or sections[1:2] != of_version:
        yield f"CHANGELOG.md: {version} must be the one section below Unreleased"
    for section in of_version:
        heading, _, entries = section.partition("\n")
        if not re.fullmatch(
            rf"{re.escape(version)} - 20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", heading
        ):
            yield f"CHANGELOG.md: write the heading as ## {version} - YYYY-MM-DD, not {heading!r}"
        if not re.search(r"^\* ", entries, flags=re.MULTILINE):
            yield f"CHANGELOG.md: the section of {version} has no entries"


def git_problems(version: str) -> Iterator[str]:
    if changed := _output("git", "status", "--porcelain").splitlines():
        yield f"{len(changed)} files are not committed, {changed[0].split()[-1]} among them"
    if _output("git", "tag", "--list", f"v{version}").strip():
        yield f"the tag v{version} exists; raise __version__"


def wheel_problems(version: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        pip, venv = (
            [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"],
            f"{place}/venv",
        )
        _output(
            "git", "archive", "--output", f"{place}/source.zip", "HEAD"
        )  # not the checkout: build/ may be old
        shutil.unpack_archive(f"{place}/source.zip", f"{place}/source")
        subprocess.run(
            [*pip, "wheel", "--no-deps", "--wheel-dir", place, f"{place}/source"], check=True
        )
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        (wheel,), pins = Path(place).glob("*.whl"), f"{place}/source/constraints.txt"
        subprocess.run(
            [*pip, "--python", f"{venv}/bin/python", "install", "-c", pins, str(wheel)], check=True
        )
        for verb, expected in (("--version", version), ("doctor", "")):
            command = [f"{venv}/bin/python", "-I", f"{venv}/bin/dcpo", verb]
            done = subprocess.run(command, cwd=place, capture_output=True, text=True)
            if done.returncode or expected not in done.stdout:
                yield (
                    f"dcpo {verb} of the wheel: status "
                    f"{done.returncode}\n{done.stdout}{done.stderr}"
                )


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    version = version_of(ROOT)
    problems = [*git_problems(version), *version_problems(ROOT, version)]
    problems += changelog_problems((ROOT / "CHANGELOG.md").read_text(), version)
    for script, *arguments in CHECKS:
        if subprocess.run([sys.executable, f"tools/{script}", *arguments], cwd=ROOT).returncode:
            problems.append(f"tools/{script} {' '.join(arguments)} fails")
    problems += [] if problems else wheel_problems(version)  # minutes
    print(
        "\n".join(problems) or f"ready: git tag -a v{version} -m 'Megatron-DCPO {version}'",
        file=sys.stderr,
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
