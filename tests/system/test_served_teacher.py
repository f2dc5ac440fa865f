"""Training with a teacher behind a server, as a user runs it: what it says is what the same teacher
says from a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES, QUICKSTART
from tests.helpers.quickstart import run, train
from tests.helpers.teacher_server import Body, TeacherServer, serving

COEF = "objective.distill_coef_reasoning=1.0"
FEW = ("training.steps=1", "training.save_interval=0", COEF)
TEACHER = EXAMPLES / "lab" / "qwen3" / "policy"


@pytest.fixture(scope="module")
def teacher() -> TeacherServer:
    return TeacherServer(TEACHER)


@pytest.fixture(scope="module")
def address(teacher: TeacherServer) -> Iterator[str]:
    with serving(teacher) as url:
        yield url


@pytest.fixture(scope="module")
def in_a_directory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first step of one process with the teacher's weights."""
    run_dir = tmp_path_factory.mktemp("directory") / "run"
    (step,) = train(run_dir, *FEW, f"objective.teacher={TEACHER}")
    return step


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (1, ()),
        (2, ()),
        (2, ("parallel.tensor_model_parallel_size=2",)),
        (2, ("parallel.pipeline_model_parallel_size=2",)),
    ],
    ids=["one", "data", "tensor", "pipeline"],
)
def test_a_server_says_what_the_directory_says(
    teacher: TeacherServer,
    address: str,
    in_a_directory: dict[str, Any],
    tmp_path: Path,
    processes: int,
    overrides: tuple[str, ...],
) -> None:
    teacher.prompts.clear()
    words = (*FEW, f"objective.teacher={address}", *overrides)
    (step,) = train(tmp_path / "run", *words, processes=processes)
    for name in ("loss/teacher_kl", "loss/policy", "reward/accuracy"):
        assert step[name] == pytest.approx(in_a_directory[name], rel=1e-3, abs=1e-6), name
    # each response is read once, whichever ranks there are; [0, 0] is the check at the start
    read = [prompt for prompt in teacher.prompts if prompt != [0, 0]]
    assert len(read) == 8 * 4
    launches = json.loads((tmp_path / "run" / "run.json").read_text())
    assert address in json.dumps(launches)


def without_logprobs(reply: Body) -> Body:
    return {"choices": [{"text": ""}]}


def not_a_number(reply: Body) -> Body:
    for row in filter(None, reply["choices"][0]["prompt_logprobs"]):
        for value in row.values():
            value["logprob"] = float("nan")
    return reply


@pytest.mark.parametrize("spoil", [without_logprobs, not_a_number])
def test_a_server_that_gives_no_logprobs_is_refused_before_a_rollout(
    spoil: Callable[[Body], Body], tmp_path: Path
) -> None:
    with serving(TeacherServer(TEACHER, spoil=spoil)) as url:
        _refused(tmp_path, url, url)


def test_what_the_server_cannot_be_is_refused(tmp_path: Path, address: str) -> None:
    _refused(tmp_path, address, "rollout.temperature", "rollout.temperature=0.7")
    with serving(TeacherServer(TEACHER, max_model_len=20)) as url:
        _refused(tmp_path, url, "positions")
    other = Path(shutil.copytree(TEACHER, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with serving(TeacherServer(other)) as url:
        _refused(tmp_path, url, "another tokenizer")


def _refused(tmp_path: Path, url: str, words: str, *overrides: str) -> None:
    done = run(
        *("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}"),
        *(*FEW, f"objective.teacher={url}", *overrides),
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.count("dcpo train: error") == 1
    assert words in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_may_be_resumed_with_another_server(
    teacher: TeacherServer, address: str, tmp_path: Path
) -> None:
    words = (COEF, "training.save_interval=1", "training.resume=auto")
    train(tmp_path / "run", *words, f"objective.teacher={address}", "training.steps=1")
    with serving(teacher) as other:
        steps = train(tmp_path / "run", *words, f"objective.teacher={other}", "training.steps=2")
    assert [step["step"] for step in steps] == [1, 2]


def test_a_source_may_be_read_by_another_server_after_a_resumption(
    teacher: TeacherServer, address: str, tmp_path: Path
) -> None:
    words = (COEF, f"objective.teacher={address}", "training.save_interval=1")
    words = (*words, "training.resume=auto")
    train(tmp_path / "run", *words, sources(address), "training.steps=1")
    with serving(teacher) as other:
        steps = train(tmp_path / "run", *words, sources(other), "training.steps=2")
    assert [step["step"] for step in steps] == [1, 2]


DATA = QUICKSTART / "data"


def sources(of_second: str) -> str:
    """Two sources, of which the second has a teacher of its own; equally many prompts a step."""
    first = {"path": str(DATA / "train.jsonl"), "name": "first"}
    second = {"path": str(DATA / "heldout.jsonl"), "name": "second", "teacher": of_second}
    return f"data.path={json.dumps([first, second])}"


def test_a_source_may_have_a_teacher_of_its_own(
    teacher: TeacherServer, address: str, tmp_path: Path
) -> None:
    other = TeacherServer(QUICKSTART / "policy")
    teacher.prompts.clear()
    with serving(other) as url:
        words = (*FEW, f"objective.teacher={address}", sources(url))
        (step,) = train(tmp_path / "run", *words)
        assert step["loss/teacher_kl"] > 0
    rows = (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    texts: dict[str, set[str]] = {"first": set(), "second": set()}
    for row in map(json.loads, rows):
        texts[row["task"]].add(row["problem"])
    for server, name in ((teacher, "first"), (other, "second")):
        read = {server.tokenizer.decode(prompt) for prompt in server.prompts if prompt != [0, 0]}
        assert len(read) > 8
        assert all(any(problem in text for problem in texts[name]) for text in read), name


def test_a_teacher_of_a_source_is_checked_as_the_other_one_is(tmp_path: Path, address: str) -> None:
    with serving(TeacherServer(TEACHER, max_model_len=20)) as url:
        _refused(tmp_path, address, url, sources(url))
    _refused(tmp_path, str(TEACHER), "objective.teacher", sources(address))
    _refused(tmp_path, address, "data.path", sources("/models/another"))
