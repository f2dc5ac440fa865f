"""How long before its end a batch job is warned: by the plan, against what the scripts ask for."""

import json
import re
from dataclasses import replace

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import lead_of, make_plan
from megatron_dcpo.planning.report import OF_THE_SCRIPTS
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import FAMILIES, MODELS


def planned(example, machine, *options):
    model = MODELS / FAMILIES[example.partition("/")[0]]
    path = EXAMPLES / f"{example}.yaml"
    return make_plan(load_config(path, [f"model.path={model}", *options]), machine)


@pytest.mark.parametrize("name", ["train.sbatch", "async.sbatch"])
def test_the_scripts_ask_for_what_the_plan_compares_with(name):
    text = (EXAMPLES / "slurm" / name).read_text()
    (lead,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, flags=re.MULTILINE)
    assert int(lead) == OF_THE_SCRIPTS


def test_what_a_signal_waits_for():
    """An engine of a rank gives a rollout up; one of several ranks, and a server, do not."""
    alone = planned("qwen3_8b/math/dcpo", Machine(8))
    assert lead_of(alone).step == pytest.approx(alone.seconds.total - alone.seconds.rollout)
    together = planned("qwen3_8b/math/dcpo", Machine(8), "rollout.tensor_model_parallel_size=2")
    assert lead_of(together).step == pytest.approx(together.seconds.total)
    beside = planned("qwen3_8b/math/dcpo_async", Machine(8, engine_gpus=8))
    assert lead_of(beside).step == pytest.approx(beside.seconds.beside)
    in_turn = planned(
        "qwen3_8b/math/dcpo_async", Machine(8, engine_gpus=8), "rollout.async_steps=0"
    )
    assert lead_of(in_turn).step == pytest.approx(in_turn.seconds.total)


def test_the_lead_is_for_the_longest_responses_and_the_disk_of_a_node():
    plan = planned("llama3.1_70b/math/dcpo", Machine(32))
    lead = lead_of(plan)
    saved = 8 * max(stage.saved for stage in plan.stages) / 1e9
    assert lead.save == pytest.approx(saved)
    assert 0 <= lead.seconds - 60 - lead.step - lead.save < 60
    assert lead.seconds % 60 == 0
    short = make_plan(plan.config, replace(plan.machine, response_tokens=500))
    assert short.seconds.total < plan.seconds.total
    assert lead_of(short) == lead


@pytest.mark.parametrize(
    ("example", "gpus", "too_short"),
    [("llama3.1_70b/math/dcpo", "32", True), ("qwen3_8b/math/dcpo", "8", False)],
)
def test_a_script_that_warns_too_late_is_said(capsys, example, gpus, too_short):
    model = MODELS / FAMILIES[example.partition("/")[0]]
    config = str(EXAMPLES / f"{example}.yaml")
    words = ["plan", "--config", config, "--gpus", gpus, f"model.path={model}"]
    assert main([*words, "--json"]) == 0
    lead = json.loads(capsys.readouterr().out)["signal_lead_seconds"]
    assert (lead > OF_THE_SCRIPTS) == too_short
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"--signal=B:USR1@{lead}" in shown
    assert ("examples/slurm" in shown) == too_short
