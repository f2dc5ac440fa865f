"""The summary of ``tools/gpu_check.sh``, what it installs, the comparison with the plan, and the
marks of ``tests/gpu``.
"""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.gpu import needs
from tests.helpers import memory
from tests.helpers.paths import REPOSITORY
from tools import gpu_check

SCRIPT = REPOSITORY / "tools" / "gpu_check.sh"
SUITE = """
import pytest
def test_good(record_property):
    record_property("memory against the plan", "local layers: resting 1.19/1.20 GB")
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.parametrize("n", [1, 2])
def test_without(n): pytest.skip("vLLM is not installed")
@pytest.fixture
def broken(): raise RuntimeError("no room")
def test_broken(broken): pass
"""


def summary_of(tmp_path, suite):
    (tmp_path / "test_it.py").write_text(suite)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junitxml",
        "junit.xml",
        "test_it.py",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    junit = (tmp_path / "junit.xml").read_text()
    return gpu_check.summary(
        junit, {"card": "1 x NVIDIA X, 80 GB", "torch": "2.13.0"}, "abc"
    ).splitlines()


def test_summary(tmp_path):
    lines = summary_of(tmp_path, SUITE)
    assert lines[:4] == [
        "gpu_check: 1 passed, 2 failed, 2 skipped",
        "commit: abc",
        "card: 1 x NVIDIA X, 80 GB",
        "torch: 2.13.0",
    ]
    assert "one is not two" in next(line for line in lines if "test_bad" in line)
    assert "no room" in next(line for line in lines if "test_broken" in line)
    assert "skipped: 2 x vLLM is not installed" in lines
    assert (
        lines[-1] == "peak memory, measured/planned: local layers: resting 1.19/1.20 GB"
    )


def test_summary_of_nothing(tmp_path):
    lines = summary_of(
        tmp_path,
        'import pytest\n@pytest.mark.skip("needs a CUDA device")\ndef test_one(): pass\n',
    )
    assert lines[0] == "gpu_check: 0 passed, 0 failed, 1 skipped"
    assert lines[-2:] == [
        "peak memory, measured/planned: not measured",
        "every test was skipped: nothing is known of a GPU",
    ]


def test_machine_says_what_is_here():
    facts = gpu_check.machine()
    assert facts["torch"].startswith("2.")
    assert facts["megatron-core"] == "0.16.1"


def test_what_is_there_is_not_replaced():
    """But for packages that must be of one another's version."""
    wheels = [
        "matplotlib-3.11.2-cp312.whl",
        "pydantic_core-2.50.4-cp312.whl",
        "pytest-9.2.0-py3.whl",
        "rich-15.0.0-py3.whl",
    ]
    there = {"matplotlib": "3.10.0", "pydantic-core": "2.41.0", "pytest": "9.2.0"}
    assert gpu_check.missing(wheels, gpu_check.TOGETHER, there.get) == [
        wheels[1],
        wheels[3],
    ]
    assert gpu_check.missing(wheels, gpu_check.TOGETHER, dict.get.__get__({})) == wheels


def test_comparison_with_the_plan():
    predicted = {
        "resting": 1_200_000_000,
        "update": 10_000_000_000,
        "save": 9_000_000_000,
    }
    rows = memory.compare(predicted, predicted)
    assert [row.ratio for row in rows] == [1, 1, 1]
    assert memory.problems(rows) == []
    assert (
        memory.shown(rows)
        == "resting 1.20/1.20 GB, update 10.00/10.00 GB, save 9.00/9.00 GB"
    )
    more = memory.compare(predicted | {"update": 11_500_000_000}, predicted)
    assert memory.problems(more) == ["update: measured 11.50 GB, planned 10.00 GB"]
    assert memory.problems(
        memory.compare(predicted | {"save": 5_000_000_000}, predicted)
    ) == ["save: measured 5.00 GB, planned 9.00 GB"]
    with pytest.raises(KeyError, match="save"):
        memory.compare({"resting": 1, "update": 1}, predicted)


def test_marks_name_what_is_missing():
    one, two = needs.gpus(2, found=1), needs.gpus(2, found=2)
    assert (one.args, one.kwargs["reason"]) == (
        (True,),
        "needs 2 GPUs, this machine has 1",
    )
    assert two.args == (False,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere.tar.gz"], "no such archive: 'nowhere.tar.gz'"),
        (["fly"], "usage: gpu_check.sh pack"),
        ([], "usage: gpu_check.sh pack"),
    ],
)
def test_bad_use_is_one_line(tmp_path, arguments, said):
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_every_package_is_pinned():
    """What is packed has a version in constraints.txt; nothing of it is torch's or CUDA's."""
    text = SCRIPT.read_text()
    names = text.split('PACKAGES="')[1].split('"')[0].split()
    pinned = {
        gpu_check.canonical(line.split("==")[0])
        for line in (REPOSITORY / "constraints.txt").open()
        if "==" in line
    }
    packed = {gpu_check.canonical(name) for name in names}
    assert packed <= pinned
    assert not packed & {"torch", "transformers", "numpy", "tokenizers", "safetensors"}
    assert set(gpu_check.TOGETHER) <= packed


def test_a_wheel_in_pieces_is_joined_checked_and_installed(tmp_path):
    """Two wheels that share a directory, as Transformer Engine's do."""
    for part in ("one", "two"):
        path = tmp_path / f"shared_{part}-1.0-py3-none-any.whl"
        info = f"shared_{part}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"shared/{part}.py", f"NAME = {part!r}\n" + "# more\n" * 100)
            file.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: shared_{part}\nVersion: 1.0\n",
            )
            file.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            file.writestr(f"{info}/RECORD", "")
        done = subprocess.run(
            [SCRIPT, "split", path, tmp_path / "pieces"],
            env=os.environ | {"PIECE": "500"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "3 pieces of shared_" in done.stdout
    functions = SCRIPT.read_text().rpartition("case ${1:-}")[0]
    install = f'install_pieces "{tmp_path / "pieces"}" "{tmp_path}"'
    command = f"{functions}\npython={sys.executable}; {install}"

    def install():
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False
        )

    done = install()
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "site" / "shared").glob("*.py")} == {
        "one.py",
        "two.py",
    }
    next((tmp_path / "pieces").glob("shared_one*.01")).unlink()
    done = install()
    assert done.returncode == 2
    assert (
        "shared_one-1.0-py3-none-any.whl: a piece is missing or damaged" in done.stderr
    )
