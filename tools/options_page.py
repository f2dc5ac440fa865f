"""docs/options.md from the declarations of the options: ``options_page.py`` writes it, ``--check``
compares it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from omegaconf import OmegaConf  # noqa: E402

from megatron_dcpo.config.reference import (  # noqa: E402
    EVALUATE_SECTIONS,
    SUPERVISED_SECTIONS,
    Option,
    options,
    sections,
)
from megatron_dcpo.objectives.options import BLOCK_OPTIONS, OWN_OPTIONS  # noqa: E402

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options

Every option of a run: `section.key` in the YAML file, `section.key=value` on the command line.
`dcpo config SECTION` prints the same. `tools/options_page.py` writes this page from the
declarations in `config/sections.py`, `config/parallel.py`, `objectives/options.py` and of the
methods; change them, not the page.

*Set by* names a shipped example that sets the option (–: none does). Three sections are passed on
by the names of others, who document them: `parallel.megatron`
([Megatron's fields](scaling.md#options-of-megatron)), `rollout.vllm`
([vLLM's engine arguments](rollout.md#options-of-vllm)), and `data.path[].options` (a task's of
Reasoning Gym).
"""
OF_SECTION = {
    "": "At the top of the file, next to the sections.",
    "objective": "The method, and what its formulas read ([algorithms](algorithms.md)). Each "
    "`X_reasoning` and\n"
    "`X_confidence` may be written as `X`, for both. An option that the method does not read is "
    "refused.",
    "evaluate": "`dcpo evaluate` reads `judging` as above, and these sections; each flag is a "
    "shorthand for an option\n([evaluation](evaluation.md)).",
    "sft.data": "`dcpo sft` reads `model`, `parallel`, `optimizer` and `logging` as above, and\n"
    "these sections ([supervised training](supervised.md)). The demonstrations, and how they\n"
    "become tokens.",
    "data.path[]": "Where `data.path` is a list, each source has these "
    "([mixtures](bring_your_own.md#data)).",
}


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print(
                "docs/options.md is not what the options are declared as; run python "
                "tools/options_page.py"
            )
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def page() -> str:
    """The text of the page."""
    examples = set_by_examples()
    parts = [HEAD]
    for section, about in sections().items():
        title = f"`{section}`" if section else "Outside of sections"
        if section in EVALUATE_SECTIONS:
            inner = section.removeprefix("evaluate").removeprefix(".")
            title = f"`dcpo evaluate`: `{inner}`" if inner else "`dcpo evaluate`"
        if section in SUPERVISED_SECTIONS:
            title = f"`dcpo sft`: `{section.removeprefix('sft.')}`"
        parts.append(
            f"## {title}\n\n{OF_SECTION.get(section) or wrapped(about.replace('``', '`') + '.')}\n"
        )
        readers = section == "objective"
        parts.append(
            "| option | type | default | meaning |"
            + (" read by |" if readers else "")
            + " set by |"
        )
        parts.append("|---|---|---|---|" + ("---|" if readers else "") + "---|")
        for option in options(section):
            cells = [
                f"`{option.name.removeprefix(section + '.')}`",
                option.kind,
                shown(option),
                linked(option.meaning),
            ]
            cells += [", ".join(option.methods) or "all"] if readers else []
            parts.append(
                "| "
                + " | ".join(
                    cell.replace("|", "\\|") for cell in [*cells, where(option.name, examples)]
                )
                + " |"
            )
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def wrapped(text: str) -> str:
    """Text in lines of at most 100 columns."""
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False))


def shown(option: Option) -> str:
    """The default; what is no word of ours as code."""
    return (
        option.default
        if option.default in ("required", "not set", "empty")
        else f"`{option.default}`"
    )


def linked(meaning: str) -> str:
    """A meaning whose page is a link."""
    return re.sub(r"\(docs/(\w+)(\.md#[\w-]+)\)", r"([\1](\1\2))", meaning)


def set_by_examples() -> dict[str, list[str]]:
    """The examples, by their names below ``examples``, in which an option is set: not by their
    bases.
    """
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        if "elsewhere" in file.parts:  # of other programs
            continue
        for name in names(OmegaConf.to_container(OmegaConf.load(file))):
            section = f"sft.{name.partition('.')[0]}"
            if file.name == "sft.yaml" and section in SUPERVISED_SECTIONS:
                name = f"sft.{name}"
            found.setdefault(name, []).append(str(file.relative_to(ROOT / "examples")))
    return found


def names(value: object, prefix: str = "") -> Iterator[str]:
    """The dotted names of everything set; of the elements of a list with ``[]``. A short name
    stands for both blocks.
    """
    if isinstance(value, list):
        value = {
            f"{prefix}[].{key}": one
            for source in value
            if isinstance(source, dict)
            for key, one in source.items()
        }
        yield from (*value, prefix)
    elif isinstance(value, dict):
        if prefix:
            yield prefix
        for key, one in value.items():
            yield from names(one, f"{prefix}.{key}" if prefix else str(key))
    else:
        section, _, key = prefix.rpartition(".")
        if section == "objective" and key in BLOCK_OPTIONS:
            yield from (f"{prefix}_reasoning", f"{prefix}_confidence")
        elif section == "objective.options" and key in OWN_OPTIONS:
            yield f"objective.{key}"
        else:
            yield prefix


def where(name: str, examples: dict[str, list[str]]) -> str:
    """An example that sets an option, of the quickstart or Qwen3-8B where one of these does."""
    setting = sorted(
        examples.get(name, ()),
        key=lambda file: (not file.startswith(("quickstart/", "qwen3_8b/")), file),
    )
    return f"[{setting[0].removesuffix('.yaml')}](../examples/{setting[0]})" if setting else "–"


if __name__ == "__main__":
    sys.exit(main())
