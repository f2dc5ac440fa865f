"""Which files a long suite depends on, and what is said when one of them is another one than it
passed with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import tested

IMPORTS = """
from megatron_dcpo.judging import blocks
from megatron_dcpo.judging.answers import f
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "tests/sandbox/test_it.py": IMPORTS,
        "megatron_dcpo/sandbox/guest/rpc.py": "",
        "megatron_dcpo/judging/__init__.py": "",
        "megatron_dcpo/judging/answers.py": "",
        "megatron_dcpo/judging/blocks.py": "",
        "megatron_dcpo/judging/judge.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(tested, "ROOT", tmp_path)
    return tmp_path


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tested.py", *arguments])
    return tested.main()


def test_sources_are_the_tests_their_imports_and_the_room(checkout: Path) -> None:
    assert set(tested.digests("sandbox")) == {
        "tests/sandbox/test_it.py",
        "megatron_dcpo/sandbox/guest/rpc.py",
        "megatron_dcpo/judging/__init__.py",
        "megatron_dcpo/judging/answers.py",
        "megatron_dcpo/judging/blocks.py",
    }


def test_a_changed_a_new_and_a_removed_source_are_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(monkeypatch, "sandbox") == 1, "it never passed"
    assert status(monkeypatch, "sandbox", "--record") == 0
    assert status(monkeypatch, "sandbox") == 0
    (checkout / "megatron_dcpo/judging/judge.py").write_text("x = 1\n")
    assert status(monkeypatch, "sandbox") == 0, "no test imports it"
    capsys.readouterr()
    (checkout / "megatron_dcpo/judging/answers.py").write_text("x = 1\n")
    (checkout / "megatron_dcpo/sandbox/new.py").write_text("")
    (checkout / "megatron_dcpo/sandbox/guest/rpc.py").unlink()
    assert status(monkeypatch, "sandbox") == 1
    said = capsys.readouterr().err
    for name in ("judging/answers.py", "sandbox/new.py", "sandbox/guest/rpc.py"):
        assert f"megatron_dcpo/{name}" in said
    assert "blocks" not in said
