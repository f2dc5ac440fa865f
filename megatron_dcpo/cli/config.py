"""``dcpo config [SECTION]``: the options of a run, and the shipped examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

# in a checkout; a wheel has none
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "config",
        help=VERBS["config"],
        description="Print the sections of a configuration, or the options of one: type, default, "
        "meaning.",
    )
    parser.add_argument(
        "section",
        nargs="?",
        metavar="SECTION",
        help="a section, or one option such as rollout.group_size",
    )
    parser.add_argument(
        "--example",
        nargs="?",
        const="",
        metavar="NAME",
        help="print a shipped example, or without NAME the names of all",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.example is not None and args.section:
        raise UserError(f"{args.section} and --example: print one of them at a time")
    if args.example is not None:
        print(example(args.example), end="")
    else:
        lines = described(args.section) if args.section else overview()
        print("\n".join(lines))
    return 0


def overview() -> list[str]:
    """Return the options outside all sections, and the list of sections."""
    from megatron_dcpo.config.reference import sections

    listed = []
    for name, text in sections().items():
        if name:
            listed.append(f"{name:18} {text.replace('``', '')}")
    return [
        *described(""),
        "",
        *listed,
        "",
        "dcpo config SECTION prints its options; docs/options.md has them all",
    ]


def described(name: str) -> list[str]:
    """Return the description of the options of the section ``name``, or of the option with that
    name. Raises :class:`UserError`.
    """
    from megatron_dcpo.config.reference import options, sections

    selected = list(options(name)) if name in sections() else []
    if not selected:
        by_name = {}
        for section in sections():
            for option in options(section):
                by_name[option.name] = option
        if name not in by_name:
            known = [*filter(None, sections()), *by_name]
            raise UserError(f"there is no section or option {name!r}{did_you_mean(name, known)}")
        selected = [by_name[name]]
    lines = []
    for option in selected:
        lines.append(f"{option.name}: {option.kind} (default {option.default})")
        lines.append(f"    {option.meaning}")
        if option.methods:
            lines.append(f"    read by {', '.join(option.methods)}")
    return [line.replace("(default required)", "(required)") for line in lines]


def example(name: str) -> str:
    """Return the text of a shipped example, or the names of all examples. Raises
    :class:`UserError` if there is no such example.
    """
    files: dict[str, Path] = {}
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        if "elsewhere" in file.parts:  # of other programs
            continue
        files[str(file.relative_to(EXAMPLES).with_suffix(""))] = file
    if not files:
        raise UserError(
            "the examples are in the directory examples/ of the repository, not in an installed "
            "package"
        )
    if not name:
        return "".join(f"{known}\n" for known in files)
    known = name.removesuffix(".yaml").removeprefix("examples/")
    if known not in files:
        raise UserError(
            f"there is no example {name!r}{did_you_mean(known, files)}; dcpo config --example "
            "lists them"
        )
    return files[known].read_text()
