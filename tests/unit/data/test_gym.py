"""Reasoning Gym as a source: the same problems in every process, scored by their task's own
rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data import gym_tasks
from megatron_dcpo.data.benchmarks import load_benchmark, name_of, parse_specs
from megatron_dcpo.data.datasets import Record, load_records
from megatron_dcpo.data.gym_tasks import HELD_OUT_SEED, GymTask, gym_path, gym_rows, parse_gym
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import BOXED, Attempt
from megatron_dcpo.judging.source_verifiers import GYM_VERIFIER
from megatron_dcpo.judging.verifiers import verifiers

SMALL = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&size=3&seed=5"


def test_a_path_holds_options_size_and_seed() -> None:
    assert parse_gym(SMALL) == GymTask("chain_sum", {"min_terms": 2, "max_terms": 2}, 3, 5)
    assert parse_gym("reasoning_gym:leg_counting") == GymTask("leg_counting")
    written = gym_path("reasoning_gym:chain_sum", {"operators": ["+", "&"]}, 3, None)
    assert parse_gym(written) == GymTask("chain_sum", {"operators": ["+", "&"]}, 3)
    assert parse_gym(gym_path(SMALL, {}, None, HELD_OUT_SEED)).seed == 5, (
        "what is written there stays"
    )
    assert name_of(SMALL) == "chain_sum"
    assert parse_specs(f"{SMALL},other={SMALL}") == [SMALL, f"other={SMALL}"]


@pytest.fixture(scope="module")
def small() -> list[Record]:
    """Its tasks are made in a process that imports the package, which takes seconds."""
    return load_records(SMALL)


@pytest.mark.slow
def test_rows_have_what_the_scorer_and_a_curriculum_read(small: list[Record]) -> None:
    records = small
    assert [record.prompt_id for record in records] == ["chain_sum/0", "chain_sum/1", "chain_sum/2"]
    row = records[0].row
    assert row is not None
    assert row["num_terms"] == 2
    assert row["reasoning_gym"]["index"] == 0
    assert records[0].answer == row["answer"] != ""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["polynomial_multiplication", "isomorphic_strings", "ransom_note"])
def test_tasks_that_read_the_order_of_sets_are_repeated(task: str) -> None:
    """Under a random PYTHONHASHSEED, as Python's default is, these three give other problems in
    each process.
    """
    path = f"reasoning_gym:{task}?size=4"
    assert gym_rows(path) == gym_rows(path)


@pytest.mark.slow
def test_no_problem_of_a_benchmark_is_one_of_a_training() -> None:
    trained = {
        record.problem for record in load_records("reasoning_gym:leg_counting?size=300&seed=1")
    }
    loaded = load_benchmark("reasoning_gym:leg_counting?size=300")
    assert loaded.name == "leg_counting"
    assert not trained & {record.problem for record in loaded.records}


@pytest.mark.slow
def test_answers_are_scored_by_the_task(small: list[Record]) -> None:
    """Right at 1.0; a part of the score only with a threshold; another release's problem is an
    error, not a wrong answer.
    """
    records = [*load_records("reasoning_gym:isomorphic_strings?size=2"), *small]
    verifier, form = verifiers(JudgingConfig(threshold=0.3), {})(GYM_VERIFIER)
    assert form is BOXED
    for record in records:
        right = f"so \\boxed{{{record.answer}}}"
        texts = (right, f"so \\boxed{{about {record.answer}}}", f"so {record.answer}")
        asked = [Attempt(None, record.answer, text, record.row) for text in texts]
        full, part, none = (outcome.logged["score"] for outcome in verifier(asked))  # type: ignore[index]
        assert (full, none) == (1.0, 0.0)
        assert 0 <= part < 1
    odd = Attempt(None, "", "\\boxed{1}", {**(records[0].row or {}), "problem": "another one"})
    assert verifier([odd]) == [None]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("reasoning_gym:leg_countin", ["'leg_countin'", "'leg_counting'"]),
        ("reasoning_gym:chain_sum?min_term=2", ["chain_sum", "'min_term'"]),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", ["chain_sum", "AssertionError"]),
        ("reasoning_gym:chain_sum?size=0", ["size"]),
    ],
)
def test_what_is_wrong_is_one_line(path: str, named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        load_records(path)
    assert [name for name in named if name not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gym_tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'reasoning-gym=="):
        load_records(SMALL)
