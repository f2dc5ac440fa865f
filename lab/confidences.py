"""Confidences that were fitted on judged answers of one frozen policy and tested on others: the
tables of the published records.

Revision ca02236a is the last one that trains these arms (``dcpo calibrate --kind adapter``, ``dcpo
evaluate --keep states``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.results import Interval, crossed, read_archive, write_json
from lab.testgrid import REPOSITORY
from megatron_dcpo.calibration import (
    accuracy_at_coverage,
    auroc,
    auroc_within,
    auroc_within_problem,
)

SHUFFLED = "adapter, shuffled labels"
ADAPTERS = (
    "adapter, T = R",
    "adapter, taught by the bar",
    "adapter, taught by the stack",
    SHUFFLED,
)
# of a model that has learned to state what an adapter says: rows of the tables
SAID_MINUS_LOOKUP = "Brier, stated minus lookup"
ACCURACY_GAINED = "accuracy, minus that of the policy before"
# of the first study
_HELD_OUT = REPOSITORY / "examples" / "quickstart" / "data" / "heldout.jsonl"


@dataclass(frozen=True)
class Study:
    """Name a study: its page and files begin with ``name``, and ``python -m lab VERB`` makes its
    tables. The arms in ``compared`` are compared with those in ``against``. ``tests`` were tested,
    the first of them by every arm. ``said`` has the answers to the first test of a model that had
    learned to state what one of the adapters says.
    """

    name: str
    verb: str
    title: str
    compared: tuple[str, ...]
    against: tuple[str, ...]
    tests: tuple[str, ...] = ("test",)
    said: str = ""

    @property
    def records(self) -> str:
        return f"{self.name}_records.tar.xz"


def tables(archive: Path, page: Path, study: Study) -> dict[str, Any]:
    """Write ``<name>.json`` and ``<name>_tables.md`` into ``page``; return the former."""
    files = {
        name.removesuffix(".json"): with_kinds(json.loads(content))
        for name, content in sorted(read_archive(archive).items())
    }
    seeds = _of_test(files, "seed")
    result: dict[str, Any] = {
        "seeds": list(seeds),
        "started": [rows.get("started") for rows in seeds.values()],
        "commits": [rows.get("commit") for rows in seeds.values()],
        "arms": {},
        "minus": {},
    }
    for arm in next(iter(seeds.values()))["arms"]:
        result["arms"][arm] = _scores(arm, list(seeds.values()))
    for other in study.against:
        result["minus"][other] = {
            arm: _minus(arm, other, seeds) for arm in study.compared if arm != other
        }
    for test in (*study.tests[1:], study.said):
        of_test = list(_of_test(files, f"{test}.seed").values())
        if of_test:
            scores = {arm: _scores(arm, of_test) for arm in of_test[0]["arms"]}
            result.setdefault("others", {})[test] = scores
    said = _of_test(files, f"{study.said}.seed")
    if said:
        result["said"] = {
            SAID_MINUS_LOOKUP: _minus("stated", "lookup", said),
            ACCURACY_GAINED: _accuracy_gained(said, seeds),
        }
    if study.said:
        result["accuracy"] = {
            name: float(np.mean(rows["correct"])) for name, rows in sorted(files.items())
        }
    write_json(page / f"{study.name}.json", result)
    (page / f"{study.name}_tables.md").write_text(_page(study, result))
    return result


def _of_test(files: Mapping[str, dict[str, Any]], begin: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a test by seed: of the files whose names are ``begin`` and the seed."""
    return {
        name.removeprefix(begin): rows for name, rows in files.items() if name.startswith(begin)
    }


