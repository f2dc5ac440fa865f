"""An imported checkpoint loads into Megatron's own ``GPTModel`` at any layout, and what Megatron
saves exports exactly.

The loaded parameters are compared with those of a policy built directly from the Hugging Face files
at the same layout, which ``test_parallel_parity`` compares with transformers. Every rank of every
layout then saves with stock ``dist_checkpointing.save``; the export of that must be the original
Hugging Face file to the byte.
"""

import filecmp
from pathlib import Path

import pytest
import torch

from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
from tests.helpers.cases import full_only
from tests.helpers.checkpoints import load_model, save_model
from tests.helpers.launch import torchrun
from tests.helpers.transformer_engine import environment

MODELS = [
    ("qwen2", True, "float32"),
    ("qwen3", False, "bfloat16"),
    ("llama", False, "float32"),
    ("qwen3", True, "float32"),
]
IN_EVERY_SUITE = 2  # of them, with biases and in bfloat16
EXPERTS = [
    ("qwen3_moe", True, "float32"),
    ("qwen3_moe", False, "bfloat16"),
    ("glm4_moe", False, "bfloat16"),
    ("qwen2_moe", True, "float32"),
]
LAYOUTS = {
    "one": (1, {"use_distributed_optimizer": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2_virtual2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "pp2_uneven": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}),
    "tp2_pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
}


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERT_LAYOUTS = {
    "one": (1, {"use_distributed_optimizer": True}),
    "ep2_pp2": (
        4,
        {
            "expert_model_parallel_size": 2,
            "use_distributed_optimizer": True,
            "pipeline_model_parallel_size": 2,
        },
    ),
    "tp2_etp2": (2, TP2),
    "tp2_ep2_etp1": (
        2,
        TP2
        | {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "use_distributed_optimizer": True,
        },
    ),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """(Hugging Face directory, imported checkpoint, dtype) of every model; vocabulary 500, padded
    to 512 as for TP 1.
    """
    return [imported_model(tmp_path_factory, *model) for model in MODELS]


@pytest.fixture(scope="module")
def imported_experts(tmp_path_factory):
    return [imported_model(tmp_path_factory, *model) for model in EXPERTS]


def imported_model(tmp_path_factory, family, tied, dtype):
    base = tmp_path_factory.mktemp(f"{family}_{tied}")
    source = save_model(base / "hf", family, tied, dtype, vocab_size=500)
    import_checkpoint(source, base / "megatron")
    return source, base / "megatron", {"float32": "fp32", "bfloat16": "bf16"}[dtype]


# with `make test-full`
FULL = ("one", "tp2", "tp4", "pp2_uneven", "ep2_pp2", "tp2_etp2")


@pytest.mark.parametrize("layout", full_only(LAYOUTS, FULL))
def test_stock_model_loads_and_saves(imported, tmp_path, layout):
    models = imported if layout in FULL else imported[:IN_EVERY_SUITE]
    loads_and_saves(models, tmp_path, layout)


@pytest.mark.parametrize("layout", full_only(["one", "tp2", "pp2_virtual2"], ["one", "tp2"]))
def test_stock_model_of_transformer_engine_loads_and_saves(imported, tmp_path, layout):
    """The same with Megatron's spec for Transformer Engine, whose layers have extra state, on the
    stand-in.
    """
    loads_and_saves(imported, tmp_path, layout, environment())


@pytest.mark.parametrize("layout", full_only(EXPERT_LAYOUTS, FULL))
def test_stock_model_with_experts_loads_and_saves(imported_experts, tmp_path, layout):
    loads_and_saves(imported_experts, tmp_path, layout, layouts=EXPERT_LAYOUTS)


def loads_and_saves(imported, tmp_path, layout, environment=None, layouts=LAYOUTS):
    processes, parallel = layouts[layout]
    tp = parallel.get("tensor_model_parallel_size", 1)
    cases = [
        {
            "model": str(source),
            "checkpoint": str(checkpoint),
            "dtype": dtype,
            "save": str(tmp_path / str(number)),
        }
        # half of the models with Megatron's default padding, half with the least: 512 x TP and 500
        | {"padded": -(-500 // (128 * tp)) * 128 * tp if number % 2 == 0 else 500}
        for number, (source, checkpoint, dtype) in enumerate(imported)
    ]
    if layout == "one":
        # Megatron's other ways to name the tensors, and a run's own checkpoint, which holds an
        # optimizer too
        more = {key: cases[0][key] for key in ("model", "dtype", "padded")}
        cases += [
            more | {"save": str(tmp_path / "4"), "config": {"hetereogenous_dist_checkpoint": True}},
            more | {"save": str(tmp_path / "5"), "metadata": {"singleton_local_shards": True}},
            more | {"save": str(tmp_path / "6"), "run": True},
        ]
        if (
            environment is None
        ):  # the local norms are fp32 until Float16Module; Transformer Engine's are not
            cases.append(cases[1] | {"save": str(tmp_path / "mixed"), "mixed": True})
    options = {"parallel": parallel, "cases": cases}
    ranks = torchrun("convert", processes, tmp_path / "out", options, environment=environment)
    assert ranks[0]["different"] == []
    for case in cases:
        source, back = Path(case["model"]), Path(case["save"]).with_suffix(".hf")
        export_checkpoint(Path(case["save"]), back, hf_config=source, verify=True)
        assert filecmp.cmp(source / "config.json", back / "config.json", shallow=False), case
        if not case.get("mixed"):
            assert filecmp.cmp(
                source / "model.safetensors", back / "model.safetensors", shallow=False
            ), case
            continue
        before, after = load_model(source), load_model(back)
        assert set(before) == set(after)
        for name, tensor in after.items():
            assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
            assert torch.equal(tensor.bfloat16(), before[name]), name
