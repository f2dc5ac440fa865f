"""The tasks: three of Reasoning Gym, a fourth out of distribution, and the splits. ``python
tasks.py --out DIR`` writes them.

**None of them can be guessed**: in every split the most frequent answer of a task, and the best of
the :data:`RULES` of one line that are not the task itself, are right in less than
:data:`GUESSABLE` of its problems; ``tasks.py`` measures both and refuses to write a split in which
it is otherwise. An earlier version had two tasks that can be guessed, and reinforcement learning
found the guesses (docs/lab/real_model.md).

Questions and answers are Reasoning Gym's, generated from the seeds below; only the worked solutions
of the warm start are written here, one function per task. Splits are drawn in the order of
:data:`SPLITS`; a question that an earlier split has is skipped, so that the splits are disjoint. A
row is ``{"id", "problem", "answer", "kind"}``: the kind is the task and how many equations its
solution has (of leg_counting: animals), which the lookup goes by.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

Item = dict[str, Any]


def chain_sum(item: Item) -> list[str]:
    """``55 + 98 - 93``: ``153-93=60``, the sums from left to right."""
    return left_to_right(item["metadata"]["expression"])


def left_to_right(expression: str) -> list[str]:
    first, *rest = re.split(r" ([+-]) ", expression)
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + (int(term) if sign == "+" else -int(term))
        steps.append(f"{before}{sign}{term}={total}")
    return steps


def leg_counting(item: Item) -> list[str]:
    """``9*10+6*6=90+36=126``: a product per animal, then the sum."""
    legs = [(n, ANIMALS[animal]) for animal, n in item["metadata"]["animals"].items()]
    factors, products = (
        "+".join(f"{n}*{each}" for n, each in legs),
        "+".join(str(n * each) for n, each in legs),
    )
    return [f"{factors}={products}={sum(n * each for n, each in legs)}"]


def legs_differ(item: Item) -> bool:
    """Return whether the animals have different numbers of legs: where all have four, four times
    the sum of the numbers is right without a look at the animals.
    """
    return len({ANIMALS[animal] for animal in item["metadata"]["animals"]}) > 1


def animals(item: Item, steps: list[str]) -> int:
    return len(item["metadata"]["animals"])


def products(item: Item) -> list[str]:
    """``47*30=1410,47*6=282,1410+282=1692``: by the tens and the units of the second factor."""
    first, second = map(int, item["metadata"]["expression"].split(" * "))
    tens, units = second - second % 10, second % 10
    parts = [part for part in (tens, units) if part] or [second]
    steps = [f"{first}*{part}={first * part}" for part in parts]
    if len(parts) > 1:
        steps.append(f"{first * tens}+{first * units}={first * second}")
    return steps


def basic_arithmetic(item: Item) -> list[str]:
    """``Calculate 12 - 5 + 7.``: as chain_sum in other words. Never part of the warm start."""
    return left_to_right(item["metadata"]["expression"])


@dataclass(frozen=True)
class Task:
    """A Reasoning Gym data set: its options, the worked solution of an item as equations, and how
    many it has, of the item and its solution. ``itself``: the rules that are the task, or do it on
    part of the problems. ``keeps``: whether an item is one of the task's.
    """

    name: str
    options: dict[str, Any]
    solve: Callable[[Item], list[str]]
    size: Callable[[Item, list[str]], int] = lambda item, steps: len(steps)
    itself: frozenset[str] = frozenset()
    keeps: Callable[[Item], bool] = lambda item: True


SUMS = frozenset(
    {
        "sum of the numbers",
        "first plus last number",
        "first minus last number",
        "first number minus the others",
        "largest minus smallest number",
    }
)  # each adds or subtracts the right numbers of the problems on which it is right


TASKS = (
    Task(
        "chain_sum",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
        chain_sum,
        itself=SUMS,
    ),
    Task(
        "leg_counting",
        {"min_animals": 2, "max_animals": 3, "max_instances": 9},
        leg_counting,
        animals,
        keeps=legs_differ,
    ),
    Task(
        "products",
        {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        products,
        itself=frozenset({"product of the numbers"}),
    ),
)
OUT_OF_DISTRIBUTION = (
    Task(
        "basic_arithmetic",
        {
            "max_terms": 3,
            "min_digits": 1,
            "max_digits": 2,
            "operators": ["+", "-"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        basic_arithmetic,
        itself=SUMS,
    ),
)
# name -> (tasks, problems of each, seed)
SPLITS = {
    "test": (TASKS, 160, 8001),
    "validation": (TASKS, 100, 8002),
    "out_of_distribution": (OUT_OF_DISTRIBUTION, 200, 8003),
    "train": (TASKS, 2000, 8004),
    "warm_start": (TASKS, 667, 8005),
}

GUESSABLE = 0.10
# what a policy may say without doing the task, of the numbers in the prompt
RULES: dict[str, Callable[[list[int]], int]] = {
    "first number": lambda x: x[0],
    "last number": lambda x: x[-1],
    "largest number": max,
    "smallest number": min,
    "how many numbers": len,
    "sum of the numbers": sum,
    "twice the sum": lambda x: 2 * sum(x),
    "four times the sum": lambda x: 4 * sum(x),
    "six times the sum": lambda x: 6 * sum(x),
    "eight times the sum": lambda x: 8 * sum(x),
    "product of the numbers": math.prod,
    "first times last digits": lambda x: (x[0] % 10) * (x[-1] % 10),
    "product of the numbers in tens": lambda x: math.prod(round(n, -1) for n in x),
    "first plus last number": lambda x: x[0] + x[-1],
    "first minus last number": lambda x: x[0] - x[-1],
    "first number minus the others": lambda x: 2 * x[0] - sum(x),
    "largest minus smallest number": lambda x: max(x) - min(x),
    "ten times the largest number": lambda x: 10 * max(x),
}


def generate(task: Task, seed: int) -> Iterator[tuple[Item, list[str]]]:
    """Yield items and their worked solutions without end."""
    # By index: iter() starts a Reasoning Gym data set over. Item i of seed s is item i - 1 of seed
    # s + 1.
    dataset = reasoning_gym.create_dataset(task.name, size=1, seed=seed * 1_000_000, **task.options)
    for index in itertools.count():
        item = dataset[index]
        if task.keeps(item):
            yield item, task.solve(item)


def rows(split: str, taken: set[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the split's rows and their worked solutions, the tasks in turns; add their questions to
    ``taken``.
    """
    tasks, size, seed = SPLITS[split]
    sources = [generate(task, seed) for task in tasks]
    for index in range(size):
        for task, items in zip(tasks, sources, strict=True):
            item, steps = next(
                (item, steps) for item, steps in items if item["question"] not in taken
            )
            taken.add(item["question"])
            row = {
                "id": f"{split}-{task.name}-{index}",
                "problem": item["question"].strip(),
                "answer": item["answer"],
                "kind": f"{task.name} {task.size(item, steps)}",
            }
            yield row, steps


