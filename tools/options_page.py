"""docs/options.md from the declarations of the options: ``options_page.py`` writes it, ``--check``
compares it.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from omegaconf import OmegaConf  # noqa: E402

from megatron_dcpo.cli.evaluate_options import SHORTHANDS  # noqa: E402
from megatron_dcpo.config.reference import (  # noqa: E402
    EVALUATE_SECTIONS,
    SUPERVISED_SECTIONS,
    Option,
    options,
    sections,
)
from megatron_dcpo.objectives import find_method  # noqa: E402
from megatron_dcpo.objectives.options import BLOCK_OPTIONS, OWN_OPTIONS, ObjectiveConfig  # noqa: E402
from megatron_dcpo.objectives.presets import PRESETS  # noqa: E402

Setters = dict[str, list[str]]  # an option -> what sets it, seen from docs/

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options

Every option of a run: `section.key` in the YAML file, `section.key=value` on the command line.
`dcpo config SECTION` prints the same. `tools/options_page.py` writes this page from the
declarations in `config/sections.py`, `config/parallel.py`, `objectives/options.py` and of the
methods; change them, not the page.

*Set by* names a shipped example that sets the option, by itself or by a preset, or the part of the
documentation with a recipe that a test runs (–: none does). Three sections are passed on by the
names of others, who document them: `parallel.megatron`
([Megatron's fields](layouts.md#options-of-megatron)), `rollout.vllm`
([vLLM's engine arguments](engines.md#options-of-vllm)), and `data.path[].options` (a task's of
Reasoning Gym).
"""
OF_SECTION = {
    "": "At the top of the file, next to the sections.",
    "objective": "The method, and what its formulas read ([algorithms](algorithms.md)). Each "
    "`X_reasoning` and\n"
    "`X_confidence` may be written as `X`, for both. An option that the method does not read is "
    "refused.",
    "evaluate": "`dcpo evaluate` reads `judging` as above, and these sections; each flag is a "
    "shorthand for an option\n([evaluate](evaluate.md)).",
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
    setters = set_by()
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
        shared = shared_options(section)
        for option in options(section):
            if option in shared:
                continue
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
                    cell.replace("|", "\\|") for cell in [*cells, where(option.name, setters)]
                )
                + " |"
            )
        if shared:
            listed = ", ".join(f"`{option.name.rpartition('.')[2]}`" for option in shared)
            above = section.partition(".")[2]
            parts += ["", wrapped(f"And {listed}, which are those of [{above}](#{above}).")]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def shared_options(section: str) -> list[Option]:
    """The options of a section of ``dcpo sft`` or ``evaluate`` that the training's section of that
    name declares with the same default and meaning.
    """
    verb, _, above = section.partition(".")
    if verb not in ("sft", "evaluate") or above not in sections():
        return []
    of_training = {
        (option.name.rpartition(".")[2], option.kind, option.default, option.meaning)
        for option in options(above)
    }
    return [
        option
        for option in options(section)
        if (option.name.rpartition(".")[2], option.kind, option.default, option.meaning)
        in of_training
    ]


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
    return re.sub(r"\(docs/(\w+)(\.md(?:#[\w-]+)?)\)", r"([\1](\1\2))", meaning)


def set_by() -> Setters:
    """What sets an option: examples, not by their bases, and recipes of the documentation."""
    found: Setters = {}
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        if "elsewhere" in file.parts:  # of other programs
            continue
        verb = "sft" if file.name == "sft.yaml" else "train"
        values = OmegaConf.to_container(OmegaConf.load(file))
        for name in options_of(verb, names(values)):
            found.setdefault(name, []).append(f"../examples/{file.relative_to(ROOT / 'examples')}")
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name, heading in set_by_recipes(page.read_text()):
            found.setdefault(name, []).append(f"{page.name}#{anchor(heading)}")
    return found


def set_by_recipes(text: str) -> Iterator[tuple[str, str]]:
    """The options that the tested blocks of a page set, each with the heading that it is below."""
    heading, files = "", dict[str, str]()
    for part in re.finditer(
        r"^#+ (?P<heading>[^\n]+)$|<!-- test: (?P<what>[^\n]+?) -->\n```\w+\n(?P<block>.*?)```",
        text,
        re.MULTILINE | re.DOTALL,
    ):
        heading = part["heading"] or heading
        if part["what"] == "run":
            for line in part["block"].replace("\\\n", " ").splitlines():
                for name in set_by_command(shlex.split(line, comments=True), files):
                    yield name, heading
        elif part["what"]:
            files[part["what"].removeprefix("file ")] = part["block"]


def set_by_command(words: list[str], files: dict[str, str]) -> Iterator[str]:
    """The options that a command sets: in the page's file that it reads, by overrides, by flags."""
    if words[:1] != ["dcpo"]:
        return
    verb, arguments = words[1], words[2:]
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--config" and following in files:
            values = OmegaConf.to_container(OmegaConf.create(files[following]))
            yield from options_of(verb, names(values))
        elif (
            verb == "evaluate" and (flag := word.removeprefix("--").replace("-", "_")) in SHORTHANDS
        ):
            yield from options_of(verb, [SHORTHANDS[flag]])
        elif override := re.match(r"([\w.]+)=", word):
            yield from options_of(verb, names("", override[1]))


def options_of(verb: str, set_names: Iterable[str]) -> Iterator[str]:
    """Names as the page's sections have them: those of ``dcpo sft`` and ``evaluate`` begin so."""
    for name in set_names:
        section = f"{verb}.{name.rpartition('.')[0]}".removesuffix(".")
        own = section in {**EVALUATE_SECTIONS, **SUPERVISED_SECTIONS}
        yield f"{verb}.{name}" if own else name


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def names(value: object, prefix: str = "") -> Iterator[str]:
    """The dotted names of everything set; of the elements of a list with ``[]``. A short name
    stands for both blocks, a preset for all that it sets.
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
        if prefix == "objective.preset":
            its = PRESETS[str(value)] | find_method("dcpo").defaults(ObjectiveConfig(preset=value))
            yield from (prefix, *(f"objective.{option}" for option in its))
        elif section == "objective" and key in BLOCK_OPTIONS:
            yield from (f"{prefix}_reasoning", f"{prefix}_confidence")
        elif section == "objective.options" and key in OWN_OPTIONS:
            yield f"objective.{key}"
        else:
            yield prefix


def where(name: str, setters: Setters) -> str:
    """What sets an option: an example of the quickstart or of Qwen3-8B, another one, a recipe."""
    setting = sorted(
        setters.get(name, ()),
        key=lambda target: (
            not target.startswith(("../examples/quickstart/", "../examples/qwen3_8b/")),
            not target.startswith("../examples/"),
            target,
        ),
    )
    if not setting:
        return "–"
    shown = setting[0].removeprefix("../examples/").removesuffix(".yaml")
    return f"[{shown.partition('.md#')[0]}]({setting[0]})"


if __name__ == "__main__":
    sys.exit(main())
