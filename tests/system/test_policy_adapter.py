"""``model.adapter`` as a user runs it: trained, resumed at other layouts, exported merged and as an
adapter.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run, train
from tests.helpers.resumed import cut_behind

OPTIONS = (
    "model.adapter.rank=4",
    "optimizer.lr=0.01",
    "optimizer.lr_decay_style=linear",
    "objective.kl_coef=0.01",
    "training.steps=4",
    "training.save_interval=2",
    "training.keep_checkpoints=9",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora") / "run"
    train(directory, *OPTIONS)
    return directory


def weights(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def test_the_policy_is_its_base_plus_the_adapter(finished: Path) -> None:
    """The exported weights by the exported pairs, as PEFT defines them."""
    pairs = load_file(finished / "adapter" / "adapter_model.safetensors")
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    base, policy = weights(QUICKSTART / "policy"), weights(finished / "policy")
    changed = 0
    for name, value in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in pairs:
            B, A = pairs[f"{module}.lora_B.weight"], pairs[f"{module}.lora_A.weight"]
            value = value + config["lora_alpha"] / config["r"] * B @ A
            changed += 1
            assert np.abs(policy[name] - base[name]).max() > 0
        np.testing.assert_allclose(policy[name], value, atol=1e-6, err_msg=name)
    assert (
        changed
        == 7 * json.loads((finished / "policy" / "config.json").read_text())["num_hidden_layers"]
    )


def test_peft_loads_it(finished: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed here: make test-peft")
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "policy", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(finished / "policy", dtype=torch.float32)
    model, ids = (
        peft.PeftModel.from_pretrained(base, str(finished / "adapter")).eval(),
        torch.arange(1, 40)[None],
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-4, rtol=1e-4
        )


def test_what_is_sampled_is_what_is_trained(finished: Path) -> None:
    rows = metrics(finished)
    assert max(row["engine/logprob_diff_max"] for row in rows) < 1e-4
    assert rows[0]["loss/kl"] == pytest.approx(
        0, abs=1e-6
    )  # of the frozen policy without its adapter: no second copy
    assert rows[-1]["loss/kl"] > 1e-5
    assert rows[-1]["grad_norm/total"] > 0
    assert rows[0]["learning_rate"] == 0.01 > rows[-1]["learning_rate"] > 0


def test_a_checkpoint_is_exported_merged(finished: Path, tmp_path: Path) -> None:
    directories = (
        "--from",
        finished / "checkpoints",
        "--to",
        tmp_path / "hf",
    )  # config.yaml names the model
    done = run("convert", "export", *directories, "--verify")
    assert done.returncode == 0, done.stderr
    expected = weights(finished / "policy")
    for name, value in weights(tmp_path / "hf").items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)


def test_it_resumes_at_another_layout(finished: Path, tmp_path: Path) -> None:
    again = cut_behind(2, finished, tmp_path / "again")
    layout = ("parallel.tensor_model_parallel_size=2", "training.resume=auto")
    train(again, *OPTIONS, *layout, processes=2)
    expected = load_file(finished / "adapter" / "adapter_model.safetensors")
    for key, value in load_file(again / "adapter" / "adapter_model.safetensors").items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("model.adapter.alpha=8",), "model.adapter.alpha=32.0, not 8.0"),
        (("model.adapter=null",), "was saved with model.adapter"),
    ],
)
def test_another_way_to_train_does_not_resume(
    finished: Path, changed: tuple[str, ...], words: str
) -> None:
    options = (
        *OPTIONS,
        *changed,
        "training.resume=auto",
        "training.steps=5",
        "objective.kl_coef=null",
    )
    done = run("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={finished}", *options)
    assert done.returncode == 2
    assert done.stderr.count("dcpo train: error") == 1
    assert words in done.stderr
    assert metrics(finished)[-1]["step"] == 4


@pytest.mark.parametrize(
    ("command", "overrides", "words"),
    [
        ("train", ("training.train=adapter",), "training.train"),
        ("train", ("model.adapter.rank=4", "optimizer.adapter_lr=0.1"), "optimizer.adapter_lr"),
        ("train", ("model.adapter.rank=0",), "model.adapter.rank"),
    ],
)
def test_contradictions_are_one_line(
    command: str, overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = run(command, "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path}/run", *overrides)
    assert done.returncode == 2
    assert done.stderr.count("dcpo train: error") == 1
    assert words in done.stderr
