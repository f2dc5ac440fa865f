"""``tools/install_beside.sh`` in an environment of stand-ins with the versions of an NVIDIA image,
without a network.
"""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import requires

import pytest

from tests.helpers.paths import REPOSITORY

pytestmark = pytest.mark.slow  # pip, many times
# as such images write them: an alpha of torch with a local part, Transformer Engine with its commit
IMAGE = {
    "torch": "2.10.0a0+b558c986e8.nv25.11",
    "transformer_engine": "2.9.0+70f53666",
    "apex": "0.1",
    "numpy": "1.26.4",
    "packaging": "25.0",
    "megatron_core": "0.16.0",
    "einops": "0.8.1",
}
NEEDS = {"megatron_core": ["transformer-engine[pytorch]<2.12.0,>=2.9.0a0; extra == 'dev'"]}
BESIDE = {
    "rich": ["markdown-it-py>=2.2.0", "pygments>=2.13"],
    "markdown-it-py": ["mdurl"],
    "megatron-core": ["transformer-engine[pytorch]<2.11.0,>=2.9.0a0; extra == 'dev'"],
}  # what an added one needs


def wheel(directory, name, version, needs=()):
    """A wheel of nothing but its metadata."""
    name = name.replace("-", "_")
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def image(tmp_path):
    """Installs stand-ins of an image, and returns what runs the script there."""
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (index := tmp_path / "wheels").mkdir()
    (given := tmp_path / "image").mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv" / "bin" / "python")]
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            wheel(index, name, version, BESIDE.get(name.lower(), ()))
    ours = wheel(tmp_path, "megatron_dcpo", "0.2.0", requires("megatron-dcpo"))

    def run(**changed):
        wheels = [
            wheel(given, name, version, NEEDS.get(name, ["nvidia-nothing"]))
            for name, version in (IMAGE | changed).items()
            if version
        ]
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", *wheels], check=True)
        env = os.environ | {
            "PYTHON": sys.executable,
            "PIP": " ".join(pip),
            "SITE_PACKAGES": str(site),
        }
        (constraint := tmp_path / "constraint.txt").write_text(
            "rich==1.0\nmdurl==9.9\n"
        )  # as /etc/pip/constraint.txt
        env |= {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
            "PYTHONPATH": "",
            "PIP_CONSTRAINT": str(constraint),
        }
        command = [REPOSITORY / "tools" / "install_beside.sh", ours]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        there = dict(
            path.name.removesuffix(".dist-info").rsplit("-", 1) for path in site.glob("*.dist-info")
        )
        return done, there

    return run


def test_what_the_image_has_stays_and_the_rest_is_added(image, tmp_path):
    done, there = image()
    assert done.returncode == 0, done.stderr
    assert IMAGE.items() <= there.items()
    assert there["transformers"].startswith("5.")
    assert {
        "megatron_dcpo",
        "math_verify",
        "omegaconf",
        "rich",
        "markdown_it_py",
        "mdurl",
    } <= there.keys()
    assert not {"vllm", "nvidia_nothing", "pytest", "triton"} & there.keys()
    (kept,) = (tmp_path / "venv" / "lib").glob("*/site-packages/*/kept.txt")
    assert kept.parent.name == "megatron_dcpo-0.2.0.dist-info"  # where doctor looks
    lines = kept.read_text().split()
    assert f"torch=={IMAGE['torch']}" in lines
    assert not [line for line in lines if line.startswith("omegaconf")]


def test_a_missing_megatron_is_the_tested_one(image):
    done, there = image(megatron_core="")
    assert done.returncode == 0, done.stderr
    assert there["megatron_core"] == "0.16.1"


def test_transformer_engine_is_compared_with_a_megatron_that_is_added(image):
    done, _ = image(megatron_core="", transformer_engine="2.11.0+70f53666")
    assert done.returncode == 2
    said = "transformer-engine 2.11.0+70f53666, Megatron-core 0.16.1 needs"
    assert said in done.stderr


def test_an_image_that_does_not_suit_is_named(image):
    done, there = image(megatron_core="0.20.0", transformer_engine="2.14.0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the image has megatron-core 0.20.0, this release needs" in done.stderr
    assert (
        "the image has transformer-engine 2.14.0, Megatron-core 0.20.0 needs <2.12.0,>=2.9.0a0"
        in done.stderr
    )
    assert "megatron_dcpo" not in there
