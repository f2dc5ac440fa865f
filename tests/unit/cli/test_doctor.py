"""The lines of ``dcpo doctor`` and of errors that say how to install something can be followed."""

import importlib.metadata
import re
import tomllib
from types import SimpleNamespace

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from megatron_dcpo.cli import doctor
from megatron_dcpo.cli.doctor import EXTRAS, OPTIONAL, examine
from megatron_dcpo.errors import pip_install
from tests.helpers.paths import REPOSITORY


@pytest.mark.parametrize("extra", sorted(set(EXTRAS.values())))
def test_an_extra_is_named_by_its_packages(extra, monkeypatch):
    """This project is on no index: its extras are named by what they install, as pyproject.toml
    has it.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"][extra]
    requirements = [line.partition("; ") for line in listed]
    here = [name for name, _, marker in requirements if not marker or Marker(marker).evaluate()]
    made = [
        f'{name}; {f"{marker} and " if marker else ""}extra == "{extra}"'
        for name, _, marker in requirements
    ]
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["torch>=2", "six; python_version < '3'", *made]
    )
    isolation = "--no-build-isolation " if extra == "gpu" else ""
    assert len(here) == 1
    assert pip_install(extra) == f"pip install {isolation}'{Requirement(here[0])}'"


def test_without_metadata_the_checkout_is_installed(monkeypatch):
    def nothing(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    assert pip_install("vllm") == "pip install '.[vllm]'"


def test_what_is_missing_comes_with_a_line(monkeypatch):
    monkeypatch.setattr("megatron_dcpo.cli.doctor._version", lambda name: None)
    monkeypatch.setattr("megatron_dcpo.cli.doctor._is_for_training", lambda: True)
    advice = {finding.name: finding.advice for finding in examine()}
    assert all(
        "pip install " in advice[name] for name in (*EXTRAS, "flash-attn", "sentencepiece", "torch")
    )
    assert set(EXTRAS) <= set(OPTIONAL)


@pytest.mark.parametrize("kept", ["torch==2.10.0a0+b5.nv25.11\nrich==1\n", "rich==1", None])
def test_what_an_image_brought_stays(monkeypatch, kept):
    """``tools/install_beside.sh`` leaves the list; a package that came later is not in it."""
    needs = importlib.metadata.requires("megatron-dcpo")
    beside = SimpleNamespace(read_text={"kept.txt": kept}.get, requires=needs)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: beside)
    versions = {"torch": "2.10.0a0+b5.nv25.11"}
    monkeypatch.setattr("megatron_dcpo.cli.doctor._version", versions.get)
    found = {finding.name: finding for finding in examine()}
    of_the_image = bool(kept) and "torch" in kept
    assert found["torch"].found == versions["torch"]
    assert found["torch"].ok == of_the_image
    assert ("pip install" in found["torch"].advice) != of_the_image
    assert found["numpy"].ok is False, "it is missing"


@pytest.mark.parametrize(("vllm", "torch"), [("0.32.0", "2.13.0"), ("0.33.0", "2.14.0")])
def test_torch_is_the_one_that_vllm_demands(monkeypatch, vllm, torch):
    demands = [f"torch=={torch}", f"zentorch=={torch}.1; extra == 'zen'"]
    requires = importlib.metadata.requires
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: demands if name == "vllm" else requires(name)
    )
    for found in ("2.13.0+cu130", "2.14.0+cu130"):
        monkeypatch.setattr(doctor, "_version", {"torch": found, "vllm": vllm}.get)
        (finding,) = [one for one in examine() if one.name == "torch"]
        assert finding.ok == found.startswith(torch)
        assert finding.ok or f"torch=={torch}" in finding.advice


def test_nothing_tells_to_install_this_project_from_an_index():
    """``pip install 'megatron-dcpo[gpu]'`` would look for it on PyPI."""
    files = [
        *REPOSITORY.glob("megatron_dcpo/**/*.py"),
        *REPOSITORY.glob("docs/*.md"),
        *REPOSITORY.glob("*.md"),
    ]
    assert len(files) > 100
    assert not [
        str(file) for file in files if re.search(r"pip install '?megatron-dcpo", file.read_text())
    ]


def test_an_installation_without_training_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name in doctor.OF_TRAINING else "1.0"
    )
    found = {finding.name: finding for finding in examine()}
    assert all(finding.ok is not False for finding in found.values())
    assert "pip install" in found["training"].advice
    # but one of them alone is a broken installation
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "transformers" else "1.0")
    assert {f.name for f in examine() if f.ok is False} >= {"transformers"}
