"""``test.json`` and ``test_tables.md``: the tables of the test, computed from
``test_records.tar.xz`` alone; ``final``: of the last test. Rows in ``PUBLISHED`` were made by code
that is no longer here (commit 80ba0e8).
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.fitted import (
    Records,
    Run,
    fitted_by_halves,
    isotonic_of,
    isotonic_per_type,
    logistic,
    lookup,
    with_fitted,
)
from lab.results import Interval, crossed, interval, read_archive, write_json
from lab.testgrid import EXAMPLES, METHODS
from megatron_dcpo.calibration import auroc, bin_rows, binned_error, brier, ece
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.errors import UserError

POLICIES = MappingProxyType(
    {"large": "qwen3_3", "qwen3": "qwen3_2", "llama": "llama"}
)  # as test.json names them
METRICS = (
    "accuracy",
    "pass_at_8",
    "ece",
    "brier",
    "auroc",
    "skill",
    "ece_2x2",
    "auroc_2x2",
    "zero_or_one",
)
PUBLISHED = MappingProxyType(
    {
        "dcpo_proper_digits": "DCPO-proper, gradient over all digits (80ba0e8)",
        "adapter": "adapter, text and log-probs (80ba0e8)",
        "adapter_tokens": "adapter, text and log-probs, tokens of its own (80ba0e8)",
    }
)
DERIVED = MappingProxyType(
    {
        "lookup": "lookup, one number per type",
        "logprob": "log-prob of the reasoning, isotonic",
        "logprob_type": "log-prob of the reasoning, isotonic per type",
        "logistic": "logistic regression: log-prob, length, task",
        "adapter_isotonic": "adapter, isotonic",
        "adapter_tokens_isotonic": "adapter, tokens of its own, isotonic",
    }
)
TITLES = {name: method.title for name, method in METHODS.items()} | PUBLISHED | DERIVED
OWN = MappingProxyType(
    {
        "stated, isotonic": isotonic_of("confidence"),
        "log-prob, isotonic": isotonic_of("logprob"),
        "log-prob, isotonic per type": isotonic_per_type,
        "logistic": logistic,
    }
)
SHOWN = ("accuracy", "ece", "brier", "auroc")

Runs = dict[
    tuple[str, int, int], dict[str, Run]
]  # (family, pretraining, seed of RL) -> method -> run
Family = Mapping[
    int, Sequence[Mapping[str, Run]]
]  # pretraining -> seeds of RL, in order; the first has every row


def load(archive: Path, data: Path = EXAMPLES / "data", test: str = "test") -> Runs:
    """Return the responses of all cells to the problems ``test`` of ``data``. Raises
    :class:`UserError` without archive.
    """
    if not archive.is_file():
        raise UserError(
            f"{archive}: no records; make them with: python -m lab test, then test-tables --grid"
        )
    kinds = {
        path.stem: np.array([r["type"] for _, r in read_json_lines(path)])
        for path in data.glob("*.jsonl")
    }
    runs: Runs = {}
    for path, content in sorted(read_archive(archive).items()):
        policy, method, seed, file = path.split("/")
        part = file.removesuffix(".csv")
        if part in ("test", "heldout", "decoding"):
            family, _, pretraining = policy.partition(".")
            run = runs.setdefault((family, int(pretraining or 0), int(seed)), {}).setdefault(
                method, {}
            )
            assert isinstance(run, dict)
            column = METHODS[method].confidence if method in METHODS else "confidence"
            run[part] = _records(content, kinds["heldout" if part == "heldout" else test], column)
    return runs


def _records(content: bytes, kinds: np.ndarray, column: str) -> Records:
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    rows.sort(key=lambda row: int(row["problem"]))

    def numbers(key: str) -> np.ndarray:
        return np.array([float(row.get(key) or math.nan) for row in rows])

    problem = np.array([int(row["problem"]) for row in rows])
    tokens = np.nan_to_num(numbers("tokens"))
    return Records(
        problem, kinds[problem], numbers("correct"), numbers(column), numbers("logprob"), tokens
    )


def skill(r: Records) -> float:
    """Return the skill over the lookup that states the method's own accuracy on each type."""
    return skill_over(r, lookup(r)(r))


def skill_over(r: Records, reference: np.ndarray) -> float:
    """Return 1 - Brier / Brier of the confidences ``reference``, both on the answers that have a
    confidence.
    """
    known = ~np.isnan(r.confidence)
    correct = r.correct[known]
    return 1 - brier(r.confidence[known], correct) / brier(reference[known], correct)


