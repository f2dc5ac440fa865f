"""A run from a name on the hub, against a local server that speaks its protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.helpers.hub import FakeHub
from tests.helpers.paths import FIXTURES, QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, run

NAME = "owner/tiny"
LICENSE = b"---\nlicense: apache-2.0\n---\n# Tiny\n"
HELD_OUT = QUICKSTART / "data/heldout.jsonl"
ONE_STEP = ("training.steps=1", "training.save_interval=1")

Dcpo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    fake = FakeHub().start()
    repository = fake.add(NAME, QUICKSTART / "policy")
    repository.commit({**repository.files, "README.md": LICENSE})
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub_home")


@pytest.fixture(scope="module")
def dcpo(hub: FakeHub, home: Path) -> Dcpo:
    """``dcpo(*arguments)`` in a process of its own, for which this server is the hub."""

    def call(
        *arguments: object, processes: int = 1, status: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = hub.environment(home, **variables)
        done = run(*arguments, processes=processes, torchrun=True, **environment)
        assert done.returncode == status, done.stderr[-3000:]
        return done

    return call


@pytest.fixture(scope="module")
def trained(dcpo: Dcpo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    dcpo(*train(directory, *ONE_STEP))
    return directory


def train(directory: Path, *overrides: str) -> list[str]:
    config = str(QUICKSTART / "dcpo.yaml")
    options = [f"model.path={NAME}", f"run_dir={directory}", *SMALL]
    return ["train", "--config", config, *options, *overrides]


def launches(directory: Path) -> list[dict]:
    return json.loads((directory / "run.json").read_text())["launches"]


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_dry_run_downloads_no_weights(hub: FakeHub, dcpo: Dcpo, tmp_path: Path) -> None:
    asked = len(hub.asked)
    variables = {"HF_HOME": str(tmp_path / "home")}
    done = dcpo(*train(tmp_path / "run"), "--dry-run", "--json", **variables)
    facts = json.loads(done.stdout)
    assert facts["model"].startswith(NAME)
    assert "longest prompt" in facts
    assert not [line for line in hub.asked[asked:] if ".safetensors" in line]
    asked = len(hub.asked)
    dcpo(*train(tmp_path / "run"), "--dry-run", "--allow-missing", HF_HOME=str(tmp_path / "none"))
    dcpo("plan", *train(tmp_path / "run", "model.path=Qwen/Qwen3-0.6B")[1:], "--gpus", 1)
    assert len(hub.asked) == asked


def test_a_run_keeps_the_name_and_pins_the_commit(hub: FakeHub, trained: Path) -> None:
    repository = hub.repositories[NAME]
    (launch,) = launches(trained)
    assert launch["model"]["path"] == NAME
    assert launch["model"]["commit"] == repository.branches["main"]
    assert launch["model"]["license"] == "apache-2.0"
    problems = (FIXTURES / "problems.jsonl").read_text().splitlines()
    assert list(launch["data"].values()) == [len(problems)]
    assert yaml.safe_load((trained / "config.yaml").read_text())["model"]["path"] == NAME


def test_ranks_share_a_download(hub: FakeHub, dcpo: Dcpo, tmp_path: Path) -> None:
    asked = len(hub.asked)
    dcpo(*train(tmp_path / "run", *ONE_STEP), processes=2, HF_HOME=str(tmp_path / "home"))
    objects = [line for line in hub.asked[asked:] if line.startswith("GET /objects/")]
    assert len(objects) == len(set(objects)) > 0


def test_a_resumption_goes_on_with_the_commit_although_the_branch_has_moved(
    hub: FakeHub, dcpo: Dcpo, trained: Path, tmp_path: Path
) -> None:
    repository = hub.repositories[NAME]
    first = repository.branches["main"]
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    try:
        second = repository.commit({**repository.files, "README.md": b"a new text"})
        steps = ("training.steps=2", "training.save_interval=1", "--resume", "auto")
        # on another node, whose cache is empty
        done = dcpo(*train(directory, *steps), HF_HOME=str(tmp_path / "home"))
        assert second in done.stderr
        assert [launch["model"]["commit"] for launch in launches(directory)] == [first, first]
        assert "resumed with model.path" not in done.stderr
        refused = dcpo(
            *train(directory, *steps, "training.steps=3", f"model.path={NAME}@{second}"), status=2
        )
        assert first in refused.stderr
    finally:
        repository.branches["main"] = first


def test_the_card_says_what_the_run_is(trained: Path) -> None:
    card = (trained / "policy/README.md").read_text()
    found = metadata(card)
    assert found["base_model"] == NAME
    assert found["license"] == "apache-2.0"
    assert found["library_name"] == "transformers"
    assert found["tags"] == ["dcpo"]
    assert launches(trained)[0]["model"]["commit"] in card
    assert "problems.jsonl (" in card
    assert str(trained) not in card
    assert str(REPOSITORY) not in card
    assert not re.search(r"(^|[\s=])/\w+/", card, re.M)
    assert "never evaluated" in card


def test_evaluate_and_import_take_the_name_offline(
    dcpo: Dcpo, trained: Path, tmp_path: Path
) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    asked = ("--benchmarks", f"heldout={HELD_OUT}", "--limit", 4, "--repeats", 1)
    small = (*asked, "--template", "raw", "--max-tokens", 8, "--resamples", 0)
    dcpo("evaluate", "--model", NAME, *small, "--out", tmp_path / "eval", **offline)
    settings = json.loads((tmp_path / "eval/settings.json").read_text())
    assert settings["model"] == NAME
    assert settings["commit"] == launches(trained)[0]["model"]["commit"]
    evaluation = json.loads((tmp_path / "eval/evaluation.json").read_text())
    assert evaluation["model"] == NAME
    dcpo("convert", "import", "--from", NAME, "--to", tmp_path / "megatron", **offline)
    assert NAME in json.loads((tmp_path / "megatron/conversion.json").read_text())["source"]
    checkpoints = trained / "checkpoints"
    dcpo("convert", "export", "--from", checkpoints, "--to", tmp_path / "hf", **offline)
    assert (tmp_path / "hf/tokenizer.json").is_file()


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_a_misspelled_name_is_one_line(dcpo: Dcpo, tmp_path: Path, verb: str) -> None:
    arguments = train(tmp_path / "run", "model.path=owner/tinny")
    if verb == "evaluate":
        benchmark = f"heldout={HELD_OUT}"
        arguments = ["evaluate", "--model", "owner/tinny", "--benchmarks", benchmark]
        arguments += ["--out", str(tmp_path / "eval")]
    done = dcpo(*arguments, status=2)
    assert "owner/tinny" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
