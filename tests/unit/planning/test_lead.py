"""How long before its end a batch job is warned, by the plan."""

import json

import pytest

from megatron_dcpo.cli import main
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import FAMILIES, MODELS

BY_THE_SCRIPTS = 900  # --signal=B:USR1@900 in examples/slurm


@pytest.mark.parametrize(
    ("example", "gpus", "too_short"),
    [("llama3.1_70b/math/dcpo", 32, True), ("qwen3_8b/math/dcpo", 8, False)],
)
def test_the_lead_is_a_step_and_a_save_in_whole_minutes(capsys, example, gpus, too_short):
    """lead = step + saved bytes of a node at 1 GB/s + 60 s, rounded up to minutes."""
    model = MODELS / FAMILIES[example.partition("/")[0]]
    config = str(EXAMPLES / f"{example}.yaml")
    words = ["plan", "--config", config, "--gpus", str(gpus), f"model.path={model}"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    lead = facts["signal_lead_seconds"]
    save = 8 * max(stage["saved"] for stage in facts["stages"]) / 1e9
    assert lead % 60 == 0
    assert 0 <= lead - 60 - facts["step_seconds"]["total"] - save < 60
    assert (lead > BY_THE_SCRIPTS) == too_short
    assert main(words) == 0
    assert f"--signal=B:USR1@{lead}" in capsys.readouterr().out
