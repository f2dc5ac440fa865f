"""A run whose confidence has parameters of its own, as a user runs it: trained, resumed, exported, evaluated."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dcpo.judging.statement import StatementForm
from megatron_dcpo.rollout import TransformersEngine
from megatron_dcpo.rollout.confidence_adapter import ConfidenceAdapter
from megatron_dcpo.weights.peft_adapter import SavedAdapter, read_adapter
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, metrics, policy_with_room, run, train, without_clocks

HELDOUT = f"heldout={QUICKSTART / 'data' / 'heldout.jsonl'}"


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without a stop."""
    directory = tmp_path_factory.mktemp("adapter") / "run"
    train(directory, "training.steps=4", method="dcpo_adapter")
    return directory


def test_the_model_is_the_one_that_grpo_trains_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    train(tmp_path / "grpo", "training.steps=4", method="grpo")
    assert digests(tmp_path / "grpo" / "policy") == {
        name: value for name, value in digests(finished / "policy").items() if "confidence_adapter" not in name
    }


def test_confidences_are_in_the_metrics(finished: Path) -> None:
    last = metrics(finished)[-1]
    assert last["format/violation_rate"] == 0
    assert 0 < last["confidence/mean"] < 1
    assert -1 <= last["reward/calibration"] <= 0
    assert last["grad_norm/adapter_max"] > 0


def test_resumption_is_bit_for_bit_and_works_at_another_layout(finished: Path, tmp_path: Path) -> None:
    options = ("training.steps=4", "training.save_interval=2", "training.keep_checkpoints=9")
    train(tmp_path / "run", *options, method="dcpo_adapter")
    for layout in ((), ("parallel.tensor_model_parallel_size=2",)):
        again = tmp_path / f"again{len(layout)}"
        (again / "checkpoints").mkdir(parents=True)
        source = tmp_path / "run" / "checkpoints"
        (again / "checkpoints" / "iter_0000002").symlink_to(source / "iter_0000002")
        (again / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
        train(again, *options, *layout, "training.resume=auto", method="dcpo_adapter", processes=1 + len(layout))
        if not layout:
            assert digests(again / "policy") == digests(finished / "policy")
            assert without_clocks(metrics(again)) == without_clocks(metrics(finished))[2:]
            continue
        name = "policy/confidence_adapter/adapter_model.safetensors"
        expected = load_file(finished / name)
        for key, value in load_file(again / name).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-3, atol=1e-4, err_msg=key)


def evaluate(model: Path, out: Path, *options: str) -> dict[str, float]:
    sampling = ("--temperature", "1", "--top-p", "1", "--top-k", "0", "--max-tokens", "32", "--repeats", "2")
    arguments = ("--benchmarks", HELDOUT, "--limit", "20", "--template", "raw", "--engine", "transformers", *sampling)
    done = run("evaluate", "--model", model, "--out", out, *arguments, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "evaluation.json").read_text())["benchmarks"]["heldout"]


def test_evaluation_states_with_the_adapter_what_the_model_reasoned(finished: Path, tmp_path: Path) -> None:
    stated = evaluate(finished / "policy", tmp_path / "with")
    own = evaluate(finished / "policy", tmp_path / "without", "--no-adapter")
    assert stated["accuracy"] == own["accuracy"]
    assert stated["verbal"]["mean"] != own["verbal"]["mean"]
    assert stated["violation_rate"] == 0
    rows = [
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("with", "without")
    ]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["response"].partition("<conf>")[0].rstrip() == theirs["response"].partition("<conf>")[0].rstrip()
        assert mine["response"].endswith(f"{mine['confidence']:.2f}")


def test_an_adapter_on_the_whole_text_leaves_the_policy_alone_too(finished: Path, tmp_path: Path) -> None:
    options = ("model.adapter.activated=false", "objective.confidence_sees=text", "training.steps=4")
    train(tmp_path / "run", *options, "judging.confidence_tokens=0", method="dcpo_adapter")
    found, expected = digests(tmp_path / "run" / "policy"), digests(finished / "policy")
    assert found["model.safetensors"] == expected["model.safetensors"]
    assert found.keys() | {"confidence_adapter/confidence.safetensors"} == expected.keys()
    stated = evaluate(tmp_path / "run" / "policy", tmp_path / "out")
    assert stated["violation_rate"] == 0
    assert "alora_invocation_tokens" not in json.loads(
        (tmp_path / "run" / "policy" / "confidence_adapter" / "adapter_config.json").read_text()
    )


def test_tokens_of_its_own(tmp_path: Path) -> None:
    options = ("judging.confidence_tokens=101", "optimizer.adapter_lr=0.02", "training.steps=4")
    rows = train(tmp_path / "run", *options, method="dcpo_adapter")
    assert rows[0]["confidence/mean"] == 0.5  # the rows of the new tokens are zero: all values are as likely
    assert rows[-1]["confidence/mean"] != 0.5
    saved = tmp_path / "run" / "policy" / "confidence_adapter"
    assert load_file(saved / "confidence.safetensors")["confidence_tokens.weight"].shape[0] == 101
    stated = evaluate(tmp_path / "run" / "policy", tmp_path / "out")
    assert stated["violation_rate"] == 0
    assert stated["verbal"]["mean"] != 0.5


