"""Models by their names on the hub, from a local server that speaks its protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hub import FakeHub, FakeRepository
from tests.helpers.paths import REPOSITORY

NAME = "owner/small"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',
    "README.md": b"---\nlicense: mit\n---\n",
    "model.safetensors": bytes(range(256)) * 100,
    "pytorch_model.bin": b"\x01" * 9000,
    "original/consolidated.00.pth": b"\x02" * 9000,
    "onnx/model.onnx": b"\x03" * 9000,
    "model.gguf": b"\x04" * 9000,
}
DESCRIPTION = {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
WANTED = DESCRIPTION | {"model.safetensors"}
PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import hub
name, options = sys.argv[1], json.loads(sys.argv[2])
try:
    path = hub.model_directory(name, **options)
except UserError as error:
    print(json.dumps({"refused": str(error)}))
else:
    print(json.dumps({"path": path, "commit": hub.commit_of(path), "name": hub.name_of(path)}))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub().start()
    yield fake
    fake.stop()


@pytest.fixture
def repository(hub: FakeHub) -> FakeRepository:
    hub.repositories[NAME] = FakeRepository()
    hub.repositories[NAME].commit(FILES)
    return hub.repositories[NAME]


@pytest.fixture
def taken(hub: FakeHub, tmp_path: Path):
    """``taken(name, **options)``: what a process of its own gets, which knows the hub by its
    environment.
    """

    def start(name: str = NAME, rank: int = 0, variables=None, **options) -> subprocess.Popen:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
            **hub.environment(tmp_path / "home", **(variables or {})),
            "PYTHONPATH": str(REPOSITORY),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, json.dumps(options)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process: subprocess.Popen) -> dict[str, str]:
        out, log = process.communicate()
        assert process.returncode == 0, log
        return {**json.loads(out.splitlines()[-1]), "log": log}

    def take(*args, **options) -> dict[str, str]:
        return finish(start(*args, **options))

    take.start = start
    take.finish = finish
    return take


def files_of(directory: str) -> dict[str, bytes]:
    root = Path(directory)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_only_what_a_model_needs_is_downloaded_at_one_commit(repository, taken):
    found = taken()
    assert found["name"] == NAME
    assert found["commit"] == repository.branches["main"]
    assert files_of(found["path"]) == {name: FILES[name] for name in WANTED}


def test_without_weights_only_the_description_is_downloaded(hub, repository, taken):
    found = taken(weights=False)
    assert set(files_of(found["path"])) == DESCRIPTION
    assert not hub.objects
    assert set(files_of(taken()["path"])) == WANTED


def test_a_revision_is_named_behind_the_name(repository, taken):
    first = repository.branches["main"]
    second = repository.commit({**FILES, "tokenizer.json": b'{"a": 1}'}, branch="next")
    assert taken(f"{NAME}@next")["commit"] == second
    assert taken(f"{NAME}@{first}")["commit"] == first
    assert NAME in taken(f"{NAME}@absent")["refused"]


def test_a_given_commit_is_taken_although_the_branch_has_moved(repository, taken):
    first = taken()["commit"]
    assert "goes on" not in taken(commit=first)["log"]
    second = repository.commit({**FILES, "config.json": b"{}"})
    again = taken(commit=first)
    assert again["commit"] == first
    assert second in again["log"]
    assert second not in taken(commit=first, rank=1)["log"]
    assert taken()["commit"] == second


def test_processes_that_start_together_download_once(hub, repository, taken):
    together = [taken.start(rank=rank) for rank in range(4)]
    found = [taken.finish(process) for process in together]
    assert len({one["path"] for one in found}) == 1
    large = [line for line in hub.asked if line.startswith("GET /objects/")]
    assert len(large) == 1
    assert hub.downloads("/tokenizer.json") == 1


def test_offline_the_cache_is_enough(hub, repository, taken):
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in taken(variables=offline)["refused"]
    assert not hub.asked
    path = taken()["path"]
    asked = len(hub.asked)
    assert taken(variables=offline)["path"] == path
    commit = Path(path).name
    assert taken(variables=offline, commit=commit)["path"] == path
    assert len(hub.asked) == asked


def test_a_cache_without_weights_is_not_enough_offline(repository, taken):
    taken(weights=False)
    assert "refused" in taken(variables={"HF_HUB_OFFLINE": "1"})


def test_a_gated_a_missing_and_a_private_model_are_one_line_each(hub, repository, taken):
    repository.gated = True
    gated = taken()["refused"]
    assert "gated" in gated
    missing = taken("owner/smal")["refused"]
    repository.gated, repository.private = False, True
    private = taken()["refused"]
    for line in (gated, missing, private):
        assert "HF_TOKEN" in line
        assert "\n" not in line
    assert "path" in taken(variables={"HF_TOKEN": "hf_any"})


def test_no_network_is_one_line(taken):
    refused = taken(variables={"HF_ENDPOINT": "http://127.0.0.1:9"})["refused"]
    assert "http://127.0.0.1:9" in refused
    assert "\n" not in refused


def test_an_interrupted_download_is_whole_in_the_end(hub, repository, taken):
    hub.cut = 1
    found = taken()
    if "refused" in found:  # what was there before is kept, and the same command goes on
        assert "\n" not in found["refused"]
        found = taken()
    assert files_of(found["path"])["model.safetensors"] == FILES["model.safetensors"]


def test_a_hub_that_always_breaks_off_is_refused_and_then_goes_on(hub, repository, taken):
    hub.cut = 1000
    assert "\n" not in taken()["refused"]
    hub.cut = 0
    assert files_of(taken()["path"])["model.safetensors"] == FILES["model.safetensors"]


def test_a_cache_that_cannot_be_written_is_one_line(repository, taken, tmp_path):
    (tmp_path / "file").write_text("")
    refused = taken(variables={"HF_HOME": str(tmp_path / "file")})["refused"]
    assert "HF_HOME" in refused
    assert "\n" not in refused


def test_a_path_is_no_name_of_the_hub(hub, repository, taken, tmp_path):
    (tmp_path / "owner").mkdir()
    assert taken()["path"] == NAME  # owner/ is a directory here: a path with an error in it
    assert taken("/no/such")["path"] == "/no/such"
    assert not hub.asked
