"""The tasks: four of Reasoning Gym, a fifth out of distribution, and the splits. ``python tasks.py
--out DIR`` writes them.

Questions and answers are Reasoning Gym's, generated from the seeds below; only the worked solutions
of the warm start are written here, one function per task. Splits are drawn in the order of
:data:`SPLITS`; a question that an earlier split has is skipped, so that the splits are disjoint. A
row is ``{"id", "problem", "answer", "kind"}``: the kind is the task and how many numbers it
combines (of gcd: divides), which the lookup goes by.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
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


def animals(item: Item, steps: list[str]) -> int:
    return len(item["metadata"]["animals"])


def words(item: Item, steps: list[str]) -> int:
    return len(item["metadata"]["span"])


def letter_counting(item: Item) -> list[str]:
    """``see2,three2=4``: the words that have the letter, how often each, and the sum."""
    letter = item["metadata"]["target_letter"].lower()
    counts = [(word, word.lower().count(letter)) for word in item["metadata"]["span"]]
    return [
        ",".join(f"{word}{n}" for word, n in counts if n)
        + f"={sum(n for _, n in counts)}"
    ]


def gcd(item: Item) -> list[str]:
    """``84%10=4,10%4=2,4%2=0``: Euclid's algorithm."""
    a, b = sorted(item["metadata"]["numbers"], reverse=True)
    steps = []
    while b:
        steps.append(f"{a}%{b}={a % b}")
        a, b = b, a % b
    return steps


def basic_arithmetic(item: Item) -> list[str]:
    """``Calculate 12 - 5 + 7.``: as chain_sum in other words. Never part of the warm start."""
    return left_to_right(item["metadata"]["expression"])


@dataclass(frozen=True)
class Task:
    """A Reasoning Gym data set: its options, the worked solution of an item as equations, and how
    many numbers it combines, of the item and its solution.
    """

    name: str
    options: dict[str, Any]
    solve: Callable[[Item], list[str]]
    size: Callable[[Item, list[str]], int] = lambda item, steps: len(steps)


TASKS = (
    Task(
        "chain_sum",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
        chain_sum,
    ),
    Task(
        "leg_counting",
        {"min_animals": 2, "max_animals": 3, "max_instances": 9},
        leg_counting,
        animals,
    ),
    Task("gcd", {"min_value": 2, "max_value": 72}, gcd),
    Task("letter_counting", {"min_words": 3, "max_words": 6}, letter_counting, words),
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
    ),
)
# name -> (tasks, problems of each, seed)
SPLITS = {
    "test": (TASKS, 120, 7001),
    "validation": (TASKS, 75, 7002),
    "out_of_distribution": (OUT_OF_DISTRIBUTION, 200, 7003),
    "train": (TASKS, 1500, 7004),
    "warm_start": (TASKS, 500, 7005),
}


def generate(task: Task, seed: int) -> Iterator[tuple[Item, list[str]]]:
    """Yield items and their worked solutions without end."""
    # By index: iter() starts a Reasoning Gym data set over. Item i of seed s is item i - 1 of seed
    # s + 1.
    dataset = reasoning_gym.create_dataset(
        task.name, size=1, seed=seed * 1_000_000, **task.options
    )
    for index in itertools.count():
        item = dataset[index]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for split in SPLITS:
        with (args.out / f"{split}.jsonl").open("w") as file:
            for row, steps in rows(split, taken):
                solution = (
                    {"solution": ",".join(steps)} if split == "warm_start" else {}
                )
                file.write(json.dumps(row | solution) + "\n")


if __name__ == "__main__":
    main()
