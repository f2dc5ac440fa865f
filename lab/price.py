"""The price of a stated confidence in accuracy, at equal informative groups: GRPO and methods that
state a confidence, each drawing until 32 groups of a step have right and wrong answers.

The designs were committed before their first runs (``docs/lab/price.md`` and
``docs/lab/price_replicated.md``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.fitted import Fit, Records, Run, logistic, lookup
from lab.results import Interval, crossed, interval, read_archive, write_json
from lab.testgrid import DRAWS, Lab
from lab.testtables import TITLES, difference, load, scores, skill_over, table
from megatron_dcpo.calibration import auroc_within, auroc_within_problem, brier

STEPS = 200
SHOWN = ("accuracy", "pass_at_8", "ece", "brier", "auroc")
AGAINST: Mapping[str, Fit] = MappingProxyType({"logistic": logistic, "lookup": lookup})
MARGIN = 0.5  # points of accuracy: a method whose interval stays above -MARGIN is not inferior
FEWER = 0.02  # a run with more than this share of informative groups less than its pair is named


@dataclass(frozen=True)
class Study:
    """Name a study: its page and files begin with ``name``; ``methods`` are compared with
    ``start``.
    """

    name: str
    title: str
    start: str
    methods: tuple[str, ...]
    pretrainings: range

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.start, *self.methods)

    @property
    def records(self) -> str:
        return f"{self.name}_records.tar.xz"


FIRST = Study(
    name="price",
    title="the price at equal informative groups",
    start="grpo_informative",
    methods=("dcpo_proper_informative", "rlcr_informative"),
    pretrainings=range(1, 6),
)
REPLICATION = Study(
    name="price_replicated",
    title="the price, replicated",
    start="grpo_refilled",
    methods=("dcpo_proper_refilled",),
    pretrainings=range(7, 17),
)


def lab(out: Path, jobs: int) -> Lab:
    """Return the cells below ``out``: every method on the test and the validation problems."""
    draws = MappingProxyType({name: DRAWS[name] for name in ("test", "choosing")})
    return Lab(out.resolve(), jobs, steps=STEPS, draws=draws, all_methods=True)


def tables(archive: Path, out: Path, study: Study = FIRST) -> dict[str, Any]:
    """Write ``<name>.json`` and ``<name>_tables.md``; return the former: of each method its values
    by pretraining, and their differences from GRPO on the same pretraining and problems.
    """
    runs = _runs(archive)
    counts = _counts(archive)
    result: dict[str, Any] = {}
    for name in study.rows:
        with_name = {n: r[name] for n, r in runs.items() if "test" in r.get(name, {})}
        both = [n for n in with_name if study.start in runs[n]]
        result[name] = {
            "pretrainings": list(with_name),
            **{key: [scores(run)[key] for run in with_name.values()] for key in SHOWN},
            "auroc_within": [within_types(run["test"]) for run in with_name.values()],
            "auroc_within_of_logistic": [
                within_types(fitted(run, logistic)) for run in with_name.values()
            ],
            "auroc_within_problem": [within_problems(run["test"]) for run in with_name.values()],
            "auroc_within_problem_of_logistic": [
                within_problems(fitted(run, logistic)) for run in with_name.values()
            ],
            "brier_of_lookup": [brier(*_stated(fitted(run, lookup))) for run in with_name.values()],
            **{
                f"skill_against_{other}": [skill_against(run, fit) for run in with_name.values()]
                for other, fit in AGAINST.items()
            },
            "informative_groups": [counts[n, name][0] for n in with_name],
            "responses": [counts[n, name][1] for n in with_name],
            "price": {
                value: [
                    float(np.mean(difference(runs[n][name], runs[n][study.start], value)))
                    for n in both
                ]
                for value in ("accuracy, points", "pass@8, points")
            },
        }
    if study is REPLICATION:
        result["secondary"] = secondary(runs, result, archive.with_name(FIRST.records))
    write_json(out / f"{study.name}.json", result)
    (out / f"{study.name}_tables.md").write_text(_markdown(study, result))
    return result


def _runs(archive: Path) -> dict[int, Run]:
    """Return the runs of an archive by their pretraining, of the first seed of each."""
    found = sorted(load(archive).items())
    return {pretraining: run for (_, pretraining, seed), run in found if seed == 1}


def secondary(
    runs: Mapping[int, Run], result: Mapping[str, Any], first: Path
) -> dict[str, dict[str, Any]]:
    """Return what the replication's design asks for besides: the price with problems as a second
    random effect, without pairs of which DCPO-proper had fewer informative groups, and pooled with
    the ``first`` study's records, if they are there. Each has its ``points``, one per pretraining,
    and its ``interval``.
    """
    (method,) = REPLICATION.methods
    start = REPLICATION.start
    pairs = [n for n, run in runs.items() if method in run and start in run]
    by_problem = np.array(
        [difference(runs[n][method], runs[n][start], "accuracy, points") for n in pairs]
    )
    points = by_problem.mean(axis=1)
    found = {"problems as a second random effect": _with(points, crossed(by_problem))}
    groups = dict(
        zip(result[method]["pretrainings"], result[method]["informative_groups"], strict=True)
    )
    of_start = dict(
        zip(result[start]["pretrainings"], result[start]["informative_groups"], strict=True)
    )
    equal = [groups[n] >= (1 - FEWER) * of_start[n] for n in pairs]
    if not all(equal):
        found["pairs of equal informative groups"] = _with(points[equal], interval(points[equal]))
    if first.is_file():
        proper, grpo = FIRST.methods[0], FIRST.start
        more = [
            float(difference(run[proper], run[grpo], "accuracy, points").mean())
            for run in _runs(first).values()
        ]
        both = np.array([*more, *points])
        found["both studies"] = _with(both, interval(both))
    return found


def _with(points: np.ndarray, gap: Interval) -> dict[str, Any]:
    return {"points": points.tolist(), "interval": [gap.mean, gap.low, gap.high]}


def fitted(run: Run, fit: Fit) -> Records:
    """Return the responses to the test with the confidence that ``fit`` learned from the same
    policy's responses to the validation problems.
    """
    test: Records = run["test"]
    return test.stating(fit(run["heldout"])(test))


def skill_against(run: Run, fit: Fit) -> float:
    """Return the skill of the stated confidence over the fitted one."""
    return skill_over(run["test"], fitted(run, fit).confidence)


def within_types(r: Records) -> float:
    """Return the AUROC within the types of problems."""
    return auroc_within(r.confidence, r.correct, r.kind.tolist()).value


def within_problems(r: Records) -> float:
    """Return the AUROC within one problem, the mean over problems."""
    return auroc_within_problem(r.confidence, r.correct, r.problem.tolist()).value


def _stated(r: Records) -> tuple[np.ndarray, np.ndarray]:
    return r.confidence, r.correct


def _counts(archive: Path) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the informative groups and the responses of each run (pretraining, method)."""
    counts = {}
    for path, content in read_archive(archive).items():
        policy, method, seed, file = path.split("/")
        if file == "cell.json" and seed == "1":
            cell = json.loads(content)
            pretraining = int(policy.partition(".")[2] or 0)
            counts[pretraining, method] = cell["informative_groups"], cell["responses"]
    return counts


