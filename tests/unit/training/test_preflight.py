"""Every illegal combination is named by a dry run, in one line, before anything is allocated."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config
from megatron_dcpo.rollout import local_engine
from megatron_dcpo.training.dry_run import unlike_the_paper
from tests.helpers.paths import EXAMPLES, QUICKSTART

TP, PP, VPP = (
    f"parallel.{name}_model_parallel_size"
    for name in ("tensor", "pipeline", "megatron.virtual_pipeline")
)  # 2 layers, 2 heads, 2 key/value heads, ffn 192, vocabulary 282

ILLEGAL = [
    (
        ["parallel.sequence_parallel=true"],
        "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1",
    ),
    ([f"{VPP}=2"], f"{VPP} > 1 needs {PP} > 1"),
    ([f"{PP}=2", f"{VPP}=2"], "(x virtual stages = 4) does not divide the model's 2 layers"),
    ([f"{PP}=3"], "does not divide the model's 2 layers"),
    ([f"{TP}=3"], "does not divide the model's 2 attention heads"),
    ([f"{TP}=4"], "does not divide the model's 2 attention heads"),
    (
        ["parallel.megatron.cp_comm_type=all_gather"],
        "parallel.megatron.cp_comm_type=all_gather needs parallel.context_parallel_size > 1",
    ),
    (
        [
            "parallel.megatron.cp_comm_type=all_gather",
            "parallel.context_parallel_size=2",
            "parallel.sequence_packing=true",
        ],
        "and no sequence_packing",
    ),
    (
        ["parallel.megatron.overlap_param_gather=true"],
        "parallel.megatron.overlap_param_gather needs parallel.use_distributed_optimizer",
    ),
    (
        ["parallel.megatron.overlap_param_gather=true", "parallel.use_distributed_optimizer=true"],
        "parallel.megatron.overlap_param_gather needs overlap_grad_reduce",
    ),
    (
        ["training.updates_per_rollout=5"],
        "training.updates_per_rollout=5 does not divide data.prompts_per_step=48",
    ),
    (["optimizer.min_lr=1"], "optimizer.min_lr=1.0 is above optimizer.lr=0.0003"),
    ([f"{TP}=0"], TP),
    ([f"{PP}=-1"], PP),
    (["training.micro_batch_size=0"], "training.micro_batch_size"),
    (["training.max_tokens_per_micro_batch=0"], "training.max_tokens_per_micro_batch"),
    (["parallel.recompute_granularity=some"], "parallel.recompute_granularity"),
    (
        ["parallel.megatron.recompute_num_layers=2"],
        "recompute_num_layers need parallel.recompute_granularity=full",
    ),
    (
        ["parallel.recompute_granularity=full", "parallel.megatron.recompute_num_layers=3"],
        "parallel.megatron.recompute_num_layers=3 does not divide the 2 layers",
    ),
    (["parallel.megatron.recompute_method=block"], "parallel.megatron.recompute_method and"),
    (
        ["parallel.megatron.recompute_modules=[mlp]"],
        "parallel.megatron.recompute_modules needs parallel.recompute_granularity=selective",
    ),
    (
        ["parallel.recompute_granularity=selective", "parallel.megatron.recompute_modules=[moe]"],
        "parallel.megatron.recompute_modules",
    ),
    (
        ["parallel.megatron.tensor_model_parallel_size=2"],
        "is decided by parallel.tensor_model_parallel_size; remove it",
    ),
    (
        ["parallel.megatron.zzz=1"],
        "parallel.megatron.zzz is unknown to TransformerConfig, DistributedDataParallelConfig,",
    ),
    (["model.transformer_impl=transformer_engine"], "Transformer Engine needs a GPU"),
    (["training.keep_checkpoints=0"], "training.keep_checkpoints"),
]


EXPERTS = "model.path=megatron_dcpo/planning/models/Qwen/Qwen3-30B-A3B"
ILLEGAL += [
    (
        [EXPERTS, "rollout.engine=server", "rollout.endpoint=http://host/v1"],
        "rollout.engine=server does not get",
    ),
    ([EXPERTS, "model.adapter.rank=2"], "model.adapter"),
]


def dry_run(overrides, capsys):
    status = main(["train", "--config", str(QUICKSTART / "dcpo.yaml"), "--dry-run", *overrides])
    return status, capsys.readouterr().err


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(QUICKSTART.parents[1])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    ILLEGAL,
    ids=lambda value: "-".join(value) if list is type(value) else "",
)
def test_illegal_combination_is_named(overrides, message, capsys):
    status, said = dry_run(overrides, capsys)
    assert status == 2
    assert message in said
    assert len(said.splitlines()) == 1
    assert len(said) < 600


@pytest.mark.parametrize(
    ("long", "named", "fix"),
    [
        ("data.path", "rollout.max_response_length", "data.max_prompt_length"),
        ("evaluation.benchmarks", "evaluation.max_tokens", "evaluation.benchmarks"),
    ],
)
def test_a_prompt_beyond_the_positions_is_named(
    long: str, named: str, fix: str, tmp_path: Path, capsys: Any
) -> None:
    """The benchmark's is not the training's: data.max_prompt_length does nothing for it."""
    for name, problem in (("short", "1+2="), ("long", "1+2=" * 80)):
        row = json.dumps({"problem": problem, "answer": "3"})
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    trained = tmp_path / ("long.jsonl" if long == "data.path" else "short.jsonl")
    overrides = [
        f"data.path={trained}",
        "data.max_prompt_length=1000",
        "evaluation.interval=1",
        "evaluation.max_tokens=8",
        f"evaluation.benchmarks=long={tmp_path / 'long.jsonl'}",
    ]
    status, said = dry_run(overrides, capsys)
    assert status == 2
    assert named in said
    assert "long/0" in said
    assert fix in said


def test_an_option_far_from_megatrons_names_the_classes_not_their_fields(capsys):
    status, said = dry_run(["parallel.megatron.zzz=1"], capsys)
    assert status == 2
    assert said.endswith(
        "unknown to TransformerConfig, DistributedDataParallelConfig, OptimizerConfig of the "
        "installed megatron-core\n"
    )
    assert len(said) <= 300


def test_world_size_of_the_launcher(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    status, said = dry_run([f"{TP}=2"], capsys)
    assert status == 2
    assert "= 2 does not divide the 3 process(es) started" in said


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{TP}=2", "parallel.sequence_parallel=true", "parallel.sequence_packing=true"],
        [f"{PP}=2", "parallel.recompute_granularity=full"],
        ["parallel.megatron.overlap_grad_reduce=true"],
        [
            "parallel.megatron.overlap_grad_reduce=true",
            "parallel.megatron.overlap_param_gather=true",
            "parallel.use_distributed_optimizer=1",
        ],
    ],
)
def test_legal_combination_passes(overrides, capsys):
    assert dry_run(overrides, capsys)[0] == 0


def test_a_gpu_without_transformer_engine_is_refused_unless_local_is_said(capsys, monkeypatch):
    from megatron_dcpo.policy import layers
    from megatron_dcpo.runtime.device import _GPU
    from megatron_dcpo.training import preflight

    for module in (layers, preflight):
        monkeypatch.setattr(module, "capabilities", lambda: _GPU)
    monkeypatch.setattr("megatron.core.models.gpt.gpt_layer_specs.HAVE_TE", False)
    for name in ("transformer_engine", "transformer_engine.pytorch"):  # not installed
        monkeypatch.setitem(sys.modules, name, None)
    for choice in ("auto", "transformer_engine"):
        status, said = dry_run([f"model.transformer_impl={choice}"], capsys)
        assert status == 2
        assert (
            f"model.transformer_impl={choice}: on a GPU the layers are Transformer Engine's" in said
        )
        assert "ModuleNotFoundError" in said
        assert "set model.transformer_impl=local" in said
        assert len(said.splitlines()) == 1
    assert dry_run(["model.transformer_impl=local"], capsys)[0] == 0


@pytest.mark.parametrize(
    ("example", "overrides", "differs"),
    [
        ("qwen3_8b/math/ccgspg", [], []),
        ("qwen3_8b/math/dcpo", [], ["objective.tis_level=token"]),
        ("qwen3_8b/math/ccgspg", ["rollout.group_size=4"], ["rollout.group_size=4"]),
        ("qwen3_8b/math/ccgspg", ["model.adapter.rank=4"], ["model.adapter"]),
        ("qwen3_8b/math/ccgspg", ["optimizer.lr=2e-6"], ["optimizer.lr=2e-06"]),
    ],
)
def test_what_is_unlike_the_paper(example: str, overrides: list[str], differs: list[str]) -> None:
    config = load_config(EXAMPLES / f"{example}.yaml", overrides)
    assert unlike_the_paper(config) == differs


def test_a_method_that_the_paper_has_not_is_unlike_it() -> None:
    differs = unlike_the_paper(load_config(QUICKSTART / "ternary.yaml"))
    assert "objective.name=ternary" in differs
    assert "data.prompts_per_step=48" in differs


def test_a_dry_run_looks_at_the_run_directory_as_the_run_does(tmp_path, capsys):
    """A checkpoint that would be overwritten, and a directory that cannot be made; nothing is."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    status, said = dry_run([f"run_dir={run}"], capsys)
    assert status == 2
    assert "step 7" in said
    assert dry_run([f"run_dir={run}", "training.resume=auto"], capsys)[0] == 0
    (tmp_path / "file").write_text("")
    status, said = dry_run([f"run_dir={tmp_path / 'file' / 'run'}"], capsys)
    assert status == 2
    assert "run_dir" in said
    status, said = dry_run(["run_dir=/proc/new"], capsys)
    assert status == 2
    assert "run_dir" in said
    before = sorted(tmp_path.iterdir())
    assert dry_run([f"run_dir={tmp_path / 'new' / 'run'}"], capsys)[0] == 0
    assert sorted(tmp_path.iterdir()) == before


