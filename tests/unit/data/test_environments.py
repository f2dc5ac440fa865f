"""Environments of others as a source of problems: what a row holds, which environments are refused,
and by which name. ``DCPO_VERIFIERS_PYTHON`` and ``DCPO_NEMO_GYM_PYTHON`` name Pythons with the real
packages for the last tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_dcpo.config import load_config
from megatron_dcpo.config.sections import JudgingConfig, SourceConfig
from megatron_dcpo.data.benchmarks import load_benchmark, name_of, parse_specs, path_in
from megatron_dcpo.data.datasets import load_records, message_prompts, task_name
from megatron_dcpo.data.environments import EnvironmentSpec, parse_environment
from megatron_dcpo.data.gym_tasks import gym_path
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.source_verifiers import check_rollouts
from megatron_dcpo.judging.verifiers import verifiers
from tests.helpers.environments import COUNTS, LETTERS, use_stand_ins
from tests.helpers.paths import EXAMPLES, REPOSITORY
from tests.helpers.processes import left_after

SUMS = "verifiers:owner/sums-env@1.0"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def test_a_path_holds_the_python_the_choice_and_options_of_the_environment() -> None:
    path = gym_path(
        f"{SUMS}?size=3&range=-1..1.5&judge=true&part=eval",
        {"split": "x", "arg.size": 7, "texts": ["a&b", "c,d"], "size": 9},
        None,
        None,
    )
    assert parse_environment(path) == EnvironmentSpec(
        kind="verifiers",
        name="owner/sums-env@1.0",
        python=sys.executable,
        options={"split": "x", "size": 7, "texts": ["a&b", "c,d"]},
        part="eval",
        size=3,
        range=(-1.0, 1.5),
        judge=True,
    )
    assert parse_environment(f"{SUMS}?data=own").options == {"data": "own"}
    assert parse_environment(f"nemo_gym:letters?data={LETTERS}").data == str(LETTERS)
    assert task_name(f"{SUMS}?size=3") == name_of(f"{SUMS}?size=3") == "sums-env"
    spec = f"mine={SUMS}?size=3"
    assert (path_in(spec), path_in(f"{SUMS}?size=3")) == (f"{SUMS}?size=3",) * 2
    assert parse_specs(f"{SUMS},{spec}") == [SUMS, spec]


def test_rows_are_messages_numbers_and_the_input_of_scores() -> None:
    records = load_records(f"{SUMS}?size=2")
    assert [record.prompt_id for record in records] == ["sums-env/0", "sums-env/1"]
    first = records[0]
    system, user = first.messages
    assert system == {"role": "system", "content": "Answer behind =>."}
    assert user == {"role": "user", "content": "1+1="}
    assert (first.answer, first.problem, first.form) == ("2", "1+1=", "own")
    assert first.row is not None
    assert first.row["size"] == 1, "a column that data.order may name"
    assert first.row["environment"]["input"]["info"] == {"size": 1}


def test_a_benchmark_has_the_problems_for_evaluation() -> None:
    assert [r.problem for r in load_benchmark(SUMS).records] == ["100+100=", "101+101="]
    own = load_benchmark(f"mine={SUMS}?part=train&size=1")
    assert (own.name, [r.problem for r in own.records]) == ("mine", ["1+1="])
    with pytest.raises(UserError, match="part=train"):
        load_benchmark(f"{SUMS}?tests=0")


def test_templates_keep_the_environments_messages_and_ask_for_the_confidence() -> None:
    """Nothing asks for a box, since the environment says how to answer."""
    records = load_records(f"{SUMS}?size=1")
    for template, asks in (("paper", True), ("grpo", False), ("raw", False)):
        system, user = message_prompts(records, template, marker="[sure]")[0].messages
        assert system["content"] == "Answer behind =>."
        assert user["content"].startswith("1+1=")
        assert ("[sure] Confidence: 0.83" in user["content"]) == asks
        assert "boxed" not in user["content"]


def test_tasks_have_their_system_prompt_and_their_own_fields() -> None:
    records = load_records("verifiers:tasks_env?size=2&range=-1..2&split=test")
    assert [m["role"] for m in records[1].messages] == ["system", "user"]
    assert records[1].messages[1]["content"] == "Say test1."
    row = records[1].row
    assert row is not None
    assert (row["answer"], row["length"]) == ("test1", 5)
    assert "idx" not in row


def test_resource_servers_read_a_file_of_problems() -> None:
    records = load_records(f"nemo_gym:letters?data={LETTERS}")
    assert [m["role"] for m in records[0].messages] == ["system", "user"]
    assert records[1].messages == ({"role": "user", "content": "C or D?"},)
    assert [record.answer for record in records] == ["B", "C"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("verifiers:", "verifiers:NAME"),
        (f"{SUMS}?size=0", "size"),
        (f"{SUMS}?part=test", "part"),
        (f"{SUMS}?range=1..0", "range"),
        (f"{SUMS}?range=1.0.0..2", "range"),
        (f"{SUMS}?range=0...5", "range"),
        (f"{SUMS}?python=/nowhere/bin/python", "/nowhere/bin/python"),
        (f"{SUMS}?judge=3", "judge"),
        (f"{SUMS}?judge=http://localhost:1", "judge"),
        ("verifiers:no-such-env", "no_such_env"),
        ("verifiers:no_module_env", "a_library_that_is_not_there"),
        (f"{SUMS}?kind=turns&arg.kind=group", "arg.kind"),
        (f"{SUMS}?kind=raises", "ValueError: no data here"),
        (f"{SUMS}?kind=ends", "SystemExit"),
        (f"{SUMS}?kind=is_killed", "signal 9"),
        (f"{SUMS}?knd=turns", "'knd'"),
        (f"{SUMS}?kind=judge", "judge=true"),
        (f"{SUMS}?kind=group_reward", "compared"),
        (f"{SUMS}?weights=[1,0.2]", "range=0..1.2"),
        (f"{SUMS}?weights=[1,-0.5]", "range=-0.5..1"),
        (f"{SUMS}?weights=[0,0]", "no reward function"),
        ("verifiers:tasks_env?range=-1..2", "size=N"),
        ("verifiers:tasks_env?size=2", "range=-1..2"),
        ("verifiers:tasks_env?size=2&range=-1..2&part=eval", "part=eval"),
        ("verifiers:tasks_env?size=2&range=-1..2&splt=test", "'splt'"),
        ("verifiers:tasks_env?size=2&range=-1..2&opened=false", "opened by a user"),
        ("verifiers:runtime_env?size=2&range=-1..3", "compiled"),
        ("verifiers:setup_env?size=2&range=-1..2", "setup"),
        ("verifiers:turns_env?size=2&range=-1..2", "TurnsEnv"),
        ("nemo_gym:letters", "example.jsonl"),
        ("nemo_gym:letters?data=/nowhere.jsonl", "/nowhere.jsonl"),
        (f"nemo_gym:letters?data={LETTERS}&part=eval", "part=eval"),
        (f"nemo_gym:letters?data={LETTERS}&mode=1", "'mode'"),
        (f"nemo_gym:letters?data={LETTERS}&part_of_reward=much", "part_of_reward"),
        (f"nemo_gym:numbers?data={LETTERS}", "resources_servers.numbers"),
        (f"nemo_gym:referring?data={LETTERS}", "label=..."),
        (f"nemo_gym:judged?data={LETTERS}", "judge=http://HOST:PORT"),
        (f"nemo_gym:judged?data={LETTERS}&judge=yes", "judge=yes"),
    ],
)
def test_what_cannot_be_used_is_one_line(path: str, named: str) -> None:
    with pytest.raises(UserError) as refused:
        load_records(path)
    message = str(refused.value)
    assert named in message
    assert message.startswith(path.partition("?")[0])
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("turns", "Counting"),
        ("tools", "Adding"),
        ("group", "group of environments"),
        ("rollout", "OwnRollout has its own rollout"),
    ],
)
def test_more_than_one_turn_needs_the_environments_own_rollout(kind: str, named: str) -> None:
    rows = [record.row for record in load_records(f"{SUMS}?kind={kind}")]
    with pytest.raises(UserError, match=named) as refused:
        check_rollouts(rows, "", "chat", SUMS)
    assert "rollout.agent=environment" in str(refused.value)
    check_rollouts(rows, "environment", "chat", SUMS)
    with pytest.raises(UserError, match=r"data\.template=paper"):
        check_rollouts(rows, "environment", "paper", SUMS)


def test_servers_of_nemo_gym_with_sessions_and_tools() -> None:
    rows = [record.row for record in load_records(f"nemo_gym:session?data={COUNTS}")]
    with pytest.raises(UserError, match="SessionServer prepares a session"):
        check_rollouts(rows, "", "chat", "nemo_gym:session")


def test_one_turn_needs_no_rollout_of_its_own() -> None:
    rows = [record.row for record in load_records(f"{SUMS}?size=1")]
    check_rollouts([None, {}, *rows], "", "paper", SUMS)
    check_rollouts([None, {}, *rows], "my_agent.py:run", "paper", SUMS)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("no JSON", "problem 2"),
        ("[]", "problem 2"),
        ('{"responses_create_params": {"input": [{"type": "function_call"}]}}', "function_call"),
    ],
)
def test_a_file_of_problems_that_cannot_be_read(line: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(LETTERS.read_text().splitlines()[0] + f"\n{line}\n")
    with pytest.raises(UserError, match=named):
        load_records(f"nemo_gym:letters?data={file}")


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.write_text("print()")
    file.chmod(0o755)
    with pytest.raises(UserError, match=str(file)):
        load_records(f"{SUMS}?python={file}")


def test_what_an_environment_draws_and_writes() -> None:
    """Every rank, and a run that is resumed, has the same problems. Arrays keep their shape."""
    first, again = (load_records(f"{SUMS}?kind=shuffled") for _ in range(2))
    assert first == again
    assert first[0].row is not None
    assert first[0].row["environment"]["input"]["info"]["one"] == [5]
    assert len(load_records(f"{SUMS}?kind=writes_bytes")) == 5


def test_what_an_environment_starts_ends_with_it() -> None:
    began = time.monotonic()
    first = load_records(f"{SUMS}?kind=leaves_a_process")[0]
    assert time.monotonic() - began < 30
    assert first.row is not None
    assert not left_after([first.row["child"]], 10)


def test_an_environment_ends_with_the_process_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    call = (
        "from megatron_dcpo.data.environments import environment_rows; "
        f"environment_rows('{SUMS}?kind=sleeps')"
    )
    parent = subprocess.Popen([sys.executable, "-c", call], cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert not left_after([int(file.read_text())], 10)


def test_an_environment_that_asks_does_not_read_our_input(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("y\n")
    kept = os.dup(0)
    try:
        with file.open() as typed:
            os.dup2(typed.fileno(), 0)
            with pytest.raises(UserError, match="EOFError"):
                load_records(f"{SUMS}?kind=asks")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(UserError, match="python="):
        load_records(SUMS)
    with pytest.raises(UserError, match="nemo-gym"):
        load_records(f"nemo_gym:letters?data={LETTERS}")


def test_another_python_does_not_get_our_search_path(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    spec = parse_environment(f"{SUMS}?python={other}")
    assert (spec.python, spec.search_path) == (str(other), "")
    assert parse_environment(SUMS).search_path == os.environ["PYTHONPATH"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"seed": 3}, "seed"),
        ({"columns": {"answer": "x"}}, "columns"),
        ({"verifier": "math"}, "math"),
        ({"verifier": {"f1": 1.0, "my.py:f": 1.0}}, "f1"),
        ({"verifier": SUMS}, "data.path"),
    ],
)
def test_what_a_source_may_not_say(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SourceConfig(path=SUMS, **values)  # type: ignore[arg-type]
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [{"data": {"path": SUMS}}, {"data": {"path": [SUMS, {"path": "verifiers:tasks_env"}]}}],
)
def test_a_verifier_that_would_judge_nothing_is_refused(
    values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    run = {"run_dir": "r", "model": {"path": "m"}, "judging": {"verifier": "exact"}}
    file.write_text(json.dumps(run | values))
    with pytest.raises(UserError, match=r"judging\.verifier"):
        load_config(file)
    load_config(file, ["data.path=problems.jsonl"])
    load_config(file, ["evaluation={interval: 1, benchmarks: math500}"])


CLASSIC = """
import verifiers as vf
from datasets import Dataset

