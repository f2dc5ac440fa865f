"""The package works from a wheel, away from the checkout: its data files travel with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.evaluated import evaluated
from tests.helpers.paths import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the wheel; what it depends on comes from the running one,
    behind it on the path.
    """
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("megatron_dcpo", "setup.py", "pyproject.toml", "README.md", "constraints.txt"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy2
        copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, source],
        check=True,
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    (wheel,) = place.glob("*.whl")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = place / "venv" / "lib" / python / "site-packages"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    return place


def dcpo(place: Path, *arguments: str | Path, stdin: str | None = None) -> str:
    code = (
        "import sys, megatron_dcpo; from pathlib import Path;"
        "assert Path(megatron_dcpo.__file__).is_relative_to(sys.argv.pop(1)), "
        "megatron_dcpo.__file__;"
        "from megatron_dcpo.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [place / "venv" / "bin" / "python", "-c", code, place / "venv", *arguments],
        cwd=place,
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_console_script_is_installed(installed: Path) -> None:
    assert list(installed.glob("venv/lib/*/site-packages/bin/dcpo"))


def test_doctor_knows_the_pins(installed: Path) -> None:
    findings = json.loads(dcpo(installed, "doctor", "--json"))
    (installed_package,) = [finding for finding in findings if finding["name"] == "safetensors"]
    assert installed_package["ok"] is True
    advice = [finding["advice"] for finding in findings if finding["ok"] is False]
    assert all("==" in text for text in advice), "a missing package is named with its pin"


def test_report(installed: Path) -> None:
    run = installed / "run"
    evaluated(run)
    result = json.loads(dcpo(installed, "report", run, "--out", installed / "r.html", "--json"))
    assert "run" in result["runs"]
    assert "Accuracy" in (installed / "r.html").read_text()


def test_objective(installed: Path) -> None:
    row = {
        "prompt_id": "p",
        "correct": 1,
        "confidence": 0.5,
        "status": "ok",
        "boundary": 2,
        "length": 3,
    }
    row |= {"old_logprobs": [-1.0] * 3, "logprobs": [-1.0] * 3}
    group = {"method": "dcpo", "options": {"lam": 0.5}, "responses": [row, row | {"correct": 0}]}
    result = json.loads(
        dcpo(installed, "objective", "--input", "-", "--json", stdin=json.dumps(group))
    )
    assert result["targets"] == [0.75, 0.25]


def test_plan(installed: Path) -> None:
    config = REPOSITORY / "examples" / "quickstart" / "dcpo.yaml"
    model = REPOSITORY / "examples" / "quickstart" / "policy"
    plan = json.loads(
        dcpo(installed, "plan", "--config", config, f"model.path={model}", "--gpus", "8", "--json")
    )
    assert plan["layout"]["data_parallel_size"] == 8
