"""``dcpo config [SECTION]``: the options of a run, and the shipped examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

EXAMPLES = (
    Path(__file__).resolve().parents[2] / "examples"
)  # of a checkout; a wheel has none


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
        help="a section, or one option: rollout.group_size",
    )
    parser.add_argument(
        "--example",
        nargs="?",
        const="",
        metavar="NAME",
        help="print a shipped example; without NAME their names",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.example is not None:
        print(example(args.example), end="")
    else:
        print("\n".join(described(args.section) if args.section else overview()))
    return 0


def overview() -> list[str]:
    """Return what sections there are, and the options that are in none."""
    from megatron_dcpo.config.reference import sections

    listed = [
        f"{name:18} {text.replace('``', '')}"
        for name, text in sections().items()
        if name
    ]
    return [
        *described(""),
        "",
        *listed,
        "",
        "dcpo config SECTION prints its options; docs/options.md has them all",
    ]


def described(name: str) -> list[str]:
    """Return the options of the section ``name``, or the option of that name. Raises
    :class:`UserError`.
    """
    from megatron_dcpo.config.reference import options, sections

    found = options(name) if name in sections() else []
    if not found:
        every = {
            option.name: option for section in sections() for option in options(section)
        }
        if name not in every:
            raise UserError(
                "there is no section or option "
                f"{name!r}{did_you_mean(name, [*filter(None, sections()), *every])}"
            )
        found = [every[name]]
    lines = []
    for option in found:
        lines += [
            f"{option.name}: {option.kind} (default {option.default})",
            f"    {option.meaning}",
        ]
        lines += [f"    read by {', '.join(option.methods)}"] if option.methods else []
    return [line.replace("(default required)", "(required)") for line in lines]


def example(name: str) -> str:
    """Return the text of a shipped example, or the names of all. Raises :class:`UserError` where it
    is not here.
    """
    files = {
        str(file.relative_to(EXAMPLES).with_suffix("")): file
        for file in sorted(EXAMPLES.rglob("*.yaml"))
    }
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
