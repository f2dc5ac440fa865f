"""``dcpo calibrate --kind adapter`` as a user runs it, on answers of the quickstart's policy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.evaluation.states import with_states
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run

POLICY = QUICKSTART / "policy"
FAST = [
    "model.params_dtype=fp32",
    "training.micro_batch_size=64",
    "training.steps=6",
    "data.examples_per_step=16",
    "optimizer.lr=0.003",
    "logging.to=[]",
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers") / "run"
    done = run(
        "evaluate",
        *("--model", POLICY, "--out", out),
        *("--benchmarks", f"train={QUICKSTART / 'data' / 'train.jsonl'}"),
        *["--template", "raw", "--limit", "40", "--repeats", "2", "--max-tokens", "32"],
        *["--engine", "transformers", "--resamples", "0", "--temperature", "1", "--top-p", "1"],
        *["--keep", "states"],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out / "samples.jsonl"


def calibrate(
    samples: Path, out: Path, *arguments: object, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    return run(
        "calibrate",
        *("--kind", "adapter", "--model", POLICY),
        *("--samples", samples, "--out", out),
        *arguments,
        processes=processes,
    )


@pytest.fixture(scope="module")
def fitted(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fitted") / "run"
    done = calibrate(answers, directory, "--json", *FAST)
    assert done.returncode == 0, done.stderr[-2000:]
    scores = json.loads(done.stdout)["held_out"]
    assert list(scores) == ["verbal", "token", "adapter, mean", "adapter, greedy", "lookup"]
    assert scores["adapter, mean"]["n"] == scores["verbal"]["n"]
    assert scores["adapter, mean"]["accuracy"] == scores["verbal"]["accuracy"]
    return directory


def test_it_learns(fitted: Path) -> None:
    logged = metrics(fitted)
    assert logged[-1]["evaluation/loss"] < logged[0]["evaluation/loss"]
    assert logged[-1]["loss"] < logged[1]["loss"]
    assert not (fitted / "policy").exists(), "the policy stays as it is"


def test_it_is_the_same_at_another_layout(answers: Path, fitted: Path, tmp_path: Path) -> None:
    done = calibrate(
        answers,
        tmp_path / "run",
        *FAST,
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_packing=true",
        processes=2,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for key in ("loss", "evaluation/loss"):
        ours = [row[key] for row in metrics(tmp_path / "run") if key in row]
        one = [row[key] for row in metrics(fitted) if key in row]
        assert ours == pytest.approx(one, rel=1e-4)


def test_one_of_several_processes_writes(answers: Path, fitted: Path, tmp_path: Path) -> None:
    """All write under one temporary name, which only the first that is done would find."""
    out = tmp_path / "with.jsonl"
    rows = tmp_path / "rows.jsonl"
    done = run(
        "calibrate",
        *("--apply", fitted, "--out", out, "--demonstrations", rows, "--samples", answers),
        *("--json", "model.params_dtype=fp32"),
        processes=2,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = map(json.loads, done.stdout.splitlines())
    assert said["restated"] == len(rows.read_text().splitlines())
    assert len(read_samples(out)) == said["n"] == 80


def test_it_is_read_out_and_scored(answers: Path, fitted: Path, tmp_path: Path) -> None:
    """The answers stand as they are; only their confidence is another one. As demonstrations they
    state it, and ``dcpo sft`` takes them.
    """
    out = tmp_path / "with.jsonl"
    rows = tmp_path / "rows.jsonl"
    done = run(
        "calibrate",
        *("--apply", fitted, "--out", out, "--demonstrations", rows, "--samples", answers),
        "model.params_dtype=fp32",  # an option, not a file
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before = [json.loads(line) for line in answers.read_text().splitlines()]
    after = [json.loads(line) for line in out.read_text().splitlines()]
    for old, new in zip(before, after, strict=True):
        confidence = new.pop("posthoc_confidence", None)
        assert new.pop("posthoc_by") == "adapter, mean"
        assert new == old
        assert (confidence is None) == (old["finish_reason"] != "stop")
        assert confidence is None or 0 <= confidence <= 1
    done = run(
        "evaluate",
        *("--samples", out, "--out", tmp_path / "scored"),
        *["--confidence", "posthoc,verbal", "--resamples", "0"],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = {(row["prompt"], row["response"]) for row in map(json.loads, rows.open())}
    stated = [json.loads(line) for line in out.read_text().splitlines()]
    expected = {
        (row["problem"], restated_text(row))
        for row in stated
        if row["status"] == "ok" and row["posthoc_confidence"] is not None
    }
    assert said == expected
    done = run(
        *("sft", "--config", QUICKSTART / "sft.yaml", "--dry-run", f"data.path={rows}"),
        *(f"model.path={POLICY}", f"run_dir={tmp_path / 'said'}"),
    )
    assert done.returncode == 0, done.stderr[-2000:]


def restated_text(row: dict[str, Any]) -> str:
    """Return the text of an answer with its post-hoc confidence at its end."""
    text = row["text"].rstrip()
    stated = re.search(r"[0-9.]+$", text)
    assert stated is not None
    return f"{text[: stated.start()]}{row['posthoc_confidence']:.2f}"


def changed(samples: Path, out: Path, change: Any, lines: int | None = None) -> Path:
    """Write the samples again, each line changed."""
    rows = [json.loads(line) for line in samples.read_text().splitlines()[:lines]]
    out.parent.mkdir(exist_ok=True)
    out.write_text("".join(json.dumps({**row, **change(row)}) + "\n" for row in rows))
    settings = samples.with_name("settings.json")
    out.with_name("settings.json").write_text(settings.read_text())
    return out


def test_kept_states_are_those_of_transformers(answers: Path) -> None:
    """Of the last layer, after the final norm, at the last token before the number."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    samples = with_states(read_samples(answers), answers)
    compared = [sample for sample in samples if sample.state is not None][:5]
    assert compared
    for sample in compared:
        answer = (sample.response.text or "").partition("<conf>")[0].rstrip()
        text = f"{sample.prompt.problem}{answer}\n<conf> Confidence: "
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        np.testing.assert_allclose(sample.state, hidden[0, -1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("teacher", ["task", "stack"])
def test_a_teacher_that_knows_other_problems(answers: Path, tmp_path: Path, teacher: str) -> None:
    done = calibrate(answers, tmp_path / "run", "--teacher", teacher, "--held-out", "0", *FAST)
    assert done.returncode == 0, done.stderr[-2000:]
    described = json.loads((tmp_path / "run" / "confidence.json").read_text())
    assert (described["teacher"], described["answers"]) == (teacher, 80)


def test_a_number_learned_as_text_is_read_out_greedily(answers: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = calibrate(answers, directory, "--target", "text", "--held-out", "0", *FAST)
    assert done.returncode == 0, done.stderr[-2000:]
    described = json.loads((directory / "confidence.json").read_text())
    assert (described["target"], sum(described["kinds"].values())) == ("text", 80)
    logged = metrics(directory)
    assert logged[-1]["loss"] < logged[0]["loss"]
    out = tmp_path / "with.jsonl"
    done = run(
        "calibrate",
        *("--apply", directory, "--read", "greedy", "--json"),
        *("--samples", answers, "--out", out, "model.params_dtype=fp32"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["read"] == "greedy"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["posthoc_by"] for row in rows} == {"adapter, greedy"}
    stated = [row["posthoc_confidence"] for row in rows if "posthoc_confidence" in row]
    assert all(round(100 * value) == pytest.approx(100 * value) for value in stated)


@pytest.mark.parametrize(
    ("change", "lines", "arguments", "named"),
    [
        (lambda row: {"correct": 1.0}, None, [], "correct"),
        (lambda row: {}, 30, [], "50"),
        (lambda row: {"finish_reason": "length"}, None, [], "finished"),
        (lambda row: {"problem": ""}, None, [], "problem"),
        (lambda row: {}, None, ["data.template=chat"], "template"),
        (lambda row: {"asked": "0" * 16}, None, [], "data.template"),
        (lambda row: {}, None, ["--features", "task"], "--features"),
        (lambda row: {"kind": None}, None, ["--teacher", "task"], "--teacher reasoning"),
        (lambda row: {}, None, ["model.adapter.rank=0"], "model.adapter.rank"),
    ],
)
def test_bad_input_is_one_line(
    answers: Path, tmp_path: Path, change: Any, lines: int | None, arguments: list[str], named: str
) -> None:
    samples = changed(answers, tmp_path / "changed" / "samples.jsonl", change, lines)
    done = calibrate(samples, tmp_path / "run", *FAST, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert named in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "run" / "adapter").exists()


def test_options_of_the_adapter_are_refused_elsewhere(
    answers: Path, fitted: Path, tmp_path: Path
) -> None:
    for arguments, named in (
        (["--kind", "logistic", "--teacher", "task"], "--teacher"),
        (["--kind", "isotonic", "optimizer.lr=1"], "optimizer.lr"),
        (["--kind", "adapter"], "--model"),
        (["--apply", str(tmp_path)], "confidence.json"),
        (["--apply", str(fitted), "--teacher", "correct"], "--teacher"),
        (["--apply", str(fitted), "--target", "text"], "--target"),
        (["--kind", "adapter", "--model", str(POLICY), "--read", "mean"], "--read"),
        (["--kind", "platt", "--target", "text"], "--target"),
    ):
        done = run("calibrate", *("--samples", answers, "--out", tmp_path / "out.npz"), *arguments)
        assert done.returncode == 2
        assert named in done.stderr.strip().splitlines()[-1]


def settings_changed(samples: Path, **values: str) -> None:
    """Change the settings next to a file of samples."""
    path = samples.with_name("settings.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "value"), [("template", "paper"), ("thinking", "on"), ("marker", "[sure]")]
)
def test_answers_that_were_asked_otherwise_are_not_read(
    answers: Path, fitted: Path, tmp_path: Path, name: str, value: str
) -> None:
    """Settings leave out what is as usual: samples without it are not like this adapter's."""
    samples = changed(answers, tmp_path / "b" / "samples.jsonl", lambda row: {})
    unusual = tmp_path / "unusual"
    shutil.copytree(fitted, unusual)
    described = json.loads((unusual / "confidence.json").read_text())
    (unusual / "confidence.json").write_text(json.dumps({**described, name: value}))
    out = tmp_path / "out.jsonl"
    done = run("calibrate", *("--apply", unusual, "--samples", samples, "--out", out))
    assert done.returncode == 2
    assert f"{name}={value}" in done.stderr.strip().splitlines()[-1]
    settings_changed(samples, **{name: value})
    done = run("calibrate", *("--apply", fitted, "--samples", samples, "--out", out))
    assert done.returncode == 2
    assert name in done.stderr.strip().splitlines()[-1]
    assert not out.exists()


def test_answers_of_an_agent_are_refused(answers: Path, fitted: Path, tmp_path: Path) -> None:
    """Their turns are not in the samples: the answer would be put behind the problem."""
    samples = changed(answers, tmp_path / "b" / "samples.jsonl", lambda row: {})
    settings_changed(samples, agent="agent.py:answer")
    for done in (
        run(*("calibrate", "--apply", fitted, "--samples", samples, "--out", tmp_path / "out")),
        calibrate(samples, tmp_path / "run"),
    ):
        assert done.returncode == 2
        assert "agent.py:answer" in done.stderr.strip().splitlines()[-1]


def test_what_is_written_is_looked_at_first(answers: Path, fitted: Path, tmp_path: Path) -> None:
    samples = changed(answers, tmp_path / "b" / "samples.jsonl", lambda row: {})
    before = samples.read_bytes()
    out = tmp_path / "out.jsonl"
    absent = tmp_path / "absent" / "file.jsonl"
    for written, named in (
        (["--out", absent], "--out"),
        (["--out", out, "--demonstrations", absent], "--demonstrations"),
        (["--out", out, "--demonstrations", out], "--demonstrations"),
        (["--out", out, "--demonstrations", samples], "--demonstrations"),
        (["--out", out, "--demonstrations", tmp_path / "rows.txt"], ".jsonl"),
    ):
        done = run("calibrate", *("--apply", fitted, "--samples", samples), *written)
        assert done.returncode == 2
        assert named in done.stderr.strip().splitlines()[-1]
    assert samples.read_bytes() == before
    assert not out.exists()


def test_answers_that_state_nothing_make_no_demonstrations(
    answers: Path, fitted: Path, tmp_path: Path
) -> None:
    """The samples are written all the same."""
    nothing = {"confidence": None, "status": "missing"}
    samples = changed(answers, tmp_path / "b" / "samples.jsonl", lambda row: nothing)
    out, rows = tmp_path / "out.jsonl", tmp_path / "rows.jsonl"
    done = run(
        "calibrate",
        *("--apply", fitted, "--out", out, "--demonstrations", rows, "--samples", samples),
        "model.params_dtype=fp32",
    )
    assert done.returncode == 2
    assert "--demonstrations" in done.stderr.strip().splitlines()[-1]
    assert len(read_samples(out)) == len(read_samples(samples))
    assert not rows.exists()


def test_another_model_than_the_fitted_is_said(answers: Path, fitted: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(POLICY, other)
    for model, said in ((other, True), (POLICY, False)):
        done = run(
            "calibrate",
            *("--apply", fitted, "--model", model, "--samples", answers),
            *("--out", tmp_path / "out.jsonl", "model.params_dtype=fp32"),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert (str(other) in done.stderr) == said


def test_other_weights_under_the_name_of_the_fitted_model_are_said(
    answers: Path, fitted: Path, tmp_path: Path
) -> None:
    model, adapter = tmp_path / "policy", tmp_path / "fitted"
    shutil.copytree(POLICY, model)
    shutil.copytree(fitted, adapter)
    description = json.loads((adapter / "confidence.json").read_text())
    (adapter / "confidence.json").write_text(json.dumps({**description, "model": str(model)}))
    for changed in (False, True):
        if changed:
            os.utime(model / "model.safetensors")
        done = run(
            *("calibrate", "--apply", adapter, "--samples", answers),
            *("--out", tmp_path / "out.jsonl", "model.params_dtype=fp32"),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert ("other files" in done.stderr) == changed
