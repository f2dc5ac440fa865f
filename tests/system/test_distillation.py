"""Training with a teacher of another size, as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, run, train

POLICY = QUICKSTART / "policy"
MOE = QUICKSTART / "moe" / "policy"
FEW = ("training.steps=1", "training.save_interval=0")
EP2 = ("parallel.expert_model_parallel_size=2", "parallel.use_distributed_optimizer=true")
COEF = "objective.distill_coef_reasoning=1.0"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger and deeper Qwen3 with random weights and the policy's tokenizer."""
    directory = tmp_path_factory.mktemp("teacher") / "policy"
    shutil.copytree(POLICY, directory)
    values = json.loads((POLICY / "config.json").read_text())
    values |= {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    values.pop("layer_types", None)
    torch.manual_seed(3)
    (directory / "model.safetensors").unlink()
    model = Qwen3ForCausalLM(Qwen3Config(**values))
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = values["rope_theta"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def alone(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first step of one process."""
    (step,) = train(
        tmp_path_factory.mktemp("alone") / "run", *FEW, COEF, f"objective.teacher={teacher}"
    )
    return step


def test_the_policy_as_its_own_teacher_changes_nothing(tmp_path: Path) -> None:
    (plain,) = train(tmp_path / "plain", *FEW)
    (taught,) = train(tmp_path / "taught", *FEW, COEF, f"objective.teacher={POLICY}")
    assert "loss/teacher_kl" not in plain
    assert taught["loss/teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    for name in ("loss/policy", "grad_norm/total", "reward/accuracy"):
        assert taught[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


def test_the_teacher_is_the_model_that_is_named(teacher: Path, alone: dict[str, Any]) -> None:
    """Random weights give every token about 1 / V, so that the divergence is about log V - H."""
    tokens = len(AutoTokenizer.from_pretrained(teacher))
    expected = torch.log(torch.tensor(float(tokens))).item()
    assert alone["loss/teacher_kl"] == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (2, ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")),
        pytest.param(2, ("parallel.pipeline_model_parallel_size=2",), marks=pytest.mark.full),
        pytest.param(
            2,
            ("parallel.context_parallel_size=2", "parallel.sequence_packing=true"),
            marks=pytest.mark.full,
        ),
        (1, ("model.adapter.rank=4",)),
    ],
    ids=["tensor", "pipeline", "context-packed", "adapter"],
)
def test_every_layout_gives_the_same_log_probs(
    teacher: Path,
    alone: dict[str, Any],
    tmp_path: Path,
    processes: int,
    overrides: tuple[str, ...],
) -> None:
    words = (*FEW, COEF, f"objective.teacher={teacher}", *overrides)
    (step,) = train(tmp_path / "run", *words, processes=processes)
    for name in ("loss/teacher_kl", "reward/accuracy"):
        assert step[name] == pytest.approx(alone[name], rel=1e-4), name
    if "model.adapter.rank=4" not in overrides:
        assert step["grad_norm/total"] == pytest.approx(alone["grad_norm/total"], rel=1e-3)


@pytest.mark.parametrize(
    ("policy", "teacher_of_it", "layout"),
    [
        (POLICY, MOE, ("parallel.tensor_model_parallel_size=2",)),
        pytest.param(MOE, MOE, EP2, marks=pytest.mark.full),
    ],
    ids=["tensor", "expert"],
)
def test_a_teacher_with_experts_reads_the_same_in_two_processes(
    tmp_path: Path, policy: Path, teacher_of_it: Path, layout: tuple[str, ...]
) -> None:
    words = (*FEW, COEF, f"model.path={policy}", f"objective.teacher={teacher_of_it}")
    (one,) = train(tmp_path / "one", *words)
    (two,) = train(tmp_path / "two", *words, *layout, processes=2)
    kl = one["loss/teacher_kl"]
    assert two["loss/teacher_kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert two["grad_norm/total"] == pytest.approx(one["grad_norm/total"], rel=1e-3)
    assert (kl == pytest.approx(0.0, abs=1e-6)) == (policy == teacher_of_it)


@pytest.mark.full
def test_a_teacher_in_virtual_stages(teacher: Path, tmp_path: Path) -> None:
    """Of as many layers as the policy, which both are divided over the stages."""
    words = (*FEW, COEF, f"model.path={teacher}", f"objective.teacher={teacher}")
    layout = (
        "parallel.pipeline_model_parallel_size=2",
        "parallel.megatron.virtual_pipeline_model_parallel_size=2",
    )
    (step,) = train(tmp_path / "run", *words, *layout, processes=2)
    assert step["loss/teacher_kl"] == pytest.approx(0.0, abs=1e-6)


def test_another_teacher_does_not_resume(teacher: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    train(tmp_path / "run", COEF, f"objective.teacher={other}", "training.steps=1")
    launches = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "teacher" in json.dumps(launches)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    done = run(
        *("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}"),
        *(*SMALL, "--resume", "auto", COEF, f"objective.teacher={other}", "training.steps=2"),
    )
    assert done.returncode == 2
    assert f"objective.teacher={other}" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((COEF,), "objective.teacher"),
        ((f"objective.teacher={POLICY}",), "objective.distill_coef_reasoning"),
        ((COEF, "objective.teacher=nowhere"), "objective.teacher=nowhere"),
        (
            (COEF, "objective.name=ccgspg", f"objective.teacher={POLICY}"),
            "objective.name=ccgspg",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    done = run(
        "train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}", *overrides
    )
    assert done.returncode == 2
    assert done.stderr.count("dcpo train: error") == 1
    assert words in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [("token", "another tokenizer"), ("vocabulary", "tokens"), ("positions", "positions")],
)
def test_a_teacher_that_cannot_read_the_policys_text_is_refused(
    teacher: Path, tmp_path: Path, change: str, words: str
) -> None:
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    if change == "token":
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        first, second = list(vocabulary)[:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif change == "vocabulary":
        config["vocab_size"] -= 8
    else:
        config["max_position_embeddings"] = 16
    (other / "config.json").write_text(json.dumps(config))
    done = run(
        *("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}"),
        *(COEF, f"objective.teacher={other}"),
    )
    assert done.returncode == 2
    assert f"objective.teacher={other}" in done.stderr
    assert words in done.stderr


def test_the_plan_counts_the_teacher(teacher: Path) -> None:
    def plan(*overrides: str) -> dict[str, Any]:
        done = run("plan", "--config", QUICKSTART / "dcpo.yaml", "--gpus", 1, "--json", *overrides)
        assert done.returncode == 0, done.stderr
        planned: dict[str, Any] = json.loads(done.stdout)
        return planned

    plain, taught = plan(), plan(COEF, f"objective.teacher={teacher}")
    model = Qwen3ForCausalLM.from_pretrained(teacher)
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert plain["stages"][0]["teacher"] == 0
    assert taught["stages"][0]["teacher"] == pytest.approx(nbytes, rel=0.1)
    of_stage = taught["stages"][0]["total"] - plain["stages"][0]["total"]
    assert of_stage == taught["stages"][0]["teacher"]
    assert taught["step_seconds"]["teacher"] > 0
    assert taught["step_seconds"]["forward"] == plain["step_seconds"]["forward"]