def test_tokens_of_its_own_have_a_place_in_the_vocabulary(tmp_path: Path) -> None:
    """Where the model has rows that its tokenizer does not use, whatever takes a LoRA of the output layer can state them."""
    model = policy_with_room(tmp_path / "model")
    options = (f"model.path={model}", "judging.confidence_tokens=101", "optimizer.adapter_lr=0.02", "training.steps=3")
    whole = ("model.adapter.activated=false", "objective.confidence_sees=text")
    train(tmp_path / "run", *options, *whole, method="dcpo_adapter")
    directory = tmp_path / "run" / "policy" / "confidence_adapter"
    saved, tokenizer = read_adapter(directory), AutoTokenizer.from_pretrained(directory)
    assert saved.servable
    assert tokenizer.encode("<conf_0.83>", add_special_tokens=False) == [saved.token_ids[83]]
    assert len(AutoTokenizer.from_pretrained(model)) == saved.token_ids[0]
    pair = {
        name.split(".")[-2]: tensor
        for name, tensor in load_file(directory / "adapter_model.safetensors").items()
        if "lm_head" in name
    }
    before = load_file(tmp_path / "run" / "policy" / "model.safetensors")["lm_head.weight"]
    rows = before + saved.scale * pair["lora_B"] @ pair["lora_A"]
    own = load_file(directory / "confidence.safetensors")["confidence_tokens.weight"]
    np.testing.assert_allclose(rows[list(saved.token_ids)], own, atol=1e-6)
    others = np.setdiff1d(np.arange(len(before)), saved.token_ids)
    np.testing.assert_array_equal(rows[others], before[others])
    assert np.abs(own).max() > 0
    assert evaluate(tmp_path / "run" / "policy", tmp_path / "out")["violation_rate"] == 0
    if find_spec("peft"):  # make test-peft
        check_with_peft(tmp_path / "run" / "policy", saved)


def check_with_peft(policy: Path, saved: SavedAdapter) -> None:
    """PEFT's logits of the tokens are those that a transformers model states by."""
    from peft import PeftModel

    lead = (7, 8, 9)
    here = ConfidenceAdapter(
        TransformersEngine.from_pretrained(policy), saved, StatementForm("", lead, np.arange(101), activated=False)
    )
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, str(saved.directory)).eval()(torch.tensor([[5, 6, *lead]])).logits
    expected = here.logits([[5, 6]], np.zeros((1, 4), np.float32))[0]
    np.testing.assert_allclose(logits[0, -1:, list(saved.token_ids)].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (
            (
                "model.adapter=null",
                "objective.confidence_parameters=shared",
                "objective.confidence_sees=text",
                "judging.confidence_tokens=101",
            ),
            "judging.confidence_tokens",
        ),
        (("model.adapter=null",), "model.adapter"),
        (("rollout.temperature=0.7",), "rollout.temperature=1"),
        (("model.adapter.rank=0",), "rank"),
        (("model.adapter.targets=[w_proj]",), "targets"),
        (("objective.marker_block=reasoning",), "marker_block"),
        (("objective.digit_damping=0.1",), "digit_damping"),
    ],
)
def test_contradictions_are_one_line(overrides: tuple[str, ...], word: str, tmp_path: Path) -> None:
    config = QUICKSTART / "dcpo_adapter.yaml"
    done = run("train", "--config", config, f"run_dir={tmp_path}/run", *overrides)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert word in lines[0]


@pytest.mark.parametrize(
    ("method", "overrides", "word"),
    [
        ("grpo", (), "saved with model.adapter"),
        ("dcpo_adapter", ("model.adapter.rank=16",), "saved with model.adapter.rank=4, not 16"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_one_line(
    method: str, overrides: tuple[str, ...], word: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "checkpoints", tmp_path / "run" / "checkpoints")
    before = digests(tmp_path / "run")
    options = (f"run_dir={tmp_path}/run", *SMALL, "training.steps=5", "training.resume=auto", *overrides)
    done = run("train", "--config", QUICKSTART / f"{method}.yaml", *options)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert word in lines[-1], done.stderr
    assert "Traceback" not in done.stderr
    assert digests(tmp_path / "run") == before


@pytest.mark.parametrize("damage", ["adapter_model.safetensors", "confidence.json", "adapter_config.json"])
def test_a_damaged_adapter_is_one_line(damage: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "policy", tmp_path / "policy")
    path = tmp_path / "policy" / "confidence_adapter" / damage
    path.write_bytes(path.read_bytes()[:20])
    options = ("--benchmarks", HELDOUT, "--limit", "2", "--engine", "transformers", "--template", "raw")
    done = run("evaluate", "--model", tmp_path / "policy", "--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "confidence_adapter" in done.stderr