def sft_command(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": "2 and 2=", "response": "4"}) + "\n")
    command = ["sft", "--config", str(QUICKSTART / "sft.yaml"), "--dry-run", f"data.path={data}"]
    return [*command, "data.examples_per_step=1"]


def test_a_dry_run_of_sft_looks_at_the_weights(tmp_path, capsys):
    """As every verb does: those of an index beside those of one file are two models."""
    model = shutil.copytree(QUICKSTART / "policy", tmp_path / "model")
    command = [*sft_command(tmp_path), f"model.path={model}", f"run_dir={tmp_path / 'run'}"]
    assert main(command) == 0
    assert "shapes that config.json implies" in capsys.readouterr().out
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert main(command) == 2
    assert "two sets of weights" in capsys.readouterr().err


def test_a_dry_run_of_sft_looks_at_the_run_directory_too(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    command = sft_command(tmp_path)
    for directory, why in ((tmp_path / "file" / "run", "file is not a directory"), (run, "step 7")):
        assert main([*command, f"run_dir={directory}"]) == 2
        assert why in capsys.readouterr().err
    assert main([*command, f"run_dir={tmp_path / 'new'}"]) == 0


def test_an_engine_that_is_not_here_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an error: the run may be meant for another machine."""
    monkeypatch.setattr(local_engine, "find_spec", lambda name: None)
    config = ["--config", str(QUICKSTART / "dcpo.yaml")]
    assert main(["train", *config, "--dry-run", "--json", "rollout.engine=vllm"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "not installed" in facts["engine"]
    assert main(["train", *config, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "transformers"
