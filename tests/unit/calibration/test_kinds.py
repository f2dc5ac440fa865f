"""AUROC within kinds against a count of all pairs, its bootstrap, and the fitted lookup."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.calibration import (
    WithinKinds,
    auroc,
    auroc_within,
    auroc_within_ci,
    auroc_within_problem,
    auroc_within_problem_ci,
    bootstrap_ci,
    fitted_lookup,
)
from megatron_dcpo.calibration.kinds import folds_of

Row = tuple[float, bool, str]

# few different confidences, so that many tie
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.booleans(), st.sampled_from("abc"))
)


def columns(of: Sequence[Row]) -> tuple[list[float], list[float], list[str]]:
    confidences = [confidence for confidence, _, _ in of]
    correct = [float(right) for _, right, _ in of]
    kinds = [kind for _, _, kind in of]
    return confidences, correct, kinds


def by_counting(of: Sequence[Row]) -> WithinKinds:
    """Look at every pair of a right and a wrong row of one kind."""
    won = 0.0
    pairs = 0
    used = set()
    for better, right, kind in of:
        for worse, also_right, other in of:
            if right and not also_right and kind == other:
                pairs += 1
                won += 1.0 if better > worse else 0.5 * (better == worse)
                used.add(kind)
    value = won / pairs if pairs else math.nan
    return WithinKinds(value, len(used), len({kind for _, _, kind in of}) - len(used))


def close(one: WithinKinds, other: WithinKinds) -> bool:
    same = one.value == pytest.approx(other.value, abs=1e-12, nan_ok=True)
    return bool(same) and (one.used, one.left_out) == (other.used, other.left_out)


@given(rows)
def test_the_value_is_that_of_counting_all_pairs(of: list[Row]) -> None:
    assert close(auroc_within(*columns(of)), by_counting(of))


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_changes_nothing(of: list[Row], random: object) -> None:
    shuffled = list(of)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert close(auroc_within(*columns(of)), auroc_within(*columns(shuffled)))


@given(rows, st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)))
def test_a_constant_for_each_kind_is_exactly_one_half(
    of: list[Row], constants: dict[str, float]
) -> None:
    _, correct, kinds = columns(of)
    found = auroc_within([constants.get(kind, 0.5) for kind in kinds], correct, kinds)
    assert found.value == 0.5 or (found.used == 0 and math.isnan(found.value))


@given(rows)
def test_one_kind_gives_the_plain_auroc(of: list[Row]) -> None:
    confidences, correct, _ = columns(of)
    found = auroc_within(confidences, correct, ["one"] * len(of))
    expected = auroc(confidences, correct)
    assert found.value == expected or (math.isnan(found.value) and math.isnan(expected))


def test_kinds_weigh_by_their_pairs_and_undefined_ones_are_counted() -> None:
    of = [
        *[(0.9, True, "two pairs"), (0.1, False, "two pairs"), (0.2, False, "two pairs")],
        *[(0.3, True, "one pair"), (0.8, False, "one pair")],
        *[(0.5, True, "all right"), (0.5, True, "all right")],
        (0.5, False, "all wrong"),
    ]
    found = auroc_within(*columns(of))
    assert found == WithinKinds(value=pytest.approx(2 / 3), used=2, left_out=2)  # type: ignore[arg-type]


def test_rows_without_a_confidence_are_left_out() -> None:
    found = auroc_within([None, 0.9, 0.1, math.nan], [1, 1, 0, 0], ["a", "a", "a", "b"])
    assert found == WithinKinds(value=1.0, used=1, left_out=1)


def test_no_rows_and_no_pairs_are_undefined() -> None:
    assert math.isnan(auroc_within([], [], []).value)
    nothing = auroc_within([0.5, 0.5], [1, 0], ["a", "b"])
    assert math.isnan(nothing.value)
    assert (nothing.used, nothing.left_out) == (0, 2)
    assert all(map(math.isnan, auroc_within_ci([0.5, 0.5], [1, 0], ["a", "b"])))


def test_kinds_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="kinds"):
        auroc_within([0.5, 0.5], [1, 0], ["a"])
    with pytest.raises(ValueError, match="kinds"):
        fitted_lookup([1, 0], ["a"])


def some_answers(problems: int = 60, repeats: int = 4) -> tuple[np.ndarray, ...]:
    """Return confidences, labels, kinds and problems of answers to problems of three kinds."""
    generator = np.random.default_rng(0)
    problem = np.repeat(np.arange(problems), repeats)
    kind = problem % 3
    correct = (generator.random(len(problem)) < 0.2 + 0.3 * kind).astype(float)
    confidence = np.clip(0.3 * kind + generator.random(len(problem)) * 0.4, 0, 1)
    return confidence, correct, kind, problem


def test_the_interval_of_one_kind_is_that_of_the_plain_auroc() -> None:
    confidence, correct, _, problem = some_answers()
    one = np.zeros(len(correct), int)
    within = auroc_within_ci(confidence, correct, one, problem, resamples=100, seed=3)
    plain = bootstrap_ci(auroc, confidence, correct, problem, resamples=100, seed=3)
    assert within == pytest.approx(plain, abs=1e-12)


def test_the_interval_contains_the_value_and_knows_the_seed() -> None:
    answers = some_answers()
    value = auroc_within(*answers[:3]).value
    low, high = auroc_within_ci(*answers, resamples=200)
    assert low < value < high
    assert (low, high) == auroc_within_ci(*answers, resamples=200)
    assert (low, high) != auroc_within_ci(*answers, resamples=200, seed=1)


def test_a_confidence_that_knows_only_the_kind_is_unmasked() -> None:
    _, correct, kind, _ = some_answers()
    assert auroc(kind.astype(float), correct) > 0.65
    assert auroc_within(kind.astype(float), correct, kind).value == 0.5


# ------------------------------------------------------------------------------- within one problem


@given(rows)
def test_within_a_problem_is_the_mean_of_the_problems_that_are_mixed(of: list[Row]) -> None:
    confidences, correct, problems = columns(of)
    values = []
    for problem in dict.fromkeys(problems):
        mine = [number for number, each in enumerate(problems) if each == problem]
        value = auroc([confidences[i] for i in mine], [correct[i] for i in mine])
        if not math.isnan(value):
            values.append(value)
    within = auroc_within_problem(confidences, correct, problems)
    assert within.mixed == len(values)
    if values:
        assert within.value == pytest.approx(np.mean(values))
    else:
        assert math.isnan(within.value)


def test_a_problem_counts_once_however_many_answers_it_has() -> None:
    # one answer of each verdict, ranked wrongly, and nine pairs, ranked rightly
    confidences = [0.1, 0.9, *[0.8] * 3, *[0.2] * 3, None]
    correct = [1, 0, *[1] * 3, *[0] * 3, 1]
    problems = ["p", "p", *"qqqqqq", "p"]
    assert auroc_within_problem(confidences, correct, problems).value == 0.5
    assert auroc_within(confidences, correct, problems).value == 0.9


def test_who_knows_only_the_question_is_one_half_within_problems() -> None:
    generator = np.random.default_rng(0)
    easy = np.repeat(generator.random(50), 8)
    correct = (generator.random(400) < easy).astype(float)
    problems = np.repeat(np.arange(50), 8).tolist()
    assert auroc(easy, correct) > 0.7
    assert auroc_within_problem(easy, correct, problems).value == 0.5
    assert auroc_within_problem_ci(easy, correct, problems, resamples=50) == (0.5, 0.5)
    knows = easy + 0.3 * correct
    low, high = auroc_within_problem_ci(knows, correct, problems, resamples=50)
    assert 0.5 < low <= high <= 1
    assert math.isnan(auroc_within_problem_ci([0.1, 0.2], [0, 1], ["p", "p"])[0])


# ----------------------------------------------------------------------------------- fitted lookup


def test_pairs_of_one_fold_do_not_rank_a_lookup_against_its_labels() -> None:
    generator = np.random.default_rng(0)
    problems = np.repeat(np.arange(100), 4).tolist()
    kinds = ["one"] * 400
    of_all, of_folds = [], []
    for _ in range(20):
        coins = generator.integers(2, size=100).repeat(4)
        lookup = fitted_lookup(coins, kinds, problems)
        of_all.append(auroc(lookup, coins))
        of_folds.append(auroc_within(lookup, coins, folds_of(kinds, problems)).value)
    assert np.mean(of_all) < 0.45
    assert set(of_folds) == {0.5}


def test_the_lookup_is_the_share_of_right_answers_of_the_kind_in_the_other_folds() -> None:
    _, correct, kind, problem = some_answers()
    lookup = fitted_lookup(correct, kind, problem)
    for number in np.unique(problem):
        mine = problem == number
        assert len(set(lookup[mine])) == 1
        # the value is that of some set of other problems of the kind: the own labels are not in it
        flipped = np.where(mine, 1 - correct, correct)
        assert fitted_lookup(flipped, kind, problem)[mine].tolist() == lookup[mine].tolist()
    for each in np.unique(kind):
        of_kind = kind == each
        assert len(set(lookup[of_kind])) <= 5
        assert lookup[of_kind].mean() == pytest.approx(correct[of_kind].mean(), abs=1e-12)


def test_two_folds_of_two_problems_look_up_each_other() -> None:
    correct = [1, 1, 0, 0, 0, 0]
    problem = ["p", "p", "q", "q", "q", "q"]
    assert fitted_lookup(correct, ["k"] * 6, problem).tolist() == [0, 0, 1, 1, 1, 1]


def test_a_kind_that_was_not_fitted_gets_the_mean_of_all() -> None:
    correct = [1, 0, 1, 1, 0]
    lookup = fitted_lookup(correct, ["a", "a", "a", "a", "alone"], folds=5)
    assert lookup[4] == 0.75
    assert math.isnan(fitted_lookup([1, 0], ["a", "a"], ["p", "p"])[0])
    assert fitted_lookup([], []).tolist() == []


@given(rows, st.randoms(use_true_random=False))
def test_the_lookup_does_not_depend_on_the_order_of_the_rows(of: list[Row], random: object) -> None:
    numbered = list(enumerate(of))
    random.shuffle(numbered)  # type: ignore[attr-defined]
    _, correct, kinds = columns(of)
    problems = [index // 2 for index in range(len(of))]
    before = fitted_lookup(correct, kinds, problems)
    order = [index for index, _ in numbered]
    after = fitted_lookup(
        [correct[i] for i in order], [kinds[i] for i in order], [problems[i] for i in order]
    )
    np.testing.assert_allclose(after, before[order], atol=1e-12)


def test_fewer_than_two_folds_are_refused() -> None:
    with pytest.raises(ValueError, match="folds"):
        fitted_lookup([1, 0], ["a", "a"], folds=1)
