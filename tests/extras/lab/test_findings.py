"""What docs/lab/README.md says in words, from the published tables: an interval covers 0 or not, a
number is outside a band.

The numbers are those of the findings of the referee's second report; 1 and 2 are in test_theory.py.
"""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest

from lab.testtables import load
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"
READ = runpy.run_path(str(REPOSITORY / "tools" / "check_numbers.py"))
TEST = "test_tables.md qwen3_3 / "
PER_TYPE, LOGISTIC = (
    "log-prob of the reasoning, isotonic per type",
    "logistic regression: log-prob, length, task",
)
PROPER, RLCR = ("DCPO-proper, gradient over all digits (80ba0e8)", "RLCR, authors' settings")
ADAPTER = "adapter, text and log-probs, tokens of its own (80ba0e8)"


def cells(where: str) -> list[float]:
    return READ["values"](where, REPOSITORY / "docs")


def covers_zero(where: str) -> bool:
    mean, half = cells(where)
    return abs(mean) < half


def test_finding_3_the_adapter_is_matched_by_what_needs_no_training() -> None:
    assert json.loads((PUBLISHED / "test.json").read_text())["best"] == "logistic"
    assert all(covers_zero(f"{TEST}Minus logistic | {row} | Brier") for row in (PER_TYPE, ADAPTER))
    stated = [
        cells(f"{TEST}Brier / skill | {row} | stated, isotonic") for row in ("DCPO", RLCR, PROPER)
    ]
    own = [
        cells(f"{TEST}Brier / skill | {row} | log-prob, isotonic")[0]
        for row in ("GRPO", "DCPO", RLCR, PROPER)
    ]
    assert max(own) < min(brier for brier, _ in stated), (
        "log-probs beat every stated confidence, recalibrated"
    )
    assert stated[0][1] < 0, "DCPO's stays below the lookup"


def test_finding_7_what_looks_calibrated_is_outside_its_bands() -> None:
    for row in ("adapter, tokens of its own, isotonic", LOGISTIC):
        error, *bands = cells(f"{TEST}Mean ECE | {row} | ECE; independent; within problems")
        assert error > max(bands)


def test_finding_9_decoupling_keeps_pass_at_8_under_brier_alone() -> None:
    rungs = ("{}", "{}, mean only", "{}, Brier, lambda 0", "{}, Brier, lambda 0, mean only")
    rows = [
        f"{TEST}Decoupled | {rung.format('DCPO')} - {rung.format('coupled')} | " for rung in rungs
    ]
    assert [covers_zero(row + "pass@8, points") for row in rows] == [True, True, False, False]
    assert all(cells(row + "pass@8, points")[0] > 0 for row in rows[2:])


def test_finding_10_a_price_in_accuracy_is_shown_for_dcpo_proper_and_rlcr() -> None:
    """Against all three seeds of GRPO on each pretraining. Against the first seed alone RLCR's
    interval covered 0.
    """
    rows = ("DCPO", RLCR, PROPER)
    assert [covers_zero(f"{TEST}Minus GRPO | {row} | accuracy, points") for row in rows] == [
        True,
        False,
        False,
    ]
    assert all(covers_zero(f"{TEST}Minus GRPO | {row} | pass@8, points") for row in rows)
    assert not any(
        covers_zero(f"test_tables.md llama / Minus GRPO | {row} | accuracy, points")
        for row in ("DCPO", PROPER)
    )
    skills = {row: cells(f"{TEST}Mean over | {row} | skill") for row in rows}
    assert skills["DCPO"][0] < -skills["DCPO"][1]
    assert skills[PROPER][0] > skills[PROPER][1]


def test_dcpo_states_a_bit_and_no_other_stated_confidence_does() -> None:
    shares = {
        row: cells(f"{TEST}Mean over | {row} | zero_or_one")[0]
        for row in ("GRPO", "DCPO", RLCR, PROPER)
    }
    assert shares.pop("DCPO") > 0.95
    assert max(shares.values()) < 0.1
    llama = "test_tables.md llama / Mean over | DCPO | zero_or_one"
    assert cells(llama)[0] > 0.99


def test_findings_5_and_8_the_rows_are_shown() -> None:
    """A recalibrated log-prob and a lookup stand in the quickstart's table; the paper's decoding is
    of GRPO's policy alone.
    """
    page = (REPOSITORY / "docs" / "lab" / "quickstart.md").read_text()
    assert "| GRPO, recalibrated |" in page
    assert "| lookup for GRPO |" in page
    with pytest.raises(StopIteration):
        cells(f"{TEST}The paper's decoding | DCPO | ece")


@pytest.mark.slow
def test_finding_4_the_types_between_are_right_in_20_to_60_percent() -> None:
    runs = [
        methods["grpo"]["test"]
        for key, methods in load(PUBLISHED / "test_records.tar.xz").items()
        if key[0] == "large"
    ]
    shares = {
        kind: [r.correct[r.kind == kind].mean() for r in runs] for kind in np.unique(runs[0].kind)
    }
    assert [kind for kind, of in shares.items() if min(of) > 0.2 and max(of) < 0.6] == ["2x2"]
