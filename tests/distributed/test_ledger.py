"""What is on the device together, through a whole step, a save, a resumption and a restart; nothing
else changes.

The memory of a device is simulated: what leaves gives up its storage, so that whoever reads it
meanwhile would fail.
"""

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.quickstart import metrics, without_clocks

SMALL = [
    *(
        "data.prompts_per_step=4",
        "rollout.group_size=4",
        "logging.to=[]",
        "logging.samples_interval=0",
    ),
    *(
        "objective.kl_coef=0.01",
        "training.updates_per_rollout=2",
    ),
    *("training.save_interval=1", "training.resume=auto"),
]
AWAY = {"gradients", "optimizer", "reference"}  # what a rollout does without


def train(tmp_path, name, steps, *overrides, processes=1, **options):
    run_dir = tmp_path / name / "run"
    overrides = [f"run_dir={run_dir}", *SMALL, *overrides, f"training.steps={steps}"]
    return run_dir, torchrun(
        "ledger", processes, tmp_path / name, {"overrides": overrides} | options
    )


@pytest.mark.parametrize(
    ("processes", "dtype"),
    [(1, "fp32"), (2, "bf16")],
    ids=["one process", "two, distributed optimizer"],
)
def test_nothing_else_is_awake(tmp_path, processes, dtype):
    layout = [f"model.params_dtype={dtype}", f"parallel.use_distributed_optimizer={processes > 1}"]
    reference, _ = train(tmp_path, "reference", 3, *layout, processes=processes, device=False)
    offload = [*layout, "training.offload_optimizer_during_rollout=true"]
    options = {"processes": processes, "device": True, "failing": True}
    run_dir, first = train(tmp_path, "device", 2, *offload, **options)
    run_dir, second = train(tmp_path, "device", 3, *offload, **options)  # resumed
    assert without_clocks(metrics(run_dir)) == without_clocks(metrics(reference)), (
        "and nothing was lost on the way"
    )
    for rank in (*first, *second):
        for held in map(
            set, map(str.split, (line.replace("engine ", "engine_") for line in rank["together"]))
        ):
            assert "engine_cache" not in held or not held & AWAY
        during = {
            name: [set(held.split()) for held in kept] for name, kept in rank["during"].items()
        }
        assert all(not held & AWAY for held in during["engine built"] + during["rollout"])
        for what in ("save", "update", "reference"):
            assert all("engine" not in held for held in during[what])
            assert all({"weights", "gradients", "optimizer"} <= held for held in during[what])
        assert all("reference" in held for held in during["reference"])
        assert all("reference" not in held for held in during["save"] + during["update"])
    assert all("engine" not in held for rank in second for held in rank["during"]["load"])