def scores(run: Run, part: str = "test") -> dict[str, float]:
    """Return ``METRICS`` of one policy under one method; NaN where a number is not defined."""
    r = run[part]
    c, y = r.confidence, r.correct
    between = r.kind == "2x2"  # the one type that is right in 20 to 60 % of the cases
    least = int(np.bincount(r.problem).min())
    return {
        "accuracy": float(y.mean()),
        "pass_at_8": np.mean(any_right(r)) if least == 8 else math.nan,
        "ece": ece(c, y),
        "brier": brier(c, y),
        "auroc": auroc(c, y),
        "skill": skill(r),
        "ece_2x2": ece(c[between], y[between]) if between.any() else math.nan,
        "auroc_2x2": auroc(c[between], y[between]) if between.any() else math.nan,
        "zero_or_one": zero_or_one(c),
    }


def zero_or_one(confidence: np.ndarray) -> float:
    """Return the share of the confidences there are that are exactly 0 or 1: those of a policy that
    states a bit, not a probability.
    """
    stated = confidence[~np.isnan(confidence)]
    return float(np.mean(np.isin(stated, (0, 1)))) if len(stated) else math.nan


def bands(rs: Sequence[Records], resamples: int = 200) -> tuple[float, float]:
    """Return what 95 % of calibrated models stay below in the mean ECE of these runs: labels
    independent, and as alike within a problem as here.

    The first draws labels from the confidences. The second turns the signs of whole problems'
    residuals (wild bootstrap); it is too wide where the confidences are far from calibrated, since
    residuals are not centered.
    """
    independent, alike = np.zeros(resamples), np.zeros(resamples)
    for seed, r in enumerate(rs):
        rng = np.random.default_rng(seed)
        known = ~np.isnan(r.confidence)
        c, y, problem = r.confidence[known], r.correct[known], r.problem[known]
        index = np.searchsorted(bin_rows(c, y).edges[1:], c)
        bins = index.max() + 1
        residual = np.zeros((problem.max() + 1, bins))
        np.add.at(residual, (problem, index), c - y)
        signs = rng.choice([-1.0, 1.0], size=(resamples, len(residual)))
        alike += np.abs(signs @ residual).sum(axis=1) / len(c) / len(rs)
        values, of_value = np.unique(c, return_inverse=True)
        drawn = rng.binomial(np.bincount(of_value), values, size=(resamples, len(values)))
        in_bin = np.searchsorted(bin_rows(c, y).edges[1:], values)[:, None] == np.arange(bins)
        expected = np.bincount(index, weights=c, minlength=bins)
        independent += (
            np.abs(expected - drawn @ in_bin.astype(float)).sum(axis=1) / len(c) / len(rs)
        )
    return float(np.quantile(independent, 0.95)), float(np.quantile(alike, 0.95))


def by_problem(r: Records, value: np.ndarray) -> np.ndarray:
    """Return the mean of a value over each problem's responses."""
    return np.bincount(r.problem, weights=value) / np.bincount(r.problem)


def any_right(r: Records) -> np.ndarray:
    """Return [problems], 1 where at least one response is right: with eight responses, pass@8."""
    return (np.bincount(r.problem, weights=r.correct) > 0).astype(float)


VALUES: Mapping[str, Callable[[Records], np.ndarray]] = MappingProxyType(
    {
        "accuracy, points": lambda r: by_problem(r, 100 * r.correct),
        "pass@8, points": lambda r: 100 * any_right(r),
        "Brier": lambda r: by_problem(
            r, (np.nan_to_num(r.confidence, nan=0.5) - r.correct) ** 2
        ),  # NaN: malformed
    }
)


def difference(one: Run, other: Run, value: str) -> np.ndarray:
    """Return [problems], one row minus the other on the test."""
    return VALUES[value](one["test"]) - VALUES[value](other["test"])


def mean_differences(of: Family, name: str, start: str, value: str) -> np.ndarray:
    """Return [pretrainings, problems] of a training minus another one on the test: the mean over
    all seeds of the one less the mean over all seeds of the other. Two trainings of one seed have
    nothing in common but the policy that they start from, so seeds are no pairs.
    """
    gaps = []
    for number, seeds in of.items():
        runs = {number: seeds}
        one = [VALUES[value](r[name]["test"]) for _, r in _runs_of(runs, name)]
        other = [VALUES[value](r[start]["test"]) for _, r in _runs_of(runs, start)]
        if one and other:
            gaps.append(np.mean(one, axis=0) - np.mean(other, axis=0))
    return np.array(gaps)


