"""Endpoints and tables of the study, from its records alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.note.arms import BAR_AND_NOTE, GENERIC
from lab.results import Interval, crossed, read_archive, write_json
from lab.testtables import table
from megatron_dcpo.calibration import auroc, auroc_within_problem, brier

RECORDS = "note_records.tar.xz"
CLAIMS = ("stated", "reader")
MARGIN = 0.010  # that bar + stated may be above the ceiling
LEAST_WITHIN = 0.55
LEAST_SWAPS = 0.60
AVERAGED = "stated, averaged over the problem"
Rows = Mapping[str, Any]  # the numbers of a pretraining


def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``note.json`` and ``note_tables.md``; return the former."""
    found = {
        name.removesuffix(".json"): _with_average(json.loads(content))
        for name, content in sorted(read_archive(archive).items())
    }
    seeds = list(found.values())
    names = list(seeds[0]["arms"])
    result: dict[str, Any] = {
        "pretrainings": list(found),
        "commits": [rows["commit"] for rows in seeds],
        "started": [rows["started"] for rows in seeds],
        "accuracy": [float(np.mean(rows["correct"])) for rows in seeds],
        "unread": [rows["unread"] for rows in seeds],
        "mixed": [len(_within(rows, "bar")) for rows in seeds],
        "claims": {claim: _endpoints(seeds, claim) for claim in CLAIMS},
        "arms": {name: _scores(seeds, name) for name in names},
        "controls": {
            change: {
                name: _shown(crossed(_gaps(seeds, ("controls", change, name), ("arms", name))))
                for name in of_change
            }
            for change, of_change in seeds[0]["controls"].items()
        },
        "another minus no note": {
            name: _shown(crossed(_gaps(seeds, *_other_and_none(name))))
            for name in seeds[0]["controls"]["no note"]
        },
        "shifted": {
            name: [brier(_of(rows, ("shifted", name)), _correct(rows)) for rows in seeds]
            for name in seeds[0]["shifted"]
        },
    }
    write_json(out / "note.json", result)
    (out / "note_tables.md").write_text(_page(result))
    return result


def _endpoints(seeds: Sequence[Rows], claim: str) -> dict[str, Any]:
    """Return the differences and shares of a claim, and how many of its six endpoints hold before
    the first that does not.
    """
    with_bar = f"bar + {claim}"
    gaps = {
        f"{claim} minus bar": _minus(seeds, claim, "bar"),
        f"{with_bar} minus {BAR_AND_NOTE}": _minus(seeds, with_bar, BAR_AND_NOTE),
        f"{with_bar} minus {GENERIC}": _minus(seeds, with_bar, GENERIC),
        f"{with_bar} minus bar + equality": _minus(seeds, with_bar, "bar + equality"),
        "AUROC within problems": crossed(_of_common([_within(rows, claim) for rows in seeds])),
        "share of swaps": crossed(_of_common([_swaps(rows, claim) for rows in seeds])),
        f"{claim} minus {BAR_AND_NOTE}": _minus(seeds, claim, BAR_AND_NOTE),
        f"{claim} minus {GENERIC}": _minus(seeds, claim, GENERIC),
    }
    gate, log_prob, generic, ceiling, within, swaps, alone, alone_generic = gaps.values()
    holds = (
        gate.high < 0,
        max(log_prob.high, generic.high) < 0,
        ceiling.high < MARGIN,
        within.low > LEAST_WITHIN,
        swaps.low > LEAST_SWAPS,
        max(alone.high, alone_generic.high) < 0,
    )
    return {
        "intervals": {name: _shown(gap) for name, gap in gaps.items()},
        "holds": next((n for n, one in enumerate(holds) if not one), len(holds)),
    }


def _minus(seeds: Sequence[Rows], arm: str, other: str) -> Interval:
    """Return Brier(arm) - Brier(other), over pretrainings and problems."""
    return crossed(_gaps(seeds, ("arms", arm), ("arms", other)))


def _gaps(seeds: Sequence[Rows], arm: Sequence[str], other: Sequence[str]) -> np.ndarray:
    """Return differences of squared errors, averaged over the answers: [pretrainings, problems]."""
    found = []
    for rows in seeds:
        correct = _correct(rows)
        gap = (_of(rows, arm) - correct) ** 2 - (_of(rows, other) - correct) ** 2
        _, place = np.unique(rows["problem"], return_inverse=True)
        found.append(np.bincount(place, gap) / np.bincount(place))
    return np.array(found)