def _markdown(study: Study, result: Mapping[str, Any]) -> str:
    page = f"{study.name}.md"
    lines = [
        f"# Tables: {study.title}",
        "",
        f"By `python -m lab price` from `{study.records}`; the design is in",
        f"[{page}]({page}).",
        "",
    ]
    columns = (
        *SHOWN,
        "auroc_within",
        "auroc_within_problem",
        "skill_against_lookup",
        "skill_against_logistic",
        "informative_groups",
        "responses",
    )
    rows = []
    for name in study.rows:
        found = result[name]
        if not found["pretrainings"]:
            continue
        means = [_mean(found[key]) for key in columns]
        rows.append((TITLES[name], str(len(found["pretrainings"])), *means))
    lines += table("Mean over the n pretrainings.", ("n", *columns), rows)
    lines += _fitted_rows(study, result)
    lines += _prices(study, result)
    lines += _within_problems(study, result)
    if "secondary" in result:
        rows = []
        for name, found in result["secondary"].items():
            gap = Interval(*found["interval"])
            rows.append((name, str(len(found["points"])), gap.shown(2), verdict(gap)))
        lines += table(
            "The same difference of accuracies, in other ways:",
            ("n", "accuracy, points", "verdict"),
            rows,
        )
    return "\n".join(lines)


def _fitted_rows(study: Study, result: Mapping[str, Any]) -> list[str]:
    columns = (
        "brier_of_lookup",
        "auroc_within_of_logistic",
        "auroc_within_problem_of_logistic",
    )
    rows = [
        (TITLES[name], *(_mean(result[name][key]) for key in columns))
        for name in study.rows
        if result[name]["pretrainings"]
    ]
    text = (
        "What is fitted on the same policy's validation responses: the lookup of the types' Brier "
        "score, and the logistic regression's AUROC within types and within problems."
    )
    return table(text, columns, rows)


def _prices(study: Study, result: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in study.methods:
        price: Mapping[str, Sequence[float]] = result[name]["price"]
        n = len(price["accuracy, points"])
        if not n:
            continue
        gaps = {value: interval(of_value) for value, of_value in price.items()}
        rows.append(
            (
                TITLES[name],
                str(n),
                *(gap.shown(2) for gap in gaps.values()),
                verdict(gaps["accuracy, points"]),
            )
        )
    return table(
        f"Minus {TITLES[study.start]}, same pretrainings and problems; ± for other pretrainings "
        f"(Student's t). Not inferior: the interval of the accuracy stays above -{MARGIN}.",
        ("n", "accuracy, points", "pass@8, points", "verdict"),
        rows,
    )


def _within_problems(study: Study, result: Mapping[str, Any]) -> list[str]:
    columns = ("auroc_within_problem", "auroc_within_problem_of_logistic")
    rows = [
        (TITLES[name], *(interval(result[name][key]).shown(3) for key in columns))
        for name in study.rows
        if result[name]["pretrainings"]
    ]
    text = (
        "AUROC among the answers to one problem, which was added after the study; ± for other "
        "pretrainings. Who reads only the question has .5."
    )
    return table(text, columns, rows)


def verdict(gap: Interval) -> str:
    """Return what a difference of accuracies says about the margin."""
    if math.isnan(gap.low):
        return "no interval"
    if gap.low > -MARGIN:
        return "not inferior"
    if gap.high < -MARGIN:
        return "inferior"
    return "not decided"


def _mean(values: Sequence[float]) -> str:
    mean = float(np.mean(values))
    return f"{mean:,.0f}" if mean > 100 else f"{mean:.4f}"
