"""Shared fixtures: tiny random checkpoints in Hugging Face format, made once per session."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

import hypothesis
import pytest

from tests.helpers.families import tiny_model
from tests.helpers.paths import DATA

os.environ.setdefault("OMP_NUM_THREADS", "1")
# no test depends on how busy the machine is; make test has --hypothesis-profile=ci
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=20)
hypothesis.settings.load_profile("shared machine")


FULL_CASES = Path(__file__).with_name("full_cases.txt")


def pytest_collection(session: pytest.Session) -> None:
    """Begin in each worker with other modules, so that what one has compiled the others read; a
    module that cannot be imported is reported where it is collected.
    """
    place, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{name}") for name in ("", "_COUNT"))
    if place is not None and workers is not None:
        folders = [Path(argument) for argument in session.config.args]
        modules = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
        first = len(modules) * int(place.removeprefix("gw")) // int(workers)
        for file in (*modules[first:], *modules[:first]):
            words = file.absolute().relative_to(session.config.rootpath).with_suffix("").parts
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(words))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of ``full_cases.txt`` as ``full``. It is an error if an entry names no test of
    a module that is collected whole.
    """
    lines = FULL_CASES.read_text().splitlines()
    names = {line.rpartition(" : ")[0] for line in lines if not line.startswith("#")}
    collected = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in names & collected.keys():
        collected[name].add_marker(pytest.mark.full)
    whole_modules = {name.partition("::")[0] for name in collected}
    chosen = any("::" in argument for argument in items[0].config.args) if items else False
    gone = {name for name in names - collected.keys() if name.partition("::")[0] in whole_modules}
    if gone and not chosen:
        raise pytest.UsageError(f"{FULL_CASES.name}: no such test: {', '.join(sorted(gone))}")


@pytest.fixture(autouse=True)
def _no_world_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the world of one that an earlier test made of this process: a dry run takes it for the
    number of processes that were started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real benchmark and training files; tests that need them say so when they are absent."""
    if not DATA.is_dir():
        pytest.skip(
            f"the real data sets are not here ({DATA}); set DCPO_DATA to the directory that has "
            "them"
        )
    return DATA


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """``tiny_models("qwen3", tied=True)`` -> directory of a random checkpoint of the family, of
    four layers.
    """
    made: dict[tuple[str, bool, int], Path] = {}

    def get(family: str, tied: bool = False, layers: int = 4) -> Path:
        key = family, tied, layers
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(f"{family}_{tied}_{layers}"), *key)
        return made[key]

    return get
