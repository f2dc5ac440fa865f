"""A run from a name on the hub to a repository on the hub, against a local server that speaks its
protocol.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.helpers.hub import FakeHub
from tests.helpers.paths import QUICKSTART, REPOSITORY
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
    dcpo(*train(directory, *ONE_STEP), processes=2)
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
    problems = (QUICKSTART / "data/train.jsonl").read_text().splitlines()
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
    assert "train.jsonl (" in card
    assert str(trained) not in card
    assert str(REPOSITORY) not in card
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


# -------------------------------------------------------------------------------------------- push
@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    return directory


TOKEN = {"HF_TOKEN": "hf_writer"}


def test_what_is_uploaded_is_what_is_here(hub: FakeHub, dcpo: Dcpo, finished: Path) -> None:
    listed = json.loads(dcpo("push", finished, "--to", "me/x", "--dry-run", "--json").stdout)
    assert "me/x" not in hub.repositories
    done = dcpo("push", finished, "--to", "me/x", "--private", "--json", **TOKEN)
    assert json.loads(done.stdout)["commit"]
    repository = hub.repositories["me/x"]
    assert repository.private
    here = {
        str(path.relative_to(finished / "policy")): path.read_bytes()
        for path in (finished / "policy").rglob("*")
        if path.is_file()
    }
    assert {name: len(content) for name, content in repository.files.items()} == listed["files"]
    assert repository.files.keys() == here.keys()
    del here["README.md"]
    assert {name: repository.files[name] for name in here} == here
    refused = dcpo("push", finished, "--to", "me/x", status=2, **TOKEN)
    assert "--revision" in refused.stderr
    dcpo("push", finished, "--to", "me/x", "--revision", "second", **TOKEN)
    assert set(repository.branches) == {"main", "second"}


def test_a_later_evaluation_is_in_the_card(hub: FakeHub, dcpo: Dcpo, finished: Path) -> None:
    asked = ("--benchmarks", f"heldout={HELD_OUT}", "--limit", 8, "--repeats", 2, "--resamples", 0)
    trained_as = ("--as-trained", finished / "config.yaml", "--out", finished / "eval")
    dcpo("evaluate", "--model", finished / "policy", *trained_as, *asked, "--max-tokens", 16)
    dcpo("push", finished, "--to", "me/evaluated", **TOKEN)
    files = hub.repositories["me/evaluated"].files
    card = files["README.md"].decode()
    evaluation = json.loads((finished / "eval/evaluation.json").read_text())
    accuracy = evaluation["benchmarks"]["heldout"]["accuracy"]
    assert f"{100 * accuracy:.1f}%" in card
    assert "lookup" in card
    assert "never evaluated" not in card
    (diagram,) = (finished / "eval/diagrams").glob("reliability_heldout_verbal.png")
    assert files["reliability.png"] == diagram.read_bytes()
    # of another policy than the one that was evaluated
    weights = next((finished / "policy").glob("*.safetensors"))
    os.utime(weights)
    listed = json.loads(dcpo("push", finished, "--to", "me/y", "--dry-run", "--json").stdout)
    assert "reliability.png" not in listed["files"]


def test_a_card_of_ones_own_is_kept(hub: FakeHub, dcpo: Dcpo, finished: Path) -> None:
    (finished / "policy/README.md").write_text("---\nlicense: [\n---\n")
    refused = dcpo("push", finished, "--to", "me/own", status=2, **TOKEN).stderr
    assert "Traceback" not in refused
    (finished / "policy/README.md").write_text("my own card\n")
    dcpo("push", finished / "policy", "--to", "me/own", **TOKEN)
    assert hub.repositories["me/own"].files["README.md"] == b"my own card\n"


@pytest.mark.parametrize(
    "key", ["hf_" + "a" * 34, "sk-" + "b" * 40, "AKIA" + "C" * 16, "-----BEGIN PRIVATE KEY-----"]
)
def test_a_key_is_not_uploaded(hub: FakeHub, dcpo: Dcpo, finished: Path, key: str) -> None:
    path = finished / "policy/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": key}))
    refused = dcpo("push", finished, "--to", "me/key", status=2, **TOKEN).stderr
    assert path.name in refused
    assert key not in refused
    assert "me/key" not in hub.repositories


@pytest.mark.parametrize("name", ["run.json", ".env", "optimizer.pt", "notes/key.txt", "a.distcp"])
def test_other_files_are_not_uploaded(hub: FakeHub, dcpo: Dcpo, finished: Path, name: str) -> None:
    path = finished / "policy" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    assert name in dcpo("push", finished, "--to", "me/other", status=2, **TOKEN).stderr
    assert "me/other" not in hub.repositories


def test_checkpoints_are_no_policy(dcpo: Dcpo, finished: Path) -> None:
    dcpo("push", finished / "checkpoints", "--to", "me/other", status=2, **TOKEN)
    shutil.rmtree(finished / "policy")
    refused = dcpo("push", finished, "--to", "me/other", status=2, **TOKEN)
    assert "convert export" in refused.stderr


@pytest.mark.parametrize("token", ["", "hf_reader"])
def test_no_token_and_no_right_are_one_line(
    hub: FakeHub, dcpo: Dcpo, finished: Path, token: str
) -> None:
    variables = {"HF_TOKEN": token} if token else {}
    refused = dcpo("push", finished, "--to", "me/rights", status=2, **variables).stderr
    assert "token" in refused.splitlines()[-1]
    assert "Traceback" not in refused
    assert "me/rights" not in hub.repositories


def test_a_name_is_checked(dcpo: Dcpo, finished: Path) -> None:
    for name in ("x", "me/x@main", "a/b/c"):
        assert name in dcpo("push", finished, "--to", name, status=2, **TOKEN).stderr


def test_the_private_stay_private(hub: FakeHub, dcpo: Dcpo, finished: Path) -> None:
    dcpo("push", finished, "--to", "me/public", **TOKEN)
    revision = ("--revision", "main")
    dcpo("push", finished, "--to", "me/public", *revision, "--private", status=2, **TOKEN)
    dcpo("push", finished, "--to", "me/public", *revision, **TOKEN)


def test_no_machine_is_named(hub: FakeHub, dcpo: Dcpo, finished: Path) -> None:
    dcpo("push", finished, "--to", "me/machine", **TOKEN)
    card = hub.repositories["me/machine"].files["README.md"].decode()
    assert not re.search(r"(^|[\s=])/\w+/", card, re.M)
