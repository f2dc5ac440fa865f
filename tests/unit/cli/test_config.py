"""``dcpo config``: options from their declarations, examples as they are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.cli import config, main
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import ALL


def test_sections_options_and_one_option(capsys: pytest.CaptureFixture) -> None:
    assert main(["config"]) == 0
    said = capsys.readouterr().out
    assert "run_dir: text (required)" in said
    assert "\nrollout " in said
    assert main(["config", "rollout"]) == 0
    said = capsys.readouterr().out
    assert "rollout.group_size: whole number >= 2 (default 8)\n    Responses per prompt" in said
    assert main(["config", "objective.lam"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "objective.lam: number >= 0 and <= 1 (default 0.5)"
    assert said.splitlines()[-1] == "    read by dcpo, coupled, rlcr, posthoc, ternary"


def test_examples_are_listed_and_printed(capsys: pytest.CaptureFixture) -> None:
    assert main(["config", "--example"]) == 0
    names = capsys.readouterr().out.split()
    assert names == sorted(str(f.relative_to(EXAMPLES))[: -len(".yaml")] for f in ALL)
    for name in ("quickstart/grpo", "examples/quickstart/grpo.yaml"):
        assert main(["config", "--example", name]) == 0
        assert capsys.readouterr().out == (EXAMPLES / "quickstart" / "grpo.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rolout"], "there is no section or option 'rolout'; did you mean 'rollout'?"),
        (
            ["--example", "quickstart/dcop"],
            "there is no example 'quickstart/dcop'; did you mean 'quickstart/dcpo'?",
        ),
    ],
)
def test_an_unknown_name(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["config", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_installed_package_says_where_examples_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(config, "EXAMPLES", tmp_path / "examples")
    for arguments in (["--example"], ["--example", "quickstart/dcpo"]):
        assert main(["config", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "in the directory examples/ of the repository" in line
