"""README's commands, carried out in the order in which they stand, in one directory. A training has
two small steps and an evaluation few problems; the run on two ranks and that of the reader's own
model are tried as dry runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_dcpo.evaluation.alike import evaluated_alike
from megatron_dcpo.evaluation.runs import find_runs
from tests.helpers.page_commands import Command, read_page, written
from tests.helpers.paths import REPOSITORY
from tests.helpers.quickstart import run

README = REPOSITORY / "README.md"
SMALL = (
    "training.steps=2",
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "training.micro_batch_size=8",
)
FEW = ("--limit", "40", "--repeats", "2", "--resamples", "0")


def shown_file(name: str) -> str:
    """The YAML file of this name that README shows."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.M | re.S)
    (found,) = [block for block in blocks if block.startswith(f"# {name}")]
    return str(found)


def carried_out(command: Command) -> list[str]:
    """The words of a command as they are tried here."""
    words = list(command.words)
    if words[0] == "train" and "--dry-run" not in words:
        if "parallel.tensor_model_parallel_size=2" in words:
            return [*words, "--dry-run"]
        return [*words, *SMALL]
    if words[0] == "evaluate" and "--model" in words:
        if "--limit" in words:
            at = words.index("--limit")
            del words[at : at + 2]
        return [*words, *FEW]
    return words


def test_the_commands_of_readme(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "my_run.yaml").write_text(shown_file("my_run.yaml"))
    commands = read_page(README).commands
    assert len(commands) >= 8
    for command in commands:
        words = carried_out(command)
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
        if "--dry-run" not in words:
            for path in written(command):
                assert (tmp_path / path).exists(), command
        if words[0] == "report":  # held-out answers are not compared with those of a training
            compared = find_runs([str(tmp_path / word) for word in words[1:3]])
            assert all(one.evaluation for one in compared)
            assert len(evaluated_alike(compared)) == 1
