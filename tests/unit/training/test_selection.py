"""Which checkpoint is the best, and when a run stops early."""

from __future__ import annotations

import math

from megatron_dcpo.training.selection import Selection


def metrics(value: float) -> dict[str, float]:
    return {"evaluation/heldout/accuracy": value}


def test_early_stop_counts_validations_since_the_best() -> None:
    """The validation before the first step does not count."""
    selection = Selection("accuracy", patience=2)
    exhausted = []
    for step, value in {0: 0.9, 1: 0.5, 2: 0.6, 3: 0.6, 4: math.nan}.items():
        selection.add(step, metrics(value))
        exhausted.append(selection.is_exhausted())
    assert exhausted == [False, False, False, False, True]
    assert selection.stagnation() == (2, 2)


def test_the_first_of_equal_checkpoints_is_the_best() -> None:
    selection = Selection("accuracy", patience=0)
    is_best = [selection.add(step, metrics(value)) for step, value in ((0, 1), (1, 0.5), (2, 0.5))]
    assert is_best == [False, True, False]
    assert selection.best_step == 1
    assert selection.value(1) == 0.5
    assert selection.add(3, metrics(0.75))
    assert not selection.is_exhausted(), "patience 0 never ends a run"


def test_nothing_is_selected_without_a_metric() -> None:
    selection = Selection("", patience=0)
    assert not selection.add(1, metrics(0.5))
    assert selection.best_step is None


def test_a_resumed_run_knows_its_validations_but_only_its_own_checkpoints() -> None:
    selection = Selection("accuracy", patience=3)
    measured = {1: metrics(0.9), 2: metrics(0.6), 3: metrics(0.7)}
    selection.restore(measured, saved=[2, 3, 4])
    assert selection.best_step == 3, "the checkpoint of step 1 is gone"
    assert selection.measured == measured
    assert selection.stagnation() == (2, 1), "an early stop counts what was measured"


def test_best_json_names_the_best_step_if_its_records_are_lost() -> None:
    for metric in ("heldout/accuracy", "accuracy"):
        selection = Selection(metric, patience=0)
        measured = {4: metrics(0.7), 6: metrics(0.6)}
        selection.recall(2, metric, 0.9, measured)
        selection.recall(4, metric, 0.1, measured)
        selection.restore(measured, saved=[2, 6])
        assert selection.best_step == 2
        assert selection.value(2) == 0.9
        assert measured[4] == metrics(0.7), "records that are there are kept"
    other = Selection("ece", patience=0)
    measured = {4: metrics(0.7)}
    other.recall(2, "accuracy", 0.9, measured)
    assert 2 not in measured, "best.json is of another metric"
