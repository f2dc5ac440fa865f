"""The plan against published steps: no row of an H100 is missed by more than the range that ``dcpo
plan`` prints.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_dcpo.planning.machine import Rates
from megatron_dcpo.planning.plan import UNCERTAIN
from tests.helpers.paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from published_steps import FITTED, Row, fitted, on_machine, predicted, read_rows

PLANNED, OTHERS = read_rows()
H100 = [row for row in PLANNED if row.machine == "H100"]
LARGE = "235B"  # whose plans of 128 and 256 GPUs take up to a minute
QUICK = [row for row in H100 if LARGE not in row.model and row.release == "0.5"]


def errors_of(rows: list[Row]) -> np.ndarray:
    return np.array([predicted(row, Rates()) / row.seconds - 1 for row in rows])


def test_the_rows_of_a_release_are_within_the_range() -> None:
    errors = np.abs(errors_of(QUICK))
    assert len(errors) == 6
    assert errors.max() <= UNCERTAIN
    assert np.median(errors) <= 0.15


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_row_of_an_h100_is_within_the_range() -> None:
    errors = np.abs(errors_of(H100))
    assert len(errors) == 23
    assert errors.max() <= UNCERTAIN
    assert np.median(errors) <= 0.15


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_rates_are_those_that_fit() -> None:
    rates = fitted(H100)
    for name in FITTED:
        assert getattr(rates, name) == pytest.approx(getattr(Rates(), name), rel=0.03), name


def test_rows_that_are_not_planned_have_a_reason() -> None:
    assert len(PLANNED) + len(OTHERS) == 53
    assert all(row.engine_tp and row.seconds > 0 for row in PLANNED)


def test_more_bandwidth_is_not_slower() -> None:
    for row in QUICK:
        faster = replace(Rates(), hbm_gbps=8000.0, peak_tflops=2500.0)
        assert predicted(row, faster) < predicted(row, Rates())


def test_another_machine_keeps_what_was_fitted() -> None:
    rates = on_machine(replace(Rates(), mfu=0.3), "GB200")
    assert rates.mfu == 0.3
    assert rates.peak_tflops > Rates().peak_tflops
