"""Every parallel layout gives the losses, gradient norms, log-probs and weights of one process.

All layouts load the same checkpoint: random initialisation would differ between pipeline stages.
The single-process run is compared with transformers in its turn, so the chain ends outside our
code.
"""

import numpy as np
import pytest
import torch

from tests.distributed.cases.common import samples_for_test
from tests.helpers.cases import full_only
from tests.helpers.launch import Run, runs_by_name

LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2_pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2_distributed_optimizer": (2, {"use_distributed_optimizer": True}),
    "tp2_sequence_parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2_sequence_parallel_packed": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "sequence_packing": True},
    ),
    "cp2_packed": (2, {"context_parallel_size": 2, "sequence_packing": True}),
    "pp2_packed": (2, {"pipeline_model_parallel_size": 2, "sequence_packing": True}),
    "pp2_virtual2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
}


PP2 = {"pipeline_model_parallel_size": 2}
# number of layers, processes, options
UNEVEN = {
    "pp2_first": (5, 2, PP2 | {"num_layers_in_first_pipeline_stage": 2}),
    "pp2_written_packed": (
        5,
        2,
        PP2 | {"pipeline_model_parallel_layout": "Et*3|t*2L", "sequence_packing": True},
    ),
    "pp2_virtual2_first": (
        6,
        2,
        PP2 | {"virtual_pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2},
    ),
    "pp2_embedding_counts": (5, 2, PP2 | {"account_for_embedding_in_pipeline_split": True}),
    "pp3_first": (
        5,
        3,
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1},
    ),
}
# what a run saved at "pp2_first" continues at
RESUMED = {"pp2_written": PP2 | {"pipeline_model_parallel_layout": "Et*4|tL"}, "dp2": {}}

