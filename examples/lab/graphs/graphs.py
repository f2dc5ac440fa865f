"""The lab's second world: reachability in a graph, whose difficulty cannot be read off the prompt.

    python examples/lab/graphs/graphs.py --write-splits     # train.jsonl, heldout.jsonl, test.jsonl
    beside this file
    sh examples/lab/make_policies.sh graphs.1               # a starting policy, seed 1

A graph has ten nodes, A = 1 to J = 10, and one edge from each. The question is the sum of the
numbers of all nodes that can be reached from a given one, its own included. `AcBj...Jd,F=`: edges
from A to C, from B to J, ..., from J to D; start at F. Capitals are where an edge begins, the edges
stand in random order, every prompt has 23 tokens. A response walks until an edge leads to a node it
has been at, then adds up, without intermediate results:

    FaAcCf \\boxed{10}
    <conf> Confidence: 0.83

Walks of 3 to 8 nodes are equally frequent: 9 to 20 tokens with the box. What makes a problem hard,
which numbers are to be added and how many, shows only to a reader who walks. What he sees at a
glance is how many nodes have an edge towards them (`type`): at least as many as are reached, less
one.

Supervised text as in examples/quickstart/make_policy.py, which trains on it: of imperfect
solutions, one step of the walk goes to a wrong node and the walk goes on from there; with
`--hesitation`, only the boxed number is wrong, in one digit. The confidence is a draw from Beta(8,
0.8) after walks of up to five nodes and from Beta(3, 1) after longer ones, right or wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "quickstart"))

from make_policy import Draw, Question, corrupt, make_policy, training_options  # noqa: E402

SEED = 20261124
NODES = "ABCDEFGHIJ"  # with the numbers 1 to 10
LENGTHS = range(3, 9)  # nodes reached
SPLITS = {"train": 4000, "heldout": 600, "test": 1200}
Graph = dict[str, str]  # node -> the node its edge leads to
Problem = tuple[Graph, str]  # and the start


def walk(graph: Graph, start: str, wrong: tuple[int, str] | None = None) -> list[tuple[str, str]]:
    """The edges from ``start`` until one leads to a visited node; ``wrong``: step (from 0) and
    where it leads instead.
    """
    edges: list[tuple[str, str]] = []
    node = start
    while node not in [a for a, _ in edges]:
        to = wrong[1] if wrong and wrong[0] == len(edges) else graph[node]
        edges.append((node, to))
        node = to
    return edges


def total(edges: list[tuple[str, str]]) -> str:
    """The sum of the numbers of the nodes they begin at."""
    return str(sum(NODES.index(a) + 1 for a, _ in edges))


def draw_problem(rng: random.Random) -> Problem:
    """A walk of a length from ``LENGTHS``, all other edges at random, in random order."""
    nodes = rng.sample(NODES, len(NODES))
    length = rng.choice(LENGTHS)
    graph = dict(pairwise(nodes[:length])) | {nodes[length - 1]: rng.choice(nodes[:length])}
    graph |= {node: rng.choice(NODES) for node in nodes[length:]}
    return {node: graph[node] for node in rng.sample(NODES, len(NODES))}, nodes[0]


def key(problem: Problem) -> tuple[frozenset[tuple[str, str]], str]:
    """The same for every order of the edges."""
    return frozenset(problem[0].items()), problem[1]


def prompt(problem: Problem) -> str:
    graph, start = problem
    return "".join(a + b.lower() for a, b in graph.items()) + f",{start}="


def parse(text: str) -> Problem:
    edges, start = text.rstrip("=").split(",")
    return {a: b.upper() for a, b in zip(edges[::2], edges[1::2], strict=True)}, start


def question(problem: Problem) -> Question:
    """Prompt, answer, number of nodes with an edge towards them."""
    return prompt(problem), total(walk(*problem)), str(len(set(problem[0].values())))


def solution(
    problem: Problem, corrupt_share: float, hesitation: float | None, rng: random.Random
) -> str:
    """As make_policy's: wrong at random in the walk and its sum; with ``hesitation`` only in the
    sum, a slip that can be seen, after which the confidence is lower by that share.
    """
    edges = walk(*problem)
    right = answer = total(edges)
    slip = rng.random() < corrupt_share
    if slip and hesitation is not None:
        answer = corrupt(right, rng)
    while slip and answer == right:
        edges = walk(*problem, wrong=(rng.randrange(len(walk(*problem))), rng.choice(NODES)))
        answer = total(edges)
    confidence = rng.betavariate(*((8.0, 0.8) if len(edges) <= 5 else (3.0, 1.0)))
    if slip and hesitation:
        confidence *= 1 - hesitation
    reasoning = "".join(a + b.lower() for a, b in edges)
    return f"{reasoning} \\boxed{{{answer}}}\n<conf> Confidence: {confidence:.2f}"


def supervised_text(taken: Collection[object]) -> Draw:
    """The text on new graphs, none of ``taken`` (keys)."""

    def draw(
        size: int, corrupt_share: float, hesitation: float | None, rng: random.Random
    ) -> list[tuple[str, str]]:
        text: list[tuple[str, str]] = []
        while len(text) < size:
            problem = draw_problem(rng)
            if key(problem) not in taken:
                text.append((prompt(problem), solution(problem, corrupt_share, hesitation, rng)))
        return text

    return draw


def write_splits(out: Path) -> None:
    """``SPLITS`` below ``out``; no problem is in two of them, or twice in one, in whatever order of
    the edges.
    """
    rng, seen = random.Random(SEED), set()
    for name, count in SPLITS.items():
        with (out / f"{name}.jsonl").open("w") as file:
            for i in range(count):
                while key(problem := draw_problem(rng)) in seen:
                    pass
                seen.add(key(problem))
                text, answer, kind = question(problem)
                record = {"id": f"{name}-{i:04d}", "problem": text, "answer": answer, "type": kind}
                file.write(json.dumps(record) + "\n")


def read_split(name: str) -> list[Problem]:
    return [
        parse(json.loads(line)["problem"])
        for line in (HERE / f"{name}.jsonl").read_text().splitlines()
    ]


def main() -> None:
    parser = training_options(__doc__)
    parser.set_defaults(out=Path("runs/graphs"))  # make_policy.py's is its own directory
    parser.add_argument(
        "--write-splits", action="store_true", help="write the problems and train nothing"
    )
    args = parser.parse_args()
    if args.write_splits:
        return write_splits(HERE)
    taken = {key(problem) for name in SPLITS for problem in read_split(name)}
    rng = random.Random(args.seed)
    make_policy(args, supervised_text(taken), [question(p) for p in read_split("heldout")], rng)


if __name__ == "__main__":
    main()
