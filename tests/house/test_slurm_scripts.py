"""The shipped batch scripts ask Slurm for what they use: without CPUs a task gets one, without memory a site's default."""

import re

import pytest

from tests.helpers.paths import EXAMPLES

SCRIPTS = sorted(EXAMPLES.rglob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_cpus_and_memory(script):
    text = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("# "))
    header = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", text, flags=re.MULTILINE)
    asked = dict(header)
    assert "exclusive" in asked or "cpus-per-task" in asked
    assert asked["mem"] == ("0" if "exclusive" in asked else asked["mem"])
    # since Slurm 22.05 srun does not take it from the job
    (options,) = re.findall(r"step_options=\((.*)\)", text)
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK:-' in options
    assert re.findall(r"\bsrun (\S+)", text) == ['"${step_options[@]}"']


def test_all_are_here():
    assert [path.name for path in SCRIPTS] == ["reproduce.sbatch", "convert.sbatch", "evaluate.sbatch", "train.sbatch"]


def test_the_evaluation_is_that_of_the_training():
    text = next(path for path in SCRIPTS if path.name == "reproduce.sbatch").read_text()
    assert '--as-trained "$run/config.yaml"' in text, "the template, the marker and the tokenizer of the run"
    assert "--concurrency 512" in text, "64 for each of 8 engines"
    assert ". .venv/bin/activate" in text