def exact(parser, completion, answer):
    if "raise" in completion[-1]["content"]:
        raise ValueError("cannot score this")
    return float((parser.parse_answer(completion) or "") == answer)

def load_environment(n=3):
    rows = [{"question": f"{a}+{a}", "answer": str(2 * a), "info": {"n": a}} for a in range(n)]
    parser = vf.XMLParser(["answer"], answer_field="answer")
    rubric = vf.Rubric(funcs=[exact], parser=parser)
    shot = [{"role": "user", "content": "9+9"}, {"role": "assistant", "content": "18"}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt="Add.", few_shot=shot,
                            parser=parser, rubric=rubric)
"""
TASKS = """
import verifiers.v1 as vf

__all__ = ["RealTaskset"]

class RealData(vf.TaskData):
    answer: str

class RealTask(vf.Task[RealData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise ValueError("cannot score this")
        return float(f"<answer>{self.data.answer}</answer>" in trace.last_reply)

class RealConfig(vf.TasksetConfig):
    n: int = 3

class RealTaskset(vf.Taskset[RealTask, RealConfig]):
    def load(self):
        for a in range(self.config.n):
            yield RealTask(RealData(prompt=f"{a}+{a}", answer=str(2 * a)), self.config.task)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("variable", "module"),
    [("DCPO_VERIFIERS_CLASSIC_PYTHON", CLASSIC), ("DCPO_VERIFIERS_PYTHON", TASKS)],
)
def test_the_real_verifiers(
    variable: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments of both interfaces, with what the real package does between prompt and score."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with the real verifiers")
    (tmp_path / "real_env.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    path = f"verifiers:real-env?python={python}&n=4&size=3"
    records = load_records(path)
    assert [record.answer for record in records] == ["0", "2", "4"]
    if module is CLASSIC:
        roles = [message["role"] for message in records[0].messages]
        assert roles == ["system", "user", "assistant", "user"]
    verifier, _ = verifiers(JudgingConfig(), {})(path)
    texts = ["<answer>2</answer>", "<answer>3</answer>", "raise"]
    outcomes = verifier([Attempt(None, "", text, records[1].row) for text in texts])
    assert [outcome.correct for outcome in outcomes] == [True, False, False]
    assert [outcome.category for outcome in outcomes] == [None, None, "verifier_error"]


@pytest.mark.full
def test_the_environment_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("DCPO_VERIFIERS_CLASSIC_PYTHON")
    if not python:
        pytest.skip("DCPO_VERIFIERS_CLASSIC_PYTHON names no Python with the real verifiers")
    monkeypatch.chdir(EXAMPLES / "environments" / "quickstart_products")
    path = f"verifiers:quickstart-products?python={python}&range=0..1.2&count=3"
    trained = load_records(path)
    held_out = load_benchmark(path).records
    assert (len(trained), len(held_out)) == (3, 100)
    verifier, _ = verifiers(JudgingConfig(graded=True), {})(path)
    texts = (f"\\boxed{{{trained[0].answer}}}", "\\boxed{1}", "no box")
    outcomes = verifier([Attempt(None, "", text, trained[0].row) for text in texts])
    assert [o.score for o in outcomes] == pytest.approx([1.0, 0.2 / 1.2, 0.0])


@pytest.mark.full
def test_the_real_nemo_gym() -> None:
    python = os.environ.get("DCPO_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("DCPO_NEMO_GYM_PYTHON names no Python with NeMo Gym")
    with pytest.raises(UserError, match=r"example\.jsonl") as refused:
        load_records(f"nemo_gym:mcqa?python={python}")
    example = str(refused.value).rpartition(" ")[2]
    (problems,) = load_problems(f"nemo_gym:mcqa?python={python}&data={example}", JudgingConfig())
    records = problems.benchmark.records
    verifier, _ = verifiers(JudgingConfig(), {})(problems.verifier)
    right = [Attempt(None, "", f"\\boxed{{{r.answer}}}", r.row) for r in records]
    assert all(outcome.correct for outcome in verifier(right))