def best_guess(answers: Sequence[str]) -> tuple[str, float]:
    """Return the most frequent answer and its share: the accuracy of a policy that does not read
    the prompt.
    """
    answer, count = Counter(answers).most_common(1)[0]
    return answer, count / len(answers)


def best_rule(
    problems: Sequence[str], answers: Sequence[str], itself: frozenset[str]
) -> tuple[str, float]:
    """Return the rule of :data:`RULES`, without those of ``itself``, that is right most often, and
    its accuracy.
    """
    numbers = [[int(n) for n in re.findall(r"\d+", problem)] for problem in problems]
    right = {
        name: sum(str(rule(x)) == answer for x, answer in zip(numbers, answers, strict=True))
        for name, rule in RULES.items()
        if name not in itself
    }
    name = max(right, key=lambda rule: right[rule])
    return name, right[name] / len(answers)


def guesses(
    split: str, found: Sequence[dict[str, Any]]
) -> dict[str, tuple[tuple[str, float], tuple[str, float]]]:
    """Return the best guess and the best rule of every task of a split with the rows ``found``."""
    by_task = {}
    for task in SPLITS[split][0]:
        own = [row for row in found if row["kind"].split()[0] == task.name]
        problems, answers = ([row[key] for row in own] for key in ("problem", "answer"))
        by_task[task.name] = (best_guess(answers), best_rule(problems, answers, task.itself))
    return by_task


def refuse_guessable(split: str, found: Sequence[dict[str, Any]]) -> None:
    """Print the best guess and the best rule of every task, and end if one of them is right too
    often.
    """
    for task, ((answer, blind), (rule, ruled)) in guesses(split, found).items():
        print(
            f"{split}, {task}: always {answer!r} is right in {blind:.3f}, the {rule} in {ruled:.3f}"
        )
        if max(blind, ruled) >= GUESSABLE:
            raise SystemExit(f"{split}: {task} can be guessed; take another task or other options")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for split in SPLITS:
        drawn = list(rows(split, taken))
        refuse_guessable(split, [row for row, _ in drawn])
        with (args.out / f"{split}.jsonl").open("w") as file:
            for row, steps in drawn:
                solution = {"solution": ",".join(steps)} if split == "warm_start" else {}
                file.write(json.dumps(row | solution) + "\n")


if __name__ == "__main__":
    main()
