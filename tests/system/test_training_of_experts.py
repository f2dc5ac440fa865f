"""``dcpo train`` on the quickstart's mixture of experts: 4 processes, EP 2 x TP 2, as one
process.
"""

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import train

EXPERTS = (
    f"model.path={QUICKSTART / 'moe' / 'policy'}",
    "training.steps=2",
    "training.save_interval=0",
)
EP2_TP2 = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "parallel.expert_model_parallel_size=2",
    "parallel.expert_tensor_parallel_size=1",
    "parallel.use_distributed_optimizer=true",
)


def test_ep_2_tp_2_equals_one_process(tmp_path):
    """The samples do not depend on the layout, so both train on the same ones."""
    single, divided = (
        train(tmp_path / str(processes), *EXPERTS, *options, processes=processes)
        for processes, options in ((1, ()), (4, EP2_TP2))
    )
    for ours, one in zip(divided, single, strict=True):
        assert ours["reward/accuracy"] == one["reward/accuracy"] > 0
        assert ours["loss/policy"] == pytest.approx(one["loss/policy"], abs=1e-5)
        assert ours["grad_norm/total"] == pytest.approx(one["grad_norm/total"], rel=1e-4)
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["engine/routing_mismatch"] == 0 < one["grad_norm/total"]
