"""A path in a file is looked for beside the file, then in the working directory; an error names
both places.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import Config, load_config, to_yaml
from megatron_dcpo.data.datasets import load_records
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.function_verifier import load_function

HEAD = "run_dir: runs/r\n"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The directory of the file, and the working directory."""
    beside, working = tmp_path / "project", tmp_path / "elsewhere"
    beside.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    return beside, working


def configured(folder: Path, text: str, *overrides: str) -> Config:
    (folder / "run.yaml").write_text(HEAD + text)
    return load_config(folder / "run.yaml", list(overrides))


def test_every_path_option_is_seen_from_the_file(places: tuple[Path, Path]) -> None:
    beside, _ = places
    (beside / "model").mkdir()
    for name in ("a.jsonl", "b.jsonl", "reward.py", "prompt.py", "method.py", "held.jsonl"):
        (beside / name).write_text("")
    config = configured(
        beside,
        "model: {path: model}\n"
        "data: {template: 'prompt.py:render', path: [a.jsonl, {path: ./b.jsonl, verifier: "
        "'reward.py:f', "
        "template: 'prompt.py:r'}]}\n"
        "judging: {verifier: 'reward.py:verify'}\n"
        "evaluation: {interval: 1, benchmarks: 'math500, mine=held.jsonl'}\n"
        "logging: {to: [tensorboard, 'reward.py:log']}\n",
    )
    assert config.model.path == str(beside / "model")
    assert [source.path for source in config.data.sources] == [
        str(beside / "a.jsonl"),
        str(beside / "b.jsonl"),
    ]
    assert config.data.sources[1].verifier == f"{beside}/reward.py:f"
    assert config.data.sources[1].template == f"{beside}/prompt.py:r"
    assert config.data.template == f"{beside}/prompt.py:render"
    assert config.judging.verifier == f"{beside}/reward.py:verify"
    assert config.evaluation.benchmarks == f"math500, mine={beside}/held.jsonl"
    assert config.logging.to == ("tensorboard", f"{beside}/reward.py:log")
    assert config.run_dir == "runs/r"


def test_a_method_and_a_base_are_seen_from_the_file(places: tuple[Path, Path]) -> None:
    beside, working = places
    (beside / "method.py").write_text("from megatron_dcpo.objectives.grpo import METHOD\n")
    (beside / "base.yaml").write_text(
        HEAD + "model: {path: m}\ndata: {path: d}\nobjective: {name: 'method.py:METHOD'}\n"
    )
    (beside / "run.yaml").write_text("base: base.yaml\n")
    assert load_config(beside / "run.yaml").objective.name == f"{beside}/method.py:METHOD"
    (working / "common.yaml").write_text("model: {path: m}\ndata: {path: d}\n")
    (beside / "run.yaml").write_text(HEAD + "base: common.yaml\n")
    assert load_config(beside / "run.yaml").data.path == "d"
    (beside / "run.yaml").write_text("base: neither.yaml\n")
    with pytest.raises(
        UserError, match=rf"neither.yaml does not exist \(looked for in {beside} and {working}\)"
    ):
        load_config(beside / "run.yaml")


def test_the_file_comes_before_the_working_directory_and_an_override_knows_that_one_only(
    places: tuple[Path, Path],
) -> None:
    beside, working = places
    for folder in places:
        (folder / "a.jsonl").write_text("")
    (working / "b.jsonl").write_text("")
    assert configured(beside, "model: {path: m}\ndata: {path: a.jsonl}\n").data.path == str(
        beside / "a.jsonl"
    )
    assert configured(beside, "model: {path: m}\ndata: {path: b.jsonl}\n").data.path == "b.jsonl"
    override = configured(beside, "model: {path: m}\ndata: {path: b.jsonl}\n", "data.path=a.jsonl")
    assert override.data.path == "a.jsonl"


def test_names_that_are_no_paths_stay(places: tuple[Path, Path]) -> None:
    beside, _ = places
    text = (
        "model: {path: Qwen/Qwen3-8B}\ndata: {path: ['reasoning_gym:chain_sum', d]}\n"
        "judging: {verifier: 'https://h/v'}\n"
    )
    config = configured(beside, text)
    assert config.model.path == "Qwen/Qwen3-8B"
    assert config.data.sources[0].path == "reasoning_gym:chain_sum"
    assert config.judging.verifier == "https://h/v"
    interpolated = configured(beside, "model: {path: '${run_dir}/m'}\ndata: {path: d}\n")
    assert interpolated.model.path == "runs/r/m"


def test_an_error_names_both_places(places: tuple[Path, Path]) -> None:
    beside, working = places
    config = configured(
        beside,
        "model: {path: m}\ndata: {path: d.jsonl, template: 'p.py:f'}\njudging: {verifier: "
        "'v.py:f'}\n",
    )
    both = rf"\(looked for in {beside} and {working}\)"
    assert isinstance(config.data.path, str)
    for what, read in {
        r"d.jsonl: no such data file ": lambda: load_records(str(config.data.path)),
        r"model directory m does not exist ": lambda: read_architecture(config.model.path),
        r"p.py:f: no such file p.py ": lambda: find_template(config.data.template),
        r"v.py:f: no such file v.py ": lambda: load_function(config.judging.verifier),
    }.items():
        with pytest.raises(UserError, match=what + both):
            read()
    with pytest.raises(
        UserError, match=rf"other.jsonl: no such data file \(looked for in {working}\)"
    ):
        load_records("other.jsonl")


def test_the_configuration_of_a_run_directory_is_seen_from_the_working_directory(
    places: tuple[Path, Path],
) -> None:
    """It holds ``policy/``, the trained model, which is not the ``policy`` that the run started
    from.
    """
    beside, working = places
    config = configured(beside, "model: {path: policy}\ndata: {path: d}\n")
    run = working / "runs" / "r"
    (run / "policy").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "run.json").write_text(json.dumps({"launches": []}))
    assert load_config(run / "config.yaml").model.path == "policy"
