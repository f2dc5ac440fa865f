"""What a newcomer gets wrong: status 2, one line on stderr that names the thing, and
nothing lost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config
from tests.helpers.evaluated import evaluated
from tests.helpers.paths import QUICKSTART

ROWS = [{"problem": f"{a}*7=", "answer": str(7 * a)} for a in range(2, 14)]
RUN = """\
run_dir: run
model: {path: policy, params_dtype: fp32}
data: {path: train.jsonl, template: raw, prompts_per_step: 4, max_prompt_length: 16}
rollout: {group_size: 2, max_response_length: 32}
training: {steps: 1}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration, its data and its model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copytree(QUICKSTART / "policy", tmp_path / "policy")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of an earlier run\n")
    return tmp_path


def dry(*overrides: str) -> list[str]:
    return ["train", "--config", "run.yaml", "--dry-run", *overrides]


def config(text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    return lambda project: (project / "run.yaml").write_bytes(text.encode(encoding)) and None


def data(content: bytes | str, name: str = "train.jsonl") -> Callable[[Path], None]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda project: (project / name).write_bytes(raw) and None


def in_model(name: str, content: bytes | str | None) -> Callable[[Path], None]:
    """Write a file of the model, or remove it."""

    def change(project: Path) -> None:
        path = project / "policy" / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def in_model_config(**values: object) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        path = project / "policy" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def truncated_weights(project: Path) -> None:
    path = project / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def two_data_files(project: Path) -> None:
    (project / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (project / "data" / name).write_text("{}\n")


def unreadable(project: Path) -> None:
    (project / "train.jsonl").unlink()
    (project / "train.jsonl").symlink_to("/proc/self/mem")


def sampled(project: Path) -> None:
    """Samples as an evaluation leaves them."""
    evaluated(project / "earlier")
    (project / "earlier" / "samples.jsonl").rename(project / "s.jsonl")


def empty_directory(project: Path) -> None:
    (project / "empty").mkdir()


def without_tokenizer(project: Path) -> None:
    for path in (project / "policy").glob("tokenizer*"):
        path.unlink()


def one_token_more(project: Path) -> None:
    path = project / "policy" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    token = {"id": 282, "content": "<more>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(token | {"normalized": False, "special": True})
    path.write_text(json.dumps(tokenizer))


def nothing(project: Path) -> None:
    pass


ROW = json.dumps(ROWS[0]) + "\n"
# what is changed in the project, the command, and what its message names
CASES: dict[str, tuple[Callable[[Path], None], list[str], list[str]]] = {
    # the configuration
    "no configuration": (nothing, ["train", "--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "a directory as configuration": (nothing, ["train", "--config", "policy"], ["policy"]),
    "an empty configuration": (config(""), dry(), ["run.yaml", "run_dir"]),
    "a tab in YAML": (config("data:\n\tpath: d\n"), dry(), ["run.yaml"]),
    "a key twice": (config(RUN + "training: {steps: 2}\n"), dry(), ["run.yaml", "training"]),
    "a section as text": (config(RUN + "optimizer: fast\n"), dry(), ["run.yaml", "optimizer"]),
    "a text as number": (nothing, dry("training.steps=ten"), ["training.steps=ten"]),
    "half a number": (nothing, dry("training.steps=1.5"), ["training.steps=1.5"]),
    "a negative number": (nothing, dry("optimizer.lr=-1"), ["optimizer.lr=-1"]),
    "NaN": (nothing, dry("objective.lam=nan"), ["objective.lam=nan"]),
    "an unknown method": (nothing, dry("objective.name=dpo"), ["'dpo'", "'dcpo'"]),
    "an option of another method": (
        nothing,
        dry("objective.name=grpo", "objective.lam=1"),
        ["objective.lam", "objective.name=grpo"],
    ),
    "an override without =": (
        nothing,
        dry("training.steps"),
        ["'training.steps'", "section.key=value"],
    ),
    "a place in a list that is a text": (
        nothing,
        dry("data.path.0.weight=5"),
        ["data.path.0.weight", "train.jsonl", "data.path="],
    ),
    "a base that is not there": (config("base: b.yaml\n"), dry(), ["b.yaml"]),
    "a variable that is not there": (
        config(RUN.replace("run_dir: run", "run_dir: ${home}")),
        dry(),
        ["run.yaml", "home"],
    ),
    "a table as configuration": (
        data("problem,answer\n", "rows.csv"),
        ["train", "--config", "rows.csv", "--dry-run"],
        ["rows.csv", "data.path"],
    ),
    # the model
    "no model": (nothing, dry("model.path=nowhere"), ["nowhere"]),
    "config.json is broken": (in_model("config.json", "{"), dry(), ["policy/config.json:1"]),
    "another size than the weights": (
        in_model_config(hidden_size=128),
        dry(),
        ["policy", "config.json"],
    ),
    "no tokenizer": (without_tokenizer, dry(), ["policy", "tokenizer.json"]),
    "half a tokenizer": (in_model("tokenizer.json", None), dry(), ["policy", "tokenizer"]),
    "a tokenizer of another model": (one_token_more, dry(), ["policy", "283", "vocab_size", "282"]),
    "more tokens than positions": (
        nothing,
        dry("rollout.max_response_length=31000"),
        ["rollout.max_response_length=31000", "max_position_embeddings=256"],
    ),
    "heads that TP does not divide": (
        nothing,
        dry("parallel.tensor_model_parallel_size=3"),
        ["tensor_model_parallel_size=3", "2 attention heads"],
    ),
    # the data
    "no data": (nothing, dry("data.path=nowhere.jsonl"), ["nowhere.jsonl"]),
    "a line cut in half": (data(ROW + ROW[:20]), dry(), ["train.jsonl:2"]),
    "a file that cannot be read": (unreadable, dry(), ["train.jsonl"]),
    "prompts that are all too long": (
        nothing,
        dry("data.max_prompt_length=1"),
        ["train.jsonl", "1 tokens"],
    ),
    "an unknown template": (nothing, dry("data.template=papr"), ["'papr'", "paper"]),
    "a template without a chat template": (nothing, dry("data.template=paper"), ["raw"]),
    "a template that is not there": (
        nothing,
        dry("data.template=p.py:f"),
        ["data.template=p.py:f"],
    ),
    "mathematics judged as programs": (
        nothing,
        dry("judging.verifier=code"),
        ["train.jsonl", "12 of 12", "judging.verifier=code"],
    ),
    "a verifier that is not there": (
        nothing,
        dry("judging.verifier=r.py:f"),
        ["judging.verifier=r.py:f"],
    ),
    "a verifier over http": (
        nothing,
        dry("judging.verifier=http://host/v"),
        ["judging.verifier=http://host/v", "https://"],
    ),
    "validation on nothing": (
        nothing,
        dry("evaluation.interval=1"),
        ["evaluation.interval", "evaluation.benchmarks"],
    ),
    "an unknown benchmark": (
        nothing,
        dry("evaluation.interval=1", "evaluation.benchmarks=math5000"),
        ["math5000"],
    ),
    "a benchmark that is not there": (
        nothing,
        dry("evaluation.interval=1", "evaluation.benchmarks=mine=m.jsonl"),
        ["m.jsonl"],
    ),
    # other verbs
    "samples that are not there": (
        nothing,
        ["evaluate", "--samples", "s.jsonl", "--out", "o"],
        ["s.jsonl"],
    ),
    "an evaluation into a file": (
        nothing,
        [
            "evaluate",
            "--model",
            "policy",
            "--template",
            "raw",
            "--benchmarks",
            "mine=train.jsonl",
            "--out",
            "run.yaml",
        ],
        ["run.yaml"],
    ),
    "an evaluation to where no file can be": (
        sampled,
        ["evaluate", "--samples", "s.jsonl", "--out", "/proc/x"],
        ["/proc/x"],
    ),
    "an evaluation of nothing": (
        nothing,
        ["evaluate", "--model", "policy", "--benchmarks", "m=d.jsonl", "--out", "o"],
        ["d.jsonl"],
    ),
    "an evaluation of no model": (
        nothing,
        ["evaluate", "--model", "no", "--benchmarks", "m=train.jsonl", "--out", "o"],
        ["model directory no "],
    ),
    "a report of nothing": (nothing, ["report", "nowhere", "--out", "r.html"], ["nowhere"]),
    "a calibration of nothing": (
        nothing,
        ["calibrate", "--samples", "s.jsonl", "--out", "c.npz"],
        ["s.jsonl"],
    ),
    "an objective of nothing": (nothing, ["objective", "--input", "g.json"], ["g.json"]),
    "a plan of no model": (
        nothing,
        ["plan", "--config", "run.yaml", "model.path=nowhere", "--gpus", "8"],
        ["nowhere"],
    ),
    "a conversion of nothing": (
        nothing,
        ["convert", "import", "--from", "nowhere", "--to", "m"],
        ["nowhere"],
    ),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not p.is_symlink()
    }


@pytest.mark.parametrize("case", CASES)
def test_one_line_names_it(case: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, arguments, named = CASES[case]
    prepare(project)
    before = contents(project)
    try:
        status = main(arguments)
    except SystemExit as stopped:  # of the parser
        status = int(stopped.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert len(said.err.splitlines()) == 1, said.err
    assert [name for name in named if name not in said.err] == [], said.err
    assert len(said.err) < 700
    assert contents(project) == before


FINE: dict[str, Callable[[Path], None]] = {
    "as it is": nothing,
    "a byte order mark": data(
        b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    ),
    "a byte order mark in YAML": config("\ufeff" + RUN),
    "lines that end in CRLF": data("".join(json.dumps(row) + "\r\n" for row in ROWS)),
    "blank lines, no newline at the end": data("\n\n".join(json.dumps(row) for row in ROWS)),
    "a JSON array": data(json.dumps(ROWS)),
    "numbers as answers": data(
        "".join(json.dumps({**row, "answer": int(row["answer"])}) + "\n" for row in ROWS)
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_meant_is_understood(
    case: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FINE[case](project)
    assert main([*dry(), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["data"] == "train.jsonl: 12 problems"
    assert facts["first prompt"] == "4 tokens: '2*7='"
    assert facts["longest sequence"] == "37 tokens, at most 256"


def test_few_problems_are_a_warning_of_the_dry_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.jsonl").write_text(ROW * 3)
    assert main(dry()) == 0
    (warning,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning ")
    )
    assert "3 problems" in warning
    assert "data.prompts_per_step=4" in warning


def test_what_is_elsewhere_is_allowed_to_be(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.jsonl").unlink()
    command = dry("--allow-missing", "--json")
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["data"].startswith("train.jsonl ")
    assert "tokenizer" in facts
    shutil.rmtree(project / "policy")
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"].startswith("policy ")
    assert "tokenizer" not in facts


def test_a_misspelled_option_names_the_nearest(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*dry(), "--resme=auto"])
    assert ended.value.code == 2
    assert "'--resume'" in capsys.readouterr().err


def test_a_misspelled_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian", "c.yaml"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'train'" in line


def test_a_verb_that_is_ended_by_code_of_the_users_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    Path("mine.py").write_text("import sys\nsys.exit()\n")
    assert main([*dry(), "judging.verifier=mine.py:verify"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "serve", "calibrate", "train"])
def test_a_missing_option_is_not_buried_under_the_others(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= 6


@pytest.mark.parametrize("written", ["wandb,mine.py:log", "[wandb,'mine.py:log']"])
def test_loggers_are_a_list_or_one_text(project: Path, written: str) -> None:
    config = load_config("run.yaml", [f"logging.to={written}"])
    assert config.logging.to == ("wandb", "mine.py:log")
