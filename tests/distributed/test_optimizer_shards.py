"""The distributed optimizer's state is saved and loaded by the ranks that own it, in the form of
Megatron's own code.

Megatron's ``fully_reshardable`` (``distrib_optimizer.py``,
``sharded_param_state_fully_reshardable``) is the reference: each code reads what the other wrote,
at the same and at other layouts, bit for bit.
"""

import pytest

from tests.helpers.launch import torchrun_all

TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 1}
VPP = PP2 | {"virtual_pipeline_model_parallel_size": 2}
READ_BACK = ("digest", "megatron read by the other code", "ours read by the other code")


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "dtype"),
    [
        ({}, [{}, TP2 | UNEVEN], "bf16"),
        (TP2 | CP2 | {"sequence_parallel": True}, [TP2 | CP2, TP2 | PP2, TP2], "fp32"),
        (VPP | {"overlap_grad_reduce": True}, [VPP | {"overlap_grad_reduce": True}, {}], "bf16"),
    ],
    ids=["dp4", "tp2", "vpp2"],
)
def test_every_rank_writes_and_reads_its_own(tiny_models, tmp_path, saved_at, loaded_at, dtype):
    common = {"model": str(tiny_models("qwen3")), "dtype": dtype}
    jobs = [("optimizer_shards", common | {"mode": "save", "parallel": saved_at})]
    jobs += [
        ("optimizer_shards", common | {"mode": "load", "parallel": parallel})
        for parallel in loaded_at
    ]
    saved, *loaded = torchrun_all(jobs, 4, tmp_path)

    assert [rank["moved"] for rank in saved] == [[]] * 4, "no rank is sent another's state"
    assert all(rank["moved by Megatron"] for rank in saved), "which would be seen"
    replicated = (
        saved_at.get("tensor_model_parallel_size", 1) > 1
    )  # norms: the first tensor-parallel rank writes them
    for rank in saved:
        missing = rank["own"] - rank["written"]["optimizer"]
        assert 0 <= missing <= 0.05 * rank["own"] if replicated else missing == 0
    sizes = [rank["written"]["bytes"] for rank in saved]
    assert max(sizes) < 1.5 * sum(sizes) / 4, "weights too are written by all who hold them"

    for parallel, ranks in zip(loaded_at, loaded, strict=True):
        for before, rank in zip(saved, ranks, strict=True):
            assert len({rank[how] for how in READ_BACK}) == 1, parallel
            if parallel == {k: v for k, v in saved_at.items() if k != "sequence_parallel"}:
                assert rank["digest"] == before["digest"]
                assert rank["read"] == rank["own"], "resumption reads only its own part"
        if not (parallel or saved_at):
            opened = [{name.split("_")[2] for name in rank["opened"]} for rank in ranks]
            assert opened[0] == set(), "loaded from what the check of the digests has read"
            assert all(names <= {"0"} for names in opened[1:]), (
                "but for the first rank's objects, which hold nothing"
            )
