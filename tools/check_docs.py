"""Every link resolves, and no line of prose is longer than 100 columns. ``make lint`` runs it.

Checked: links and anchors of Markdown files; a page of ``docs`` and its anchor wherever Python,
shell or YAML names one; test names in backquotes (``test_...``) exist. Tables, code blocks and
lines of one long word may be longer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NOT_TESTS = {"test_list", "test_seconds", "test_runner"}  # a column of MBPP, an option, a module
CITED = re.compile(r"\bdocs/([\w/]+\.md)(?:#([\w-]+))?")


def main() -> int:
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    files = [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]
    sources = "\n".join(
        file.read_text() for file in files if file.name.startswith("test_") and file.suffix == ".py"
    )
    tests = set(re.findall(r"def (test_\w+)", sources))
    problems = []
    for file in files:
        if file.suffix == ".md":
            problems += check_markdown(file, tests)
        elif file.suffix in (".py", ".sh", ".sbatch", ".yaml", ".toml"):
            problems += check_citations(file)
    print("\n".join(problems))
    return int(bool(problems))


def check_markdown(file: Path, tests: set[str]) -> list[str]:
    """Problems of one page."""
    problems, in_code = [], False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        where = f"{file.relative_to(ROOT)}:{number}"
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code:
            continue
        if (
            len(line) > COLUMNS
            and not line.startswith(("|", "#", "<"))
            and " " in line.strip("-* ")
        ):
            problems.append(f"{where}: {len(line)} columns, at most {COLUMNS}")
        for target in LINK.findall(line):
            if "://" not in target and not resolves(file.parent, target, file):
                problems.append(f"{where}: {target} leads nowhere")
        for name in re.findall(r"`(test_\w+?)(?:\.py)?`", line):
            if name not in tests | NOT_TESTS and not list(ROOT.glob(f"tests/**/{name}.py")):
                problems.append(f"{where}: {name} does not exist")
    return problems


def check_citations(file: Path) -> list[str]:
    """Pages of the documentation that source files name."""
    problems = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        for page, anchor in CITED.findall(line):
            if not resolves(ROOT, f"docs/{page}" + (f"#{anchor}" if anchor else ""), file):
                problems.append(
                    f"{file.relative_to(ROOT)}:{number}: docs/{page}#{anchor} leads nowhere"
                )
    return problems


def resolves(folder: Path, target: str, page: Path) -> bool:
    """Whether a relative link names a file, and its anchor one of the file's headings."""
    name, _, anchor = target.partition("#")
    path = folder / name if name else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in anchors(path)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


if __name__ == "__main__":
    sys.exit(main())
