"""Megatron's spec for Transformer Engine, on a stand-in that computes in torch: what every GPU run
is built from.

It shows that names, shapes, layouts, packed sequences, fused rotary embeddings, gradients,
conversion and checkpoints with extra state fit together, and that Megatron passes no argument that
the real package does not have. Of the real kernels it shows nothing
(docs/status.md#claim-by-claim).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.launch import Run, runs_by_name, torchrun
from tests.helpers.transformer_engine import environment

FUSED = {"megatron": {"gradient_accumulation_fusion": True}}
LAYOUTS = {
    "one": (1, {}),
    "one_packed": (1, {"sequence_packing": True}),
    "recomputed": (1, {"recompute_granularity": "full"}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sequence_parallel_packed": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "sequence_packing": True},
    ),
    "pp2_virtual2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "cp2": (2, {"context_parallel_size": 2, "cp_comm_type": "all_gather"}),
    "cp2_packed": (2, {"context_parallel_size": 2, "sequence_packing": True}),
    "dp2_distributed_optimizer": (2, {"use_distributed_optimizer": True}),
    # weight gradients are added by the layers themselves, and nobody asks for Apex
    "fused": (1, FUSED),
    "fused_recomputed": (1, FUSED | {"recompute_granularity": "full"}),
    "fused_pp2_virtual2": (
        2,
        FUSED | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "fused_dp2_overlap": (
        2,
        FUSED
        | {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
}
FAMILIES = [("qwen3", True), ("llama", False), ("qwen2", True)]
OTHER_FORMS = [("glm4", False), ("olmo3", False), ("gemma3", True)]
RUNS = [
    (layout, which)
    for layout in LAYOUTS
    for which in FAMILIES
    if which == FAMILIES[0] or layout in ("one", "tp2")
]
RUNS += [("tp2_sequence_parallel_packed", which) for which in OTHER_FORMS]
RUNS += [("cp2", OTHER_FORMS[2])]
# with `make test-full`: what others of the same family, or layout of the local layers, try
FULL = [(layout, which) for layout in ("one", "tp2") for which in FAMILIES[1:]]
FULL += [(layout, FAMILIES[0]) for layout in ("recomputed", "tp2", "cp2", "fused", "cp2_packed")]
FULL += [(layout, FAMILIES[0]) for layout in ("dp2_distributed_optimizer", "fused_pp2_virtual2")]
FULL += [(layout, FAMILIES[0]) for layout in ("one", "one_packed", "pp2_virtual2")]
FULL += [("fused_recomputed", FAMILIES[0]), ("cp2", OTHER_FORMS[2])]
FULL_FAMILIES = FAMILIES[1:]
FAMILIES += OTHER_FORMS
CASES = [pytest.param(*run, marks=[pytest.mark.full] * (run in FULL)) for run in RUNS]


@pytest.fixture(scope="module")
def local(tiny_models, tmp_path_factory):
    """The local layers in one process."""
    wanted = {which: Run(1, {"model": str(tiny_models(*which))}) for which in FAMILIES}
    return runs_by_name(wanted, FULL_FAMILIES, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def ranks(tiny_models, tmp_path_factory):
    """The same through the spec for Transformer Engine."""
    wanted = {}
    for layout, which in RUNS:
        processes, parallel = LAYOUTS[layout]
        options = {"model": str(tiny_models(*which)), "parallel": parallel}
        wanted[layout, which] = Run(processes, options)
    return runs_by_name(wanted, FULL, tmp_path_factory.mktemp, environment=environment())


@pytest.mark.parametrize(
    ("layout", "which"), CASES, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_layers_equal_the_local_ones(ranks, local, layout, which):
    (expected,), found = local(which), ranks((layout, which))
    logprobs = {index: values for rank in found for index, values in rank["logprobs"].items()}
    for index, values in expected["logprobs"].items():
        np.testing.assert_allclose(logprobs[index], values, atol=1e-4)
    for rank in found:
        assert rank["layers"] == "transformer_engine"
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=1e-5)
        # the gradient of a bias on keys is almost nothing but rounding, which Adam's first steps
        # enlarge
        np.testing.assert_allclose(
            rank["norms"], expected["norms"], rtol=2e-4 if which[0] == "qwen2" else 2e-5
        )
        assert rank["engine_difference"] <= 1e-4
        assert rank["weights"] == found[0]["weights"]


def test_training_resumes_bit_for_bit(tmp_path):
    """Two ranks with the distributed optimizer: the state after two steps, and after one, a
    resumption and another one.
    """
    fixed = [
        "training.steps=2",
        "training.save_interval=1",
        "data.prompts_per_step=4",
        "rollout.group_size=4",
    ]
    fixed += ["parallel.use_distributed_optimizer=true", "parallel.sequence_packing=true"]
    fixed += ["model.transformer_impl=transformer_engine"]
    options = {"overrides": fixed}
    whole = torchrun("training", 2, tmp_path / "whole", options, environment=environment())
    options = {"overrides": [*fixed, "training.steps=1"]}
    first = torchrun("training", 2, tmp_path / "parts", options, environment=environment())
    second = torchrun(
        "training",
        2,
        tmp_path / "parts",
        {"overrides": [*fixed, "training.resume=auto"]},
        environment=environment(),
    )
    for rank in range(2):
        assert [whole[rank]["error"], first[rank]["error"], second[rank]["error"]] == [None] * 3
        assert len(whole[rank]["digests"]) == 3
        assert first[rank]["digests"] == whole[rank]["digests"][:2]
        assert second[rank]["digests"] == whole[rank]["digests"][1:]
