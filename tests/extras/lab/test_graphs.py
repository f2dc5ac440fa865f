"""The second world's problems: made by their seed, verified by the judge, in one split each;
prompts of one length.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import runpy
from collections import Counter

import numpy as np
import pytest

from lab.world2 import GRAPHS
from megatron_dcpo.types import Prompt, Response
from tests.helpers.judging import judge_many

WORLD = runpy.run_path(str(GRAPHS / "graphs.py"))
walk, parse, key, solution, question = (
    WORLD[name] for name in ("walk", "parse", "key", "solution", "question")
)
# of the commit that made them, before anything was evaluated on them
SHA256 = {
    "train": "bbe0525cf1994cebd6da6b450f71bfefcc872972359431e416e875c6f062ea08",
    "heldout": "933d167ae0924cd03b698491a98da502f2c475f8a9ed203286b81e113da40a8d",
    "test": "71dfda878b2cbe0ebee1608ce79f8e9307fe4f8d173466dee7262336c74c0133",
}


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (GRAPHS / f"{name}.jsonl").read_text().splitlines()]


def test_the_seed_makes_the_published_problems(tmp_path) -> None:
    WORLD["write_splits"](tmp_path)
    for name, expected in SHA256.items():
        for path in (tmp_path / f"{name}.jsonl", GRAPHS / f"{name}.jsonl"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == expected, path


def test_no_graph_is_in_two_splits_or_in_the_supervised_text() -> None:
    keys = {name: {key(parse(row["problem"])) for row in rows(name)} for name in SHA256}
    assert {name: len(found) for name, found in keys.items()} == {
        "train": 4000,
        "heldout": 600,
        "test": 1200,
    }
    assert len(set.union(*keys.values())) == 5800
    first = WORLD["supervised_text"](())(50, 0, None, random.Random(3))
    without = WORLD["supervised_text"]({key(parse(prompt)) for prompt, _ in first[:40]})(
        50, 0, None, random.Random(3)
    )
    assert not {p for p, _ in first[:40]} & {p for p, _ in without}
    graph, start = parse(first[0][0])
    assert key((dict(reversed(graph.items())), start)) == key((graph, start))


def test_the_answers_are_right_by_a_count_of_their_own_and_by_the_judge() -> None:
    prompts, responses, expected = {}, [], []
    for row in rows("test"):
        pairs, start = row["problem"].rstrip("=").split(",")
        reached = {start}
        while (
            more := {pairs[i + 1].upper() for i in range(0, 20, 2) if pairs[i] in reached} - reached
        ):
            reached |= more
        assert int(row["answer"]) == sum(ord(node) - ord("A") + 1 for node in reached)
        prompts[row["id"]] = Prompt(row["id"], (), (), row["answer"], "math")
        generator = random.Random(row["id"])
        for number, how in enumerate(((0.0, None), (1.0, None), (1.0, 0.25))):
            text = solution(parse(row["problem"]), *how, generator)
            responses.append(
                Response(row["id"], number, np.zeros(0, int), np.zeros(0), "stop", 0, text=text)
            )
            expected.append((number == 0, "ok", float(text[-4:])))
    judged = judge_many(responses, prompts)
    assert [(j.correct == 1, j.status, j.confidence) for j in judged] == expected


@pytest.mark.parametrize("hesitation", [None, 0.25])
def test_a_wrong_solution_is_wrong_where_it_should_be(hesitation: float | None) -> None:
    generator = random.Random(5)
    for _ in range(200):
        graph, start = problem = WORLD["draw_problem"](generator)
        text = solution(problem, 1.0, hesitation, generator)
        steps, boxed = re.fullmatch(
            r"(\w+) \\boxed\{(\d+)\}\n<conf> Confidence: \d\.\d\d", text
        ).groups()
        edges = list(zip(steps[::2], steps[1::2].upper(), strict=True))
        assert [b for _, b in edges[:-1]] == [a for a, _ in edges[1:]]
        assert edges[0][0] == start
        wrong = [edge for edge in edges if graph[edge[0]] != edge[1]]
        assert len(wrong) == (hesitation is None)
        assert (WORLD["total"](edges) == boxed) == (hesitation is None)


def test_the_length_of_the_prompt_tells_nothing_and_all_lengths_of_walk_are_equally_frequent() -> (
    None
):
    for name in SHA256:
        assert {len(row["problem"]) for row in rows(name)} == {23}
    lengths = Counter(len(walk(*parse(row["problem"]))) for row in rows("train"))
    assert set(lengths) == set(range(3, 9))
    assert all(abs(count / 4000 - 1 / 6) < 4 * np.sqrt(5 / 36 / 4000) for count in lengths.values())
    assert all(
        question(parse(row["problem"])) == (row["problem"], row["answer"], row["type"])
        for row in rows("test")
    )
