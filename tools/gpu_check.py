"""What ``tools/gpu_check.sh`` asks on the machine with the GPU. Its standard library suffices.

gpu_check.py missing WHEELS             names of the wheels whose package this Python lacks
gpu_check.py summary JUNIT.XML COMMIT   what the tests said
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

VERSIONS = (
    "torch",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "flash-attn",
)


def installed(name: str) -> str | None:
    """The version of a package, by whatever spelling; None where it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(
    wheels: Iterable[str],
    pins_always: Iterable[str],
    version_of: Callable[[str], str | None],
) -> list[str]:
    """File names of the wheels to install: packages that are absent, and those of ``pins_always``
    at another version.
    """
    chosen = []
    for wheel in sorted(wheels):
        name, version = wheel.split("-")[:2]
        found = version_of(name.replace("_", "-"))
        if found is None or (canonical(name) in set(pins_always) and found != version):
            chosen.append(wheel)
    return chosen


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# one needs the exact version of another, or is read at one version: taken from the archive unless
# they are the same
TOGETHER = (
    "megatron-core",
    "pydantic",
    "pydantic-core",
    "typing-extensions",
    "typing-inspection",
    "omegaconf",
)
TOGETHER += (
    "antlr4-python3-runtime",
    "math-verify",
    "latex2sympy2-extended",
    "pytest",
    "pytest-timeout",
    "pluggy",
)


def machine() -> dict[str, str]:
    """The card, and versions of what the tests stand on."""
    facts = {"python": sys.version.split()[0]} | {
        name: installed(name) or "not installed" for name in VERSIONS
    }
    try:
        import torch
    except ImportError:
        return {"card": "unknown: no torch"} | facts
    if not torch.cuda.is_available():
        return {"card": "no CUDA device"} | facts
    cards = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())
    ]
    named = Counter(f"{card.name}, {card.total_memory / 1e9:.0f} GB" for card in cards)
    card = "; ".join(f"{number} x {name}" for name, number in named.items())
    return {"card": card, "cuda": str(torch.version.cuda)} | facts


def summary(junit: str, facts: Mapping[str, str], commit: str) -> str:
    """Passed, failed, skipped with reasons, the machine, memory against the plan. ``junit``:
    pytest's XML.
    """
    passed, failed, reasons, memory = 0, [], Counter[str](), []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        problem, skipped = case.find("failure"), case.find("skipped")
        problem = case.find("error") if problem is None else problem
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        if problem is not None:
            failed.append(
                f"{name}: {(problem.get('message') or '').strip().splitlines()[:1]}"
            )
        elif skipped is not None:
            reasons[skipped.get("message") or "no reason"] += 1
        else:
            passed += 1
        memory += [
            p.get("value", "")
            for p in case.iter("property")
            if p.get("name") == "memory against the plan"
        ]
    lines = [
        f"gpu_check: {passed} passed, {len(failed)} failed, {sum(reasons.values())} skipped",
        f"commit: {commit}",
    ]
    lines += [f"{name}: {value}" for name, value in facts.items()]
    lines += [f"failed: {one}" for one in failed]
    lines += [
        f"skipped: {number} x {reason}" for reason, number in sorted(reasons.items())
    ]
    lines += [
        f"peak memory, measured/planned: {one}" for one in memory or ["not measured"]
    ]
    if not passed and not failed:
        lines.append("every test was skipped: nothing is known of a GPU")
    return "\n".join(lines)


def main() -> None:
    verb, *arguments = sys.argv[1:]
    if verb == "missing":
        wheels = (path.name for path in Path(arguments[0]).glob("*.whl"))
        print("\n".join(missing(wheels, TOGETHER, installed)))
    else:
        junit, commit = (Path(argument).read_text().strip() for argument in arguments)
        print(summary(junit, machine(), commit))


if __name__ == "__main__":
    main()
