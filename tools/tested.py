#!/usr/bin/env python3
"""Tell whether a long suite last passed with the sources as they are.

    python tools/tested.py SUITE            status 0 if it did, else 1 and the files that differ
    python tools/tested.py SUITE --record   write the digests of the sources to
    tests/SUITE/tested.sha256

The sources are the suite's tests, the modules of the package that they import, and the subpackage
of the suite's name.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# suites, tests elsewhere that are run with them, and parsers that are more than one file, whose
# imports count too
SUITES = {
    "sandbox": [],
    "fuzz": ["tests/unit/judging/test_blocks.py", "megatron_dcpo/architectures/config_json.py"],
}


def sources(suite: str) -> list[Path]:
    """Return the files below ``ROOT`` on which the outcome of the suite depends directly."""
    tests = [*(ROOT / "tests" / suite).rglob("*.py"), *(ROOT / name for name in SUITES[suite])]
    found = {*tests, *(ROOT / "megatron_dcpo" / suite).rglob("*.py")}
    for test in tests:
        for node in ast.walk(ast.parse(test.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_dcpo"):
                module = ROOT / node.module.replace(".", "/")
                places = [module, *(module / alias.name for alias in node.names)]
                found |= {
                    path
                    for place in places
                    for path in (place.with_suffix(".py"), place / "__init__.py")
                }
    return sorted(path for path in found if path.is_file())


def digests(suite: str) -> dict[str, str]:
    """Return the SHA-256 of each source by its path in the checkout."""
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sources(suite)
    }


def recorded(suite: str) -> dict[str, str]:
    """Return what was written when the suite last passed; nothing where it never was."""
    record = ROOT / "tests" / suite / "tested.sha256"
    lines = record.read_text().splitlines() if record.exists() else []
    return {path: digest for digest, path in (line.split(maxsplit=1) for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    now = digests(arguments.suite)
    if arguments.record:
        lines = "".join(f"{digest}  {path}\n" for path, digest in now.items())
        (ROOT / "tests" / arguments.suite / "tested.sha256").write_text(lines)
        return 0
    before = recorded(arguments.suite)
    changed = sorted(
        path for path in now.keys() | before.keys() if now.get(path) != before.get(path)
    )
    if changed:
        print(
            f"changed since the whole {arguments.suite} suite passed: {', '.join(changed)}",
            file=sys.stderr,
        )
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