def with_kinds(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a seed with the type of each problem, which the first study did not keep:
    its problems are those of the held-out file, by number.
    """
    if "kind" in rows:
        return rows
    kinds = [json.loads(line)["type"] for line in _HELD_OUT.read_text().splitlines()]
    numbers = [int(name.rsplit("/", 1)[1]) for name in rows["problem"]]
    return {**rows, "kind": [kinds[number] for number in numbers]}


def _scores(arm: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the scores of an arm, a number for each seed."""
    found: dict[str, list[float]] = {}
    for rows in seeds:
        confidence = np.array(rows["arms"][arm])
        correct = np.array(rows["correct"])
        scores = {
            "brier": float(np.mean((confidence - correct) ** 2)),
            "auroc": float(auroc(confidence, correct)),
            "auroc_within": auroc_within(confidence, correct, rows["kind"]).value,
            "auroc_within_problem": auroc_within_problem(
                confidence, correct, rows["problem"]
            ).value,
            "risk_at_half": 1 - float(accuracy_at_coverage(confidence, correct, 0.5)),
        }
        for name, value in scores.items():
            found.setdefault(name, []).append(value)
    return found


def _minus(arm: str, other: str, seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return Brier(arm) - Brier(other): the mean of each seed, and of all with its 95 % interval
    over seeds and problems.
    """
    by_problem = []
    for rows in seeds.values():
        correct = np.array(rows["correct"])
        of_arm = (np.array(rows["arms"][arm]) - correct) ** 2
        of_other = (np.array(rows["arms"][other]) - correct) ** 2
        _, place = np.unique(rows["problem"], return_inverse=True)
        by_problem.append(np.bincount(place, of_arm - of_other) / np.bincount(place))
    return _pooled(np.array(by_problem))


def _accuracy_gained(
    said: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the accuracy of the models that learned to state a confidence minus that of the
    policies before, with its 95 % interval over seeds and problems. Both answered each problem of
    the test once.
    """
    by_problem = []
    for seed, rows in said.items():
        after_of = _verdicts(rows)
        before_of = _verdicts(before[seed])
        by_problem.append([after_of[number] - before_of[number] for number in sorted(before_of)])
    return _pooled(np.array(by_problem))


def _verdicts(rows: Mapping[str, Any]) -> dict[int, float]:
    """Return the verdicts by the number of the problem in its file, which ends its name; the name
    of the test is in front of it.
    """
    numbers = [int(name.rsplit("/", 1)[1]) for name in rows["problem"]]
    return dict(zip(numbers, rows["correct"], strict=True))


def _pooled(differences: np.ndarray) -> dict[str, Any]:
    """Return the mean of each seed, and of all with its 95 % interval, of [seeds, problems]."""
    pooled = crossed(differences)
    return {
        "seeds": [float(values.mean()) for values in differences],
        "pooled": [pooled.mean, pooled.low, pooled.high],
    }


def _page(study: Study, result: Mapping[str, Any]) -> str:
    lines = [
        f"# Tables: {study.title}",
        "",
        f"By `python -m lab {study.verb}` from `{study.records}`. Mean over seeds "
        f"{', '.join(map(str, result['seeds']))}:",
        "",
        *_table_of_scores(result["arms"]),
    ]
    for test, arms in result.get("others", {}).items():
        lines += ["", f"On the answers of the test `{test}`:", "", *_table_of_scores(arms)]
    if "accuracy" in result:
        lines += ["", "| answers | accuracy |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in result["accuracy"].items()]
    if "said" in result:
        lines += _table_of_differences("what is said", result["said"], result["seeds"])
    for other, rows in result["minus"].items():
        title = f"Brier minus that of: {other}"
        lines += _table_of_differences(title, rows, result["seeds"])
    return "\n".join(lines) + "\n"


def _table_of_differences(
    title: str, rows: Mapping[str, Mapping[str, Any]], seeds: Sequence[str]
) -> list[str]:
    """Return the lines of a table of differences, of each seed and of all."""
    header = [title, *(f"seed {seed}" for seed in seeds), "all, over seeds and problems"]
    lines = ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, row in rows.items():
        shown = [f"{mean:+.4f}" for mean in row["seeds"]]
        gap = Interval(*row["pooled"])
        shown.append(f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _table_of_scores(arms: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the lines of a table of every arm's scores, means of the seeds."""
    lines = [
        "| | Brier | AUROC | AUROC within types | within problems | risk at half coverage |",
        "|---|---|---|---|---|---|",
    ]
    for arm, values in arms.items():
        means = [np.mean(of_seeds) for of_seeds in values.values()]
        shown = ["–" if np.isnan(mean) else f"{mean:.4f}" for mean in means]
        lines.append(f"| {arm} | " + " | ".join(shown) + " |")
    return lines
