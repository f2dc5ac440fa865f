"""The paper's tables (``docs/paper_tables.csv``) against what docs/errata.md says of them."""

import csv
from statistics import fmean

import pytest

from tests.helpers.paths import REPOSITORY

with (REPOSITORY / "docs" / "paper_tables.csv").open(newline="") as _file:
    ROWS = list(csv.DictReader(_file))
CELLS = {
    (r["table"], r["method"], r["confidence"], r["benchmark"], r["metric"]): float(r["value"])
    for r in ROWS
}
MATH = ("MATH-500", "AIME24", "AIME25", "AMC23", "AMC24")


def test_every_cell_is_there_once():
    keys = [
        (r["table"], r["model"], r["method"], r["confidence"], r["benchmark"], r["metric"])
        for r in ROWS
    ]
    assert (
        len(set(keys))
        == len(ROWS)
        == 10 * 6 * 4 + 5 * 3 * 4 + 5 * 3 + 2 * 4 * 5 * 2 + 7 + 5 * 2 + 3
    )


@pytest.mark.parametrize(
    ("table", "benchmarks", "of", "exceeds"), [("1 math", 5, 50, 23), ("2 code", 3, 15, 3)]
)
def test_pce_exceeds_ece_as_often_as_erratum_p4_counts(table, benchmarks, of, exceeds):
    pairs = [
        (value, CELLS[t, method, confidence, benchmark, "pce"])
        for (t, method, confidence, benchmark, metric), value in CELLS.items()
        if (t, metric) == (table, "ece") and benchmark != "overall"
    ]
    assert len(pairs) == of
    assert sum(pce > ece for ece, pce in pairs) == exceeds


def test_overall_is_the_mean_in_three_rows_and_its_orders_reverse_as_erratum_p6_says():
    metrics = ("accuracy", "ece", "pce", "auroc")
    rows = sorted({key[1:3] for key in CELLS if key[0] == "1 math"})
    means = {
        (*row, m): fmean(CELLS["1 math", *row, name, m] for name in MATH)
        for row in rows
        for m in metrics
    }
    plain = [
        row
        for row in rows
        if all(abs(means[*row, m] - CELLS["1 math", *row, "overall", m]) < 6e-4 for m in metrics)
    ]
    assert (len(plain), len(rows)) == (3, 10)
    assert means["DCPO", "verbal", "accuracy"] < means["GRPO", "token", "accuracy"]
    assert means["RLCR", "verbal", "pce"] < means["DCPO", "verbal", "pce"]


@pytest.mark.parametrize(
    ("percent", "possible"), [(32.8, False), (4.4, False), (42.5, True), (41.6, True)]
)
def test_no_number_of_right_responses_gives_erratum_p14s_accuracies(percent, possible):
    """30 problems, 4 or 8 samples each, rounded or cut after one decimal."""
    shares = [100 * right / total for total in (120, 240) for right in range(total + 1)]
    assert (
        any(abs(share - percent) <= 0.0501 or 0 <= share - percent < 0.1 for share in shares)
        is possible
    )