def paired_differences(of: Family, name: str, start: str, value: str) -> np.ndarray:
    """Return [pretrainings, problems] of a confidence minus another one on the test: of every run
    that has both, since they are of one policy, and then the mean over the seeds.
    """
    gaps = _by_pretraining(
        _runs_of(of, name, start), lambda r: difference(r[name], r[start], value)
    )
    return np.array([np.mean(seeds, axis=0) for seeds in gaps])


def shown(value: str, gap: Interval) -> str:
    return gap.shown(4 if value == "Brier" else 2)


def table(text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return prose in lines of at most 100 columns and a table under it; nothing without rows."""
    if not rows:
        return []
    lines = [
        *textwrap.wrap(text, 100),
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def tables(out: Path, test: str = "test") -> dict[str, Any]:
    """Write ``test.json`` and ``test_tables.md`` of the records in ``out``; return the former.
    ``best`` is the row with the least Brier score on the validation problems of the first family of
    policies. ``test``: or "final".
    """
    found: dict[str, dict[int, list[Mapping[str, Run]]]] = {family: {} for family in POLICIES}
    for (family, number, _), methods in sorted(
        load(out / f"{test}_records.tar.xz", test=test).items()
    ):
        found[family].setdefault(number, []).append(with_fitted(methods))
    families = {family: of for family, of in found.items() if of}
    chosen = _validation(next(iter(families.values())))
    policies = {
        POLICIES[family]: {name: _columns(of, name) for name in _names(of)}
        for family, of in families.items()
    }
    result = {
        "best": min(chosen, key=lambda name: chosen[name], default=None),
        "policies": policies,
    }
    write_json(out / f"{test}.json", result)
    lines = [
        f"# Tables: {test}",
        "",
        f"By `python -m lab test-tables [--final]` from `{test}_records.tar.xz`.",
        "",
    ]
    for family, of in families.items():
        lines += [f"## {POLICIES[family]}", "", *_family(of, policies[POLICIES[family]])]
    ranked = [
        (TITLES[name], f"{value:.4f}") for name, value in sorted(chosen.items(), key=lambda i: i[1])
    ]
    text = "Brier score on the validation problems (fitted rows: on the other half)."
    lines += ["## Choice of the best row", "", *table(text, ("Brier",), ranked)]
    (out / f"{test}_tables.md").write_text("\n".join(lines))
    return result


def _runs_of(of: Family, *names: str, part: str = "test") -> list[tuple[int, Mapping[str, Run]]]:
    """Return pretraining and rows of every run (one seed on one pretraining) that sampled ``part``
    with all ``names``.
    """
    return [
        (n, r)
        for n, seeds in of.items()
        for r in seeds
        if all(part in r.get(name, {}) for name in names)
    ]


def _names(of: Family) -> list[str]:
    return [name for name in TITLES if _runs_of(of, name)]


def _by_pretraining(
    runs: Sequence[tuple[int, Any]], value: Callable[[Any], Any]
) -> list[list[Any]]:
    """Return [pretrainings][seeds] of ``value``."""
    found: dict[int, list[Any]] = {}
    for number, run in runs:
        found.setdefault(number, []).append(value(run))
    return list(found.values())


def _columns(of: Family, name: str) -> dict[str, list[float]]:
    """Return ``METRICS`` of one row: one number per pretraining, the mean over its seeds."""
    rows = _by_pretraining(_runs_of(of, name), lambda r: scores(r[name]))
    return {key: [float(np.mean([row[key] for row in seeds])) for seeds in rows] for key in METRICS}


def _validation(of: Family) -> dict[str, float]:
    """Return the Brier score on the validation problems, of first seeds, of the rows that every
    pretraining has there.
    """
    first = [seeds[0] for seeds in of.values()]
    names = [name for name in TITLES if all("heldout" in r.get(name, {}) for r in first)]
    return {
        name: float(np.mean([scores(r[name], "heldout")["brier"] for r in first])) for name in names
    }


def _family(of: Family, columns: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    rows = []
    for name, row in columns.items():
        seeds = "/".join(
            str(n) for n in sorted({len(s) for s in _by_pretraining(_runs_of(of, name), id)})
        )
        means = [
            interval(row[key]).shown(3) if key == "skill" else f"{np.mean(row[key]):.4f}"
            for key in METRICS
        ]
        rows.append((TITLES[name], str(len(row["accuracy"])), seeds, *means))
    text = (
        "Mean over the n pretrainings; a pretraining's number is the mean over its "
        "seeds of RL. Skill: ± for other "
    )
    trained = [name for name in columns if name in (*METHODS, "dcpo_proper_digits")]
    return [
        *table(text + "pretrainings (Student's t).", ("n", "seeds", *METRICS), rows),
        *_errors(of),
        *recalibrated(of, trained),
        *_differences(of, "grpo", trained, tuple(VALUES)),
        *_differences(of, "logistic", list(columns), ("Brier",)),
        *ladder(of),
        *_decoding(of),
    ]


def _errors(of: Family) -> list[str]:
    rows = []
    for name in _names(of):
        rs = [r[name]["test"] for _, r in _runs_of(of, name)]
        plain = np.mean([ece(r.confidence, r.correct) for r in rs])
        corrected = np.mean(
            [binned_error(r.confidence, r.correct, r.problem, resamples=100).estimate for r in rs]
        )
        rows.append(
            (
                TITLES[name],
                str(len(rs)),
                *(f"{number:.4f}" for number in (plain, corrected, *bands(rs))),
            )
        )
    text = (
        "Mean ECE of all runs: plug-in; corrected for its bias; what 95 % of "
        "calibrated models stay below in "
    )
    text += (
        "the same mean, where labels are independent, and where they are as alike "
        "within a problem as here."
    )
    return table(text, ("runs", "ECE", "corrected", "independent", "within problems"), rows)


def recalibrated(of: Family, names: Sequence[str]) -> list[str]:
    """Return Brier score and skill of the stated confidence of ``names``, and of what can be made
    of their own responses, fitted on one half of the test problems and scored on the other: most
    have no validation responses.
    """
    rows = []
    for name in names:
        cells = []
        for fit in (None, *OWN.values()):
            seeds = _by_pretraining(_runs_of(of, name), lambda r, n=name: r[n]["test"])
            made = [[fitted_by_halves(r, fit) if fit else r for r in one] for one in seeds]
            score = np.mean(
                [np.mean([brier(r.confidence, r.correct) for r in one]) for one in made]
            )
            cells.append(
                f"{score:.4f} / {np.mean([np.mean([skill(r) for r in one]) for one in made]):+.3f}"
            )
        rows.append((TITLES[name], *cells))
    text = (
        "Brier / skill of each policy's own confidence and log-prob, fitted on half of "
        "the test problems and "
    )
    return table(text + "scored on the other half:", ("stated", *OWN), rows)


def _differences(of: Family, start: str, names: Sequence[str], values: Sequence[str]) -> list[str]:
    """Compare ``names`` with the row ``start``. A seed belongs to its pretraining, so the spread of
    the pretrainings' means holds the seeds' too: their means are crossed with the problems.
    """
    trainings = start in METHODS
    compare = mean_differences if trainings else paired_differences
    rows = []
    for name in names:
        if name == start or not _runs_of(of, name, start):
            continue
        cells = []
        for value in values:
            means = compare(of, name, start, value)
            cells.append(shown(value, crossed(means) if len(means) > 1 else interval(means[0])))
        rows.append((TITLES[name], str(len(means)), *cells))
    same = "pretrainings and seeds; ± for others of all three"
    if trainings:
        same = "pretrainings, all seeds of both; ± for others of all three"
    text = f"Minus {TITLES[start]}, same problems, {same}, or, in a row of "
    return table(
        text + "one pretraining, for other problems alone:", ("pretrainings", *values), rows
    )


def ladder(of: Family) -> list[str]:
    """Compare decoupled with coupled on each run that has both. The interval is over problems alone
    and says nothing about another pretraining or seed.
    """
    rows = []
    for rung in ("", "_mean", "_brier", "_brier_mean"):
        coupled, decoupled = f"coupled{rung}", f"dcpo{rung}"
        for number, r in _runs_of(of, coupled, decoupled):
            cells = [
                shown(value, interval(difference(r[decoupled], r[coupled], value)))
                for value in VALUES
            ]
            rows.append((f"{TITLES[decoupled]} - {TITLES[coupled]}", str(number), *cells))
    return table(
        "Decoupled minus coupled, all else equal; ± for other problems alone:",
        ("pretraining", *VALUES),
        rows,
    )


def _decoding(of: Family) -> list[str]:
    rows = []
    for name in _names(of):
        if runs := _runs_of(of, name, part="decoding"):
            found = _by_pretraining(
                runs, lambda r, n=name: [scores(r[n], "decoding")[key] for key in SHOWN]
            )
            rows.append(
                (
                    TITLES[name],
                    *(f"{x:.4f}" for x in np.mean([np.mean(seeds, axis=0) for seeds in found], 0)),
                )
            )
    return table(
        "The paper's decoding (T 0.7, top-p 0.8, top-k 20), mean over pretrainings:", SHOWN, rows
    )
