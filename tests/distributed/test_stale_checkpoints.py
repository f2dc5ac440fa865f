"""A rank that writes its former copies once more is seen by the checksums of the groups, and
training at any precision and layout is no false alarm.
"""

import pytest

from tests.helpers.launch import torchrun_all

DISTRIBUTED = {"use_distributed_optimizer": True}
SHARED = {"use_distributed_optimizer": False}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("parallel", "dtype", "adapter", "groups"),
    [
        (DISTRIBUTED, "bf16", False, {"weights", "param", "exp_avg", "exp_avg_sq"}),
        (DISTRIBUTED | TP2, "fp32", False, {"weights", "exp_avg", "exp_avg_sq"}),
        (SHARED, "bf16", False, {"weights", "fp32_param", "exp_avg", "exp_avg_sq"}),
        (SHARED, "fp32", True, {"adapter.weight", "adapter.exp_avg", "adapter.exp_avg_sq"}),
    ],
    ids=["distributed", "tp2", "main values", "adapter"],
)
def test_every_group_is_new_in_every_checkpoint(
    tiny_models, tmp_path, parallel, dtype, adapter, groups
):
    options = {
        "model": str(tiny_models("qwen3")),
        "parallel": parallel,
        "dtype": dtype,
        "adapter": adapter,
    }
    (ranks,) = torchrun_all([("stale_checkpoints", options)], 2, tmp_path)
    for group in groups | {"opt_param_scheduler"}:
        assert len({sums[group] for sums in ranks[0]["sums"]}) == 3, group
    if adapter:
        assert len({sums["weights"] for sums in ranks[0]["sums"]}) == 1, "the base is frozen"
    for rank in ranks:
        assert rank["iterations"] == [1, 2, 3]
        assert "exp_avg of rank 1" in rank["error"]
