"""The tasks of the language model: none can be guessed, every worked solution is right, the splits
are disjoint.
"""

from __future__ import annotations

import re
import runpy
from types import SimpleNamespace

import pytest

from tests.helpers.paths import EXAMPLES

tasks = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "smollm2" / "tasks.py")))
Drawn = dict[str, list[tuple[dict[str, str], list[str]]]]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    taken: set[str] = set()
    return {split: list(tasks.rows(split, taken)) for split in tasks.SPLITS}


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_no_task_can_be_guessed(split: str, drawn: Drawn) -> None:
    found = [row for row, _ in drawn[split]]
    by_task = tasks.guesses(split, found)
    assert set(by_task) == {task.name for task in tasks.SPLITS[split][0]}
    for task, ((_, blind), (rule, ruled)) in by_task.items():
        assert blind < 0.10, task
        assert ruled < 0.10, (task, rule)


def test_only_rules_that_do_the_task_are_left_out(drawn: Drawn) -> None:
    """Those of the sums add or subtract numbers of the prompt, that of the products multiplies all;
    nothing is left out of the others.
    """
    left_out = {task.name: task.itself for task in tasks.TASKS}
    assert left_out["leg_counting"] == frozenset()
    assert left_out["products"] == {"product of the numbers"}
    for names in left_out.values():
        assert names <= set(tasks.RULES)
    assert all(re.search("sum of|plus|minus", name) for name in left_out["chain_sum"])


def test_what_can_be_guessed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"kind": f"{task.name} 1", "problem": f"{n} 3", "answer": "1"}
        for task in tasks.TASKS
        for n in range(10)
    ]
    with pytest.raises(SystemExit, match="chain_sum"):
        tasks.refuse_guessable("test", rows)
    assert tasks.best_guess(["1", "2", "1", "3"]) == ("1", 0.5)
    problems, answers = ["4 and 7", "5 and 9"], ["7", "9"]
    assert tasks.best_rule(problems, answers, frozenset()) == ("last number", 1.0)
    others = frozenset({"last number", "largest number"})
    assert tasks.best_rule(problems, answers, others)[1] < 1


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_every_worked_solution_is_right(split: str, drawn: Drawn) -> None:
    for row, steps in drawn[split]:
        assert steps[-1].split("=")[-1] == row["answer"]
        for step in steps:
            values = {eval(side) for side in step.split("=")}
            assert len(values) == 1, step


def test_the_splits_are_disjoint(drawn: Drawn) -> None:
    problems = [row["problem"] for rows in drawn.values() for row, _ in rows]
    assert len(problems) == len(set(problems))
    assert [len(rows) for rows in drawn.values()] == [480, 300, 200, 6000, 2001]