def _of(rows: Rows, path: Sequence[str]) -> np.ndarray:
    """Return the numbers at a path of keys."""
    value: Any = rows
    for key in path:
        value = value[key]
    return np.array(value)


def _correct(rows: Rows) -> np.ndarray:
    return np.array(rows["correct"])


def _other_and_none(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("controls", "another problem's note", name), ("controls", "no note", name)


def _within(rows: Rows, arm: str) -> dict[int, float]:
    """Return the AUROC of the answers to each problem that has right and wrong ones."""
    confidence = _of(rows, ("arms", arm))
    correct = _correct(rows)
    problem = np.array(rows["problem"])
    found = {}
    for number in np.unique(problem):
        of_problem = problem == number
        value = auroc(confidence[of_problem], correct[of_problem])
        if not np.isnan(value):
            found[int(number)] = float(value)
    return found


def _swaps(rows: Rows, claim: str) -> dict[int, float]:
    """Return the share of the two swaps of each mixed problem that move the number the right way;
    no move counts half. The first half of the records has a right answer before the swap.
    """
    before, after = np.array(rows["swaps"][claim])
    problem = np.array(rows["swaps"]["problem"])
    count = len(problem) // 2
    way = np.repeat([-1, 1], count)
    moved = 0.5 + 0.5 * np.sign(way * (after - before))
    shares = (moved[:count] + moved[count:]) / 2
    return dict(zip(problem[:count].tolist(), shares.tolist(), strict=True))


def _of_common(by_problem: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Return the values [pretrainings, problems] of the problems that every pretraining has."""
    common = sorted(set.intersection(*(set(values) for values in by_problem)))
    return np.array([[values[number] for number in common] for values in by_problem])


def _scores(seeds: Sequence[Rows], arm: str) -> dict[str, list[float]]:
    """Return the scores of an arm, a number for each pretraining."""
    return {
        "brier": [brier(_of(rows, ("arms", arm)), _correct(rows)) for rows in seeds],
        "auroc": [float(auroc(_of(rows, ("arms", arm)), _correct(rows))) for rows in seeds],
        "auroc_within_problem": [
            auroc_within_problem(_of(rows, ("arms", arm)), _correct(rows), rows["problem"]).value
            for rows in seeds
        ],
        "minus_bar": _shown(_minus(seeds, arm, "bar")),
    }


def _with_average(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the rows with an arm more: what is stated, averaged over a problem's answers."""
    stated = _of(rows, ("arms", "stated"))
    _, place = np.unique(rows["problem"], return_inverse=True)
    average = np.bincount(place, stated) / np.bincount(place)
    return {**rows, "arms": {**rows["arms"], AVERAGED: average[place].tolist()}}


def _shown(gap: Interval) -> list[float]:
    return [gap.mean, gap.low, gap.high]


def _page(result: Mapping[str, Any]) -> str:
    lines = [
        "# Tables: the note after the answer",
        "",
        "By `python -m lab note` from `note_records.tar.xz`; the design is in [note.md](note.md).",
        f"Pretrainings: {', '.join(result['pretrainings'])}.",
        "",
    ]
    rows = []
    for name, scores in result["arms"].items():
        means = [f"{np.mean(scores[key]):.4f}" for key in list(scores)[:3]]
        rows.append((name, *means, _interval(scores["minus_bar"])))
    columns = ("Brier", "AUROC", "AUROC within problems", "Brier minus the bar's")
    lines += table("Means of the pretrainings.", columns, rows)
    for claim, found in result["claims"].items():
        rows = [(name, _interval(gap)) for name, gap in found["intervals"].items()]
        text = f"The claim for `{claim}`: {found['holds']} of its six endpoints hold in sequence."
        lines += table(text, ("mean and 95 % interval",), rows)
    for title, gaps in (
        *((f"{name}, minus the arm itself", of) for name, of in result["controls"].items()),
        ("another problem's note, minus no note", result["another minus no note"]),
    ):
        rows = [(name, _interval(gap)) for name, gap in gaps.items()]
        lines += table(f"Fitted and tested with {title}:", ("Brier",), rows)
    rows = [(name, f"{np.mean(values):.4f}") for name, values in result["shifted"].items()]
    lines += table("Notes of which two in five are wrong, nothing fitted again:", ("Brier",), rows)
    return "\n".join(lines)


def _interval(gap: Sequence[float]) -> str:
    mean, low, high = gap
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
