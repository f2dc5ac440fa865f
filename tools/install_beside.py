"""What ``tools/install_beside.sh`` asks of an image's environment.

* ``kept``: its packages, as constraints
* ``check SETUP.PY``: whether those that this package needs suit it, and one another
* ``missing CONSTRAINTS.TXT KEPT``: requirements that are not there, those of what was added too
* ``same KEPT``: whether every package of KEPT is still there at its version
* ``note KEPT``: leaves KEPT beside this package's metadata, where ``dcpo doctor`` finds it
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = "megatron-dcpo"


def environment(path: str | None) -> dict[str, metadata.Distribution]:
    """Return the distributions by their canonical names."""
    found = metadata.distributions(path=[path]) if path else metadata.distributions()
    return {
        canonicalize_name(one.metadata["Name"]): one
        for one in reversed(list(found))
        if one.metadata["Name"]
    }


def metadata_of(package: metadata.Distribution) -> Path:
    """Return the directory of a package's metadata, for files that ``read_text`` finds."""
    name = f"{package.metadata['Name'].replace('-', '_')}-{package.version}.dist-info"
    return Path(str(package.locate_file(name)))


def suits(requirement: Requirement, version: str) -> bool:
    """Return whether a version is in range; an image's torch is an alpha with a local part
    (2.10.0a0+b558c986e8.nv25.11), which counts as the release.
    """
    return requirement.specifier.contains(Version(version).base_version)


def wanted(
    name: str, there: dict[str, metadata.Distribution], seen: set[str]
) -> Iterator[Requirement]:
    """Yield the requirements of a distribution and of what they name in turn. ``seen``: which are
    not asked.
    """
    seen.add(name)
    extra = "train" if name == ROOT else ""
    for text in there[name].requires or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield requirement
        other = canonicalize_name(requirement.name)
        if other in there and other not in seen:
            yield from wanted(other, there, seen)


def missing(there: dict[str, metadata.Distribution], constraints: str, kept: str) -> list[str]:
    """Return what to add, at the version that this release is tested with where it has one. What an
    image brings (``kept``) is complete, or meant to be without what its metadata names.
    """
    pins = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.M)
    }
    lacking = {}
    for requirement in wanted(ROOT, there, {line.partition("==")[0] for line in kept.split()}):
        name = canonicalize_name(requirement.name)
        if name not in there:
            lacking[name] = (
                f"{requirement.name}=={pins[name]}"
                if name in pins
                else f"{requirement.name}{requirement.specifier}"
            )
    return sorted(lacking.values())


def unsuitable(there: dict[str, metadata.Distribution], pyproject: str) -> list[str]:
    """Return what is there and out of the range of the dependencies or of the extras ``train`` and
    ``gpu``, or, of Transformer Engine, of the Megatron-core that is there.
    """
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    ours = map(Requirement, [*project["dependencies"], *extras["train"], *extras["gpu"]])
    asked = [("this release", one) for one in ours if one.marker is None or one.marker.evaluate()]
    if megatron := there.get("megatron-core"):
        theirs = [
            one
            for one in map(Requirement, megatron.requires or [])
            if one.name == "transformer-engine"
        ]
        asked += [(f"Megatron-core {megatron.version}", one) for one in theirs]
    problems = []
    for who, requirement in asked:
        found = there.get(canonicalize_name(requirement.name))
        if found is not None and not suits(requirement, found.version):
            problems.append(
                f"the image has {requirement.name} {found.version}, {who} needs "
                f"{requirement.specifier}"
            )
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("kept", "check", "missing", "same", "note"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("kept", nargs="?", type=Path)
    parser.add_argument("--path")
    args = parser.parse_args()
    there = environment(args.path)
    pins = {f"{name}=={one.version}" for name, one in there.items() if name != ROOT}
    text = args.file.read_text() if args.file else ""
    if args.verb == "kept":
        print("\n".join(sorted(pins)))
    elif args.verb == "missing":
        print("\n".join(missing(there, text, args.kept.read_text())))
    elif args.verb == "note":
        metadata_of(there[ROOT]).joinpath("kept.txt").write_text(text)
    else:
        problems = (
            unsuitable(there, text)
            if args.verb == "check"
            else [f"{p} is gone" for p in set(text.split()) - pins]
        )
        if problems:
            print(
                f"install_beside.sh: {'; '.join(sorted(problems))}; take another image",
                file=sys.stderr,
            )
            sys.exit(2)


if __name__ == "__main__":
    main()
