"""Every benchmark against its alternative: ``python benchmarks/run.py [NAME ...] --json``.

NAME: a file of this directory with ``measurements()`` (default: all). Each runs in a process of its
own. One line per measurement; ``--json``: one JSON object. ``RESULTS.md`` is written anew: what was
not measured now is kept from before. The exit status is 1 when a benchmark failed or two
alternatives computed different things; a goal that is not met is a result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measurement import ENVIRONMENT, REPOSITORY, Measurement

FOLDER = Path(__file__).resolve().parent
_RAW = "```json"


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks (default: all of them)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per measurement")
    parser.add_argument("--list", action="store_true", help="only the names")
    args = parser.parse_args(argv)
    known = benchmarks(folder)
    unknown = [name for name in args.names if name not in known]
    if unknown:
        print(
            f"run.py: error: no benchmark is called {unknown[0]}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    if args.list:
        print("\n".join(known))
        return 0
    failed = False
    for name in args.names or known:
        lines = []
        for line in measure(known[name]):
            failed |= not line["same"]
            line |= {"benchmark": name, "commit": _commit(), "load": round(os.getloadavg()[0], 1)}
            lines.append(line)
            print(
                json.dumps({k: v for k, v in line.items() if k != "raw"})
                if args.json
                else _text(line),
                flush=True,
            )
        write_results(folder / "RESULTS.md", lines)
    return int(failed)


def benchmarks(folder: Path) -> dict[str, Path]:
    """By name, the files that have measurements."""
    found = (path for path in sorted(folder.glob("*.py")) if path.name != Path(__file__).name)
    return {path.stem: path for path in found if "\ndef measurements(" in path.read_text()}


def measure(script: Path) -> Iterator[dict[str, Any]]:
    """The lines of one benchmark, run in its own process; one that fails ends with a line that says
    so.
    """
    command = f"python benchmarks/run.py {script.stem}"
    helper = Path(__file__).with_name("measurement.py")
    process = subprocess.Popen(
        [sys.executable, str(helper), str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    assert process.stdout is not None
    with process:
        for text in process.stdout:
            yield Measurement(**json.loads(text)).line(command)
    if process.returncode:
        reason = f"the benchmark ended with status {process.returncode}; its error is on stderr"
        yield Measurement(script.stem, None, None, "", "", same=False, reason=reason).line(command)


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    done = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    status = [
        *git,
        "status",
        "--porcelain",
        "-uno",
        "--",
        ":!benchmarks/RESULTS.md",
    ]  # which this program writes
    changed = subprocess.run(status, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def _text(line: dict[str, Any]) -> str:
    goal = "no goal" if line["goal"] is None else f"goal {line['goal_is']} {line['goal']:g}"
    met = {True: "met", False: "NOT MET", None: "not judged"}[line["met"]]
    if line["ratio"] is None:
        return f"{line['name']}: {line['reason']} ({met})"
    return (
        f"{line['name']}: {line['ours']:g} against {line['other']:g} {line['unit']} of "
        f"{line['other_is']}, "
        f"ratio {line['ratio']:g}, {goal}: {met}"
        + "".join(f"; {remark}" for remark in _remarks(line))
    )


def _remarks(line: dict[str, Any]) -> list[str]:
    """The reason, and of a goal that is not met the least ratio that is possible."""
    bound = (
        f"not below {line['bound']:g}: {line['bound_is']}"
        if "bound" in line and not line["met"]
        else ""
    )
    return [remark for remark in (line["reason"], bound) if remark]


def write_results(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The new lines and those of other benchmarks that were there before, as a table and as raw
    numbers.
    """
    measured = {line["benchmark"] for line in lines}
    kept = [line for line in read_results(path) if line["benchmark"] not in measured]
    rows = sorted([*kept, *lines], key=lambda line: line["benchmark"])
    table = "\n".join(_row(line) for line in rows)
    raw = "\n".join(json.dumps(line) for line in rows)
    path.write_text(
        f"""# Results

Written by `python benchmarks/run.py`, last on {time.strftime("%Y-%m-%d")}.
{_machine()}.
A ratio is ours / other. `+` behind a commit: with changes that were not committed.

| name | ours | other | unit | other is | ratio | goal | met | commit |
|---|---|---|---|---|---|---|---|---|
{table}

## Raw numbers

{_RAW}
{raw}
```
"""
    )


def read_results(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    raw = path.read_text().partition(_RAW + "\n")[2].partition("\n```")[0]
    return [json.loads(line) for line in raw.splitlines()]


def _row(line: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:g}"

    goal = "-" if line["goal"] is None else f"{line['goal_is']} {line['goal']:g}"
    met = {True: "yes", False: "**no**", None: "-"}[line["met"]]
    if remarks := _remarks(line):
        met += f": {'; '.join(remarks)}"
    numbers = [
        shown(line["ours"]),
        shown(line["other"]),
        line["unit"],
        line["other_is"],
        shown(line["ratio"]),
    ]
    return (
        "| "
        + " | ".join([line["name"], *numbers, goal, met.replace("|", "/"), line["commit"]])
        + " |"
    )


def _machine() -> str:
    cpus = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [
        platform.machine()
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    return f"{cores} cores of {cpus[0]}, {memory:.0f} GiB, Python {python}"


if __name__ == "__main__":
    raise SystemExit(main())
