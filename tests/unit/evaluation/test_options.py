"""The configuration of ``dcpo evaluate``: flags, overrides and files say the same by one name."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import as_options, main
from megatron_dcpo.cli import evaluate as cli
from megatron_dcpo.cli.evaluate_options import SHORTHANDS
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluation_run import settings_of
from megatron_dcpo.runtime.run_records import today
from tests.helpers.evaluated import evaluated, make_samples
from tests.helpers.paths import QUICKSTART


def config_of(*words: str) -> EvaluateConfig:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    asked = as_options(["evaluate", *words, "--out", "r"])
    return cli.configuration(vars(parser.parse_args(asked)))


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--benchmarks", "a=x,b=y"], "evaluation.benchmarks", "a=x,b=y"),
    (["--repeats", "3"], "evaluation.samples", 3),
    (["--temperature", "0.5"], "evaluation.temperature", 0.5),
    (["--template", "raw"], "data.template", "raw"),
    (["--thinking", "on"], "data.thinking", "on"),
    (["--marker", "<sure>"], "judging.marker", "<sure>"),
    (["--test-seconds", "30"], "judging.test_seconds", 30.0),
    (["--dtype", "bfloat16"], "model.params_dtype", "bf16"),
    (["--batch-size", "7"], "rollout.max_num_seqs", 7),
    (["--engine", "transformers"], "rollout.engine", "transformers"),
    (["--features"], "evaluation.features", True),
    (["--resamples", "0"], "evaluation.resamples", 0),
]


@pytest.mark.parametrize(("flag", "option", "value"), FLAGS, ids=[flag[0] for flag, *_ in FLAGS])
def test_a_flag_is_a_shorthand_for_an_option(flag: list[str], option: str, value: Any) -> None:
    by_flag = config_of("--model", "m", *flag)
    by_override = config_of("--model", "m", f"{option}={str(value).lower()}")
    section, _, name = option.partition(".")
    assert getattr(getattr(by_flag, section), name) == value
    assert by_flag == by_override == config_of("--model", "m", *flag, f"{option}={value}")


SAMPLES = ["--samples", "gone.jsonl"]
MODEL = ["--model", "gone", "--benchmarks", "math500"]
SERVER = ["--endpoint", "http://127.0.0.1:9/v1", "--benchmarks", "math500"]
UNREAD = [
    (SAMPLES, ["--limit", "5"], "--limit"),
    (SAMPLES, ["--benchmarks", "math500"], "--benchmarks"),
    (SAMPLES, ["--temperature", "0.3"], "--temperature"),
    (SAMPLES, ["--model-name", "m"], "--model-name"),
    (SAMPLES, ["evaluation.samples=3"], "evaluation.samples"),
    (SAMPLES, ["--threshold", "0.9"], "--threshold"),
    (SAMPLES, ["judging.graded=true"], "judging.graded"),
    (SAMPLES, ["--as-trained", "run.yaml"], "--as-trained"),
    ([*SAMPLES, "--rejudge"], ["--top-k", "4"], "--top-k"),
    (MODEL, ["--concurrency", "4"], "--concurrency"),
    (MODEL, ["endpoint.model=m"], "endpoint.model"),
    (SERVER, ["--batch-size", "4"], "--batch-size"),
    (SERVER, ["--dtype", "float32"], "--dtype"),
    (SERVER, ["rollout.engine=vllm"], "rollout.engine"),
]
UNREAD += [
    (MODEL, ["--threshold", "0.5"], "--threshold"),
    (SERVER, ["--verifier", "exact", "--threshold", "0.5"], "--threshold"),
    (SERVER, ["--extra-body", '{"temperature": 1.5}'], "extra_body.temperature"),
    (SERVER, ["--extra-body", '{"seed": 3}'], "extra_body.seed"),
    (
        ["--model", "gone", "--benchmarks", "reasoning_gym:chain_sum"],
        ["--verifier", "my_reward.py:verify"],
        "judging.verifier",
    ),
]
READ = [
    (SAMPLES, ["--kinds", "digits", "--resamples", "0", "--seed", "4", "--marker", "<sure>"]),
    (SAMPLES, ["--confidence", "token"]),
    ([*SAMPLES, "--rejudge"], ["--threshold", "0.9", "--test-seconds", "4"]),
    (SERVER, ["rollout.max_response_length=64"]),
    (MODEL, ["--verifier", "f1", "--threshold", "0.5"]),
    (MODEL, ["--dtype", "float32", "--batch-size", "3", "--engine", "transformers"]),
]


@pytest.mark.parametrize(("source", "words", "named"), UNREAD, ids=lambda value: value[-1])
def test_an_option_that_changes_nothing_is_refused(
    source: list[str], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *source, *words, "--out", "r"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("source", "words"), READ, ids=lambda value: value[0])
def test_an_option_that_is_read_is_not(
    source: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *source, *words, "--out", "r"]) == 2
    said = capsys.readouterr().err
    assert "remove it" not in said
    assert not any(word.partition("=")[0] in said for word in words if word.startswith("--"))


def test_a_section_of_a_file_is_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("judging: code\n")
    with pytest.raises(UserError, match="judging"):
        config_of("--model", "m", "--config", str(file))
    file.write_text("judging:\nrun_dir: r\n")
    assert config_of("--model", "m", "--config", str(file)).judging.verifier == "math"


def test_every_shorthand_names_an_option() -> None:
    config = config_of()
    for option in SHORTHANDS.values():
        holder: Any = config
        for name in option.split("."):
            assert name in {field.name for field in fields(holder)}, option
            holder = getattr(holder, name)


def test_a_flag_and_an_override_that_differ_are_refused() -> None:
    with pytest.raises(UserError) as error:
        config_of("--repeats", "3", "evaluation.samples=4")
    assert "--repeats 3" in str(error.value)
    assert "evaluation.samples=4" in str(error.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("objective.lam=1", "objective"),
        ("rollout.group_size=4", "rollout.group_size"),
        ("evaluation.interval=4", "evaluation.interval"),
        ("judging.test_second=4", "judging.test_seconds"),
        ("judging.test_seconds=0", "judging.test_seconds"),
    ],
)
def test_what_an_evaluation_does_not_read_is_refused(override: str, named: str) -> None:
    with pytest.raises(UserError) as error:
        config_of("--model", "m", override)
    assert named in str(error.value)


def test_a_training_configuration_gives_what_an_evaluation_reads(tmp_path: Path) -> None:
    config = config_of("--config", str(QUICKSTART / "dcpo.yaml"))
    assert config.run_dir == "r"
    assert Path(config.model.path).name == "policy"
    assert config.data.template == "raw"
    with_server = config_of("--config", str(QUICKSTART / "dcpo.yaml"), "--endpoint", "http://h/v1")
    assert (with_server.model.path, with_server.endpoint.url) == ("", "http://h/v1")
    file = tmp_path / "own.yaml"
    file.write_text("evaluation: {samples: 2, resamples: 5}\nrollout: {group_size: 4}\n")
    assert config_of("--config", str(file), "--repeats", "9").evaluation.samples == 9
    assert config_of("--config", str(file)).evaluation.resamples == 5
    file.write_text("evaluation: {sample: 2}\n")
    with pytest.raises(UserError, match=r"own\.yaml: .*evaluation\.sample\b"):
        config_of("--config", str(file))
    file.write_text("evaluations: {samples: 2}\n")
    with pytest.raises(UserError, match=r"own\.yaml: .*evaluations"):
        config_of("--config", str(file))


def test_a_model_and_a_server_are_not_evaluated_together() -> None:
    with pytest.raises(UserError, match=r"model\.path.*endpoint\.url"):
        config_of("--model", "m", "endpoint.url=http://h/v1")


def test_a_greedy_evaluation_has_one_response() -> None:
    assert config_of("--model", "m", "--temperature", "0").evaluation.samples == 1
    assert config_of("--model", "m", "evaluation.temperature=0").evaluation.samples == 1
    assert config_of("--model", "m", "--temperature", "0.7").evaluation.samples == 4
    with pytest.raises(UserError, match="--repeats 1"):
        config_of("--model", "m", "--temperature", "0", "--repeats", "2")


def test_settings_hold_what_decides_samples_and_changed_options_of_verdicts() -> None:
    names = "template temperature top_p top_k max_tokens seed extra_body top_logprobs model"
    settings = settings_of(load_evaluation({"run_dir": "r"}), "m", today())
    assert set(settings) == {*names.split(), "date"}
    server = {"run_dir": "r", "endpoint.url": "http://h/v1", "endpoint.api": "chat"}
    assert settings_of(load_evaluation(server), "m", today())["api"] == "chat"
    slower = load_evaluation({"run_dir": "r", "judging.test_seconds": 30})
    assert settings_of(slower, "m", today())["test_seconds"] == 30


def test_a_tag_is_read_in_logs_of_others_and_not_in_samples_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their confidence was read when they were judged, behind the tag of that evaluation."""
    evaluated(tmp_path / "ours", samples=make_samples(4))
    ours = ["evaluate", "--samples", str(tmp_path / "ours" / "samples.jsonl"), "--resamples", "0"]
    out = ["--out", str(tmp_path / "again")]
    assert main([*ours, "--marker", "<sure>", *out]) == 2
    assert "--marker" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    (tmp_path / "evaluate.yaml").write_text("judging: {marker: <sure>}\n")
    assert main([*ours, "--config", str(tmp_path / "evaluate.yaml"), *out]) == 0
    evaluation = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert "marker" not in evaluation
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text('{"right": 1, "said": "4\\n<sure> Confidence: 0.8"}\n')
    log = ["evaluate", "--samples", str(theirs), "--columns", "correct=right,text=said"]
    arguments = [*log, "--marker", "<sure>", "--resamples", "0", "--out", str(tmp_path / "log")]
    assert main(arguments) == 0
    evaluation = json.loads((tmp_path / "log" / "evaluation.json").read_text())
    assert evaluation["marker"] == "<sure>"
    assert evaluation["overall"]["verbal"]["mean"] == 0.8