# biases of attention and MLP with GELU, and of the attention alone with ReLU
BIASES = [("llama_biases", False), ("qwen3_biases", True)]
ONE_PROCESS = [("qwen3", False), ("qwen3", True), ("llama", False), ("qwen2", True)]
ONE_PROCESS += [*BIASES, ("mistral", False)]
YARN = ("qwen3_yarn", True)
# queries, keys and values in one tensor, gate and up in another
PHI3 = ("phi3", False)
ONE_PROCESS += [YARN, PHI3]
QWEN3, LLAMA = (
    ("qwen3", True),
    ("llama", False),
)  # which is untied, and whose rotary embeddings are scaled
SEVERAL = [(layout, QWEN3) for layout in LAYOUTS]
SEVERAL += [(layout, LLAMA) for layout in ("tp2", "pp2", "tp2_pp2", "tp2_sequence_parallel_packed")]
SEVERAL += [("tp2_sequence_parallel_packed", which) for which in BIASES]
SEVERAL += [("tp2_pp2", ("mistral", False))]
SEVERAL += [(layout, YARN) for layout in ("tp2_pp2", "tp2_sequence_parallel_packed", "cp2_packed")]
SEVERAL += [(layout, PHI3) for layout in ("tp2_pp2", "tp2_sequence_parallel_packed")]
SEVERAL += [("pp2", BIASES[0]), ("tp2_pp2", BIASES[1])]
# in the full suite: what other cases of the same family or layout try
FULL = [("tp2", LLAMA), ("pp2", LLAMA), ("pp2", BIASES[0]), ("tp2_pp2", BIASES[1])]
FULL += [("tp2_pp2", which) for which in (("mistral", False), YARN, PHI3)]
FULL += [("tp2_sequence_parallel_packed", which) for which in (BIASES[0], LLAMA)]
FULL += [(layout, QWEN3) for layout in ("dp2", "pp2_packed", "tp2_sequence_parallel")]
FULL += [(layout, QWEN3) for layout in ("tp2", "pp2", "tp2_pp2", "dp2_distributed_optimizer")]
FULL += [("tp2_pp2", LLAMA), ("tp2_sequence_parallel_packed", YARN), ("cp2_packed", QWEN3)]
FULL_ONE = [("qwen3", False), ("llama", False)]
FULL_UNEVEN = ("pp2_written_packed", "pp2_virtual2_first", "pp2_embedding_counts", "pp3_first")


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    def model(family, tied=False, layers=4):
        return {"model": str(tiny_models(family, tied, layers))}

    wanted = {("one", *which): Run(1, model(*which) | {"probe": True}) for which in ONE_PROCESS}
    probed = {"probe": True, "bucket_bytes": 20_000}
    for layout, which in SEVERAL:
        processes, parallel = LAYOUTS[layout]
        wanted[layout, *which] = Run(processes, model(*which) | probed | {"parallel": parallel})
    for layout, (layers, processes, parallel) in UNEVEN.items():
        deep = model("qwen3", True, layers)
        saves = {"save": "checkpoints"} if layout == "pp2_first" else {}
        wanted[layout] = Run(processes, deep | probed | {"parallel": parallel} | saves)
        wanted["one", layers] = Run(1, deep | {"probe": True})
    deep = model("qwen3", True, UNEVEN["pp2_first"][0])
    for name, parallel in RESUMED.items():
        again = {"parallel": parallel, "load": "checkpoints", "steps": 2}
        wanted["resumed", name] = Run(2, deep | again)
    reduced = {"dtype": "bf16", "parallel": {"use_distributed_optimizer": True}}
    wanted["bf16"] = Run(2, model("qwen3") | reduced)
    full = [*FULL_UNEVEN, *((layout, *which) for layout, which in FULL), ("one", 6)]
    full += [("one", *which) for which in FULL_ONE]
    return runs_by_name(wanted, full, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def one_process(runs):
    return lambda family, tied: runs(("one", family, tied))[0]


@pytest.mark.parametrize(
    ("family", "tied"),
    [pytest.param(*which, marks=[pytest.mark.full] * (which in FULL_ONE)) for which in ONE_PROCESS],
)
def test_one_process_equals_transformers(tiny_models, one_process, family, tied):
    """HF forward = Megatron forward: fp32 |difference of log-probs| <= 1e-4, beyond Llama's
    original context / 4.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models(family, tied), dtype=torch.float32)
    ours = one_process(family, tied)["logprobs"]
    with torch.no_grad():
        for index, sample in enumerate(samples_for_test()):
            ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
            logp = torch.log_softmax(model(ids).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
            theirs = logp.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1).numpy()
            np.testing.assert_allclose(ours[str(index)], theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "which"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case in FULL)) for case in SEVERAL],
)
def test_layout_equals_one_process(runs, one_process, layout, which):
    agrees(runs((layout, *which)), one_process(*which), LAYOUTS[layout][1])


def test_fused_projections_are_bit_for_bit_those_apart(one_process):
    """Phi-3 with the numbers of a Mistral: fused or not, reading and training give the same."""
    fused, apart = one_process(*PHI3), one_process("mistral", False)
    assert fused["losses"] == apart["losses"]
    assert fused["norms"] == apart["norms"]
    for index, values in apart["logprobs"].items():
        np.testing.assert_array_equal(fused["logprobs"][index], values)


@pytest.mark.parametrize("layout", full_only(UNEVEN, FULL_UNEVEN))
def test_uneven_pipeline_equals_one_process(runs, layout):
    layers, _, parallel = UNEVEN[layout]
    agrees(runs(layout), runs(("one", layers))[0], parallel)


@pytest.mark.parametrize("layout", RESUMED)
def test_resumes_at_another_division_of_the_layers(runs, layout):
    """Saved after one step at 2 + 3 layers: the next steps are those of the run that went on."""
    went_on, resumed = runs("pp2_first")[0], runs(("resumed", layout))[0]
    np.testing.assert_allclose(resumed["losses"], went_on["losses"][1:], rtol=1e-5)
    np.testing.assert_allclose(resumed["norms"], went_on["norms"][1:], rtol=2e-5)


def agrees(ranks, expected, parallel):
    logprobs = {index: values for rank in ranks for index, values in rank["logprobs"].items()}
    for index, values in expected["logprobs"].items():
        np.testing.assert_allclose(logprobs[index], values, atol=1e-4)
    for rank in ranks:
        # Updates amplify rounding: the first loss precedes them, the others follow one and two.
        np.testing.assert_allclose(rank["losses"][0], expected["losses"][0], rtol=1e-6)
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=3e-5)
        np.testing.assert_allclose(rank["norms"], expected["norms"], rtol=2e-5)
        if expected["probe"] is not None:
            # after an update, which amplifies rounding: 1.3e-4 on one kind of processor
            same_probe(rank["probe"], expected["probe"], rtol=5e-4)
        assert rank["engine_difference"] <= 1e-4, "engine and trainer agree after three updates"
        assert rank["weights"] == ranks[0]["weights"], "every engine received the same weights"
    tp = parallel.get("tensor_model_parallel_size", 1)
    for rank, result in enumerate(ranks):
        assert result["replicated"] == ranks[rank - rank % tp]["replicated"], (
            "replicas stay bitwise equal"
        )


def same_probe(found, expected, rtol):
    """Norms and cosines by layer group, both metrics: sharded parameters summed, replicated and
    tied ones counted once.
    """
    for metric in ("plain", "fisher"):
        assert list(found[metric]) == list(expected[metric])
        for group, comparison in expected[metric].items():
            for key, value in comparison.items():
                assert found[metric][group][key] == pytest.approx(value, rel=rtol, abs=rtol), (
                    f"{metric} {group} {key}"
                )
        assert expected[metric]["all"]["norm_a"] > 0


def test_bf16_with_distributed_optimizer_runs(runs):
    """bf16 parameters, fp32 main parameters and gradients: finite, learning, engine within bf16
    rounding.
    """
    ranks = runs("bf16")
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    assert np.isfinite(ranks[0]["norms"]).all()
    assert ranks[0]["engine_difference"] < 0.5
