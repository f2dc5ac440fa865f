"""The tables of the test: fitted rows, metrics by hand, and what is published from the records
alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.fitted import FITTED, Records, fitted_by_halves, isotonic_of, lookup, with_fitted
from lab.results import interval, write_archive
from lab.testtables import (
    DERIVED,
    METRICS,
    any_right,
    bands,
    ladder,
    load,
    mean_differences,
    paired_differences,
    skill,
    tables,
    zero_or_one,
)
from megatron_dcpo.calibration import ece
from megatron_dcpo.errors import UserError
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"
RECORDS = "test_records.tar.xz"


def records(problem, correct, confidence, kind=None) -> Records:
    n = len(problem)
    kinds = np.array(kind if kind is not None else ["2x1"] * n)
    return Records(
        np.array(problem),
        kinds,
        np.array(correct, float),
        np.array(confidence, float),
        np.zeros(n),
        np.ones(n),
    )


def test_pass_at_8_is_the_share_of_problems_with_a_right_response() -> None:
    assert any_right(records([0, 0, 1, 1, 2, 2], [1, 0, 0, 0, 1, 1], [0.5] * 6)).tolist() == [
        1,
        0,
        1,
    ]


def test_skill_is_zero_for_the_lookup_and_one_for_the_truth() -> None:
    kind, y = ["2x1"] * 4 + ["3x2"] * 4, [1, 1, 1, 0, 0, 0, 1, 0]
    r = records(range(8), y, [0.75] * 4 + [0.25] * 4, kind)
    assert lookup(r)(r).tolist() == [0.75] * 4 + [0.25] * 4
    assert skill(r) == pytest.approx(0)
    assert skill(r.stating(r.correct)) == 1
    assert skill(r.stating(np.full(8, 0.5))) == pytest.approx(1 - 0.25 / (3 / 16))
    assert lookup(r)(records([0], [1], [0.5], ["4x1"])).tolist() == [0.5], (
        "a new type: the mean of all"
    )


def test_skill_leaves_an_answer_without_a_confidence_out_of_both_scores() -> None:
    """The lookup learns from it, but is not scored where the method is not."""
    r = records(range(4), [1, 1, 0, 0], [0.75, 0.75, 0.25, math.nan])
    assert lookup(r)(r).tolist() == [0.5] * 4
    assert skill(r) == pytest.approx(1 - 0.0625 / 0.25)
    r = records(range(4), [1, 1, 1, 0], [0.75, 0.75, 0.75, math.nan])
    assert skill(r) == pytest.approx(1 - 0.0625 / 0.0625)


@pytest.mark.parametrize("alike", [False, True])
def test_bands_hold_what_is_calibrated(alike: bool) -> None:
    """About 93 of 100 calibrated policies are below the band within problems, whether a problem's
    eight responses are right together or each for itself; the band of independent labels holds them
    only in the second case.
    """
    generator, problem, inside = (
        np.random.default_rng(3),
        np.repeat(np.arange(300), 8),
        np.zeros(2),
    )
    for _ in range(60):
        p = np.repeat(generator.uniform(size=300), 8)
        luck = np.repeat(generator.uniform(size=300), 8) if alike else generator.uniform(size=2400)
        r = records(problem, luck < p, p)
        inside += ece(r.confidence, r.correct) <= np.array(bands([r], resamples=100))
    independent, within = inside / 60
    assert 0.86 <= within <= 1
    assert bool(independent < 0.5) is alike
    assert bands([r, r, r, r], resamples=100)[0] < bands([r], resamples=100)[0]


def test_the_ladder_compares_each_rung_on_the_pretrainings_that_have_both() -> None:
    coupled, decoupled = (
        {"test": records([0, 0, 1, 1], y, [0.5] * 4)} for y in ([0, 0, 0, 1], [1, 1, 0, 1])
    )  # problem 0: 0 and 2 right of 2, problem 1: the same
    both = {"coupled": coupled, "dcpo": decoupled, "coupled_mean": coupled}
    lines = ladder({1: [{"dcpo": decoupled}], 2: [both, {"dcpo": coupled}]})
    points = interval([100.0, 0.0]).shown(2)
    assert [line for line in lines if line.startswith("| DCPO")] == [
        f"| DCPO - coupled | 2 | {points} | {points} | +0.0000 ± 0.0000 |"
    ]
    assert ladder({1: [{"dcpo": decoupled}]}) == []


def test_trainings_are_compared_over_all_seeds_and_confidences_run_by_run() -> None:
    """GRPO has two seeds, right in 1/2 and 0 of problem 0; the other method has one, right in
    1 of it. As trainings they differ by the mean of both seeds, as confidences of one run by that
    run's.
    """
    first, second, other = (
        {"test": records([0, 0, 1, 1], y, [0.5] * 4)}
        for y in ([1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0])
    )
    of = {1: [{"grpo": first, "dcpo": other}, {"grpo": second}]}
    value = "accuracy, points"
    assert mean_differences(of, "dcpo", "grpo", value).tolist() == [[75, 0]]
    assert paired_differences(of, "dcpo", "grpo", value).tolist() == [[50, 0]]
    assert mean_differences({2: [{"grpo": first}]}, "dcpo", "grpo", value).size == 0


def test_a_bit_is_counted_among_what_is_stated() -> None:
    assert zero_or_one(np.array([0, 1, 0.5, 0.99, np.nan])) == 0.5
    assert np.isnan(zero_or_one(np.array([np.nan])))


def archive(path: Path, policies: tuple[str, ...]) -> None:
    generator = np.random.default_rng(0)
    files = {}
    for policy in policies:
        for method in ("grpo", "adapter", "adapter_tokens"):
            for part, repeats in (("test", 8), ("heldout", 4), ("decoding", 4)):
                lines = ["problem,correct,confidence,answer,logprob,token,tokens"]
                for problem in range(40):
                    for _ in range(repeats):
                        p = round(generator.beta(0.6, 0.4), 3)
                        y = int(generator.random() < p)
                        said = 0.9 if method == "grpo" else p
                        answer = problem if y else 7
                        logprob = f"{math.log(p + 1e-3):.4g}"
                        lines.append(f"{problem},{y},{said:.2f},{answer},{logprob},0.9,12")
                files[f"{policy}/{method}/1/{part}.csv"] = ("\n".join(lines) + "\n").encode()
    write_archive(path, files)


def test_the_contract_is_written_from_the_records_alone(tmp_path) -> None:
    archive(tmp_path / RECORDS, ("large.1", "large.3", "llama.1"))
    result = tables(tmp_path)
    written = json.loads((tmp_path / "test.json").read_text())
    assert set(written) == {"best", "policies"}
    assert set(written["policies"]) == {"qwen3_3", "llama"}
    for policy, n in (("qwen3_3", 2), ("llama", 1)):
        methods = written["policies"][policy]
        trained = {"grpo", "adapter", "adapter_tokens"}
        assert set(methods) == trained | set(DERIVED)
        assert all(set(row) == set(METRICS) and len(row["ece"]) == n for row in methods.values())
    assert result["best"] not in ("grpo", "lookup"), "GRPO says .9 always"
    grpo, fitted = (written["policies"]["qwen3_3"][name] for name in ("grpo", "logprob"))
    assert grpo["accuracy"] == fitted["accuracy"]
    assert np.mean(fitted["auroc"]) > 0.8 > np.mean(grpo["auroc"])
    with pytest.raises(UserError, match="no records"):
        load(tmp_path / "missing.tar.xz")


def test_a_fitted_row_never_sees_what_it_is_scored_on(tmp_path) -> None:
    """Test labels turned round change no confidence; those of one half of the validation problems
    only the other half's.
    """
    archive(tmp_path / RECORDS, ("large.1",))
    runs = load(tmp_path / RECORDS)["large", 1, 1]
    before = with_fitted(runs)
    flipped = {
        method: dict(run) | {"test": replace(run["test"], correct=1 - run["test"].correct)}
        for method, run in runs.items()
    }
    after = with_fitted(flipped)
    for name in FITTED:
        assert np.array_equal(before[name]["test"].confidence, after[name]["test"].confidence)
    r = runs["grpo"]["heldout"]
    even = r.problem % 2 == 0
    changed = replace(r, correct=np.where(even, 1 - r.correct, r.correct))
    half = dict(runs) | {"grpo": dict(runs["grpo"]) | {"heldout": changed}}
    again = with_fitted(half)["logprob"]["heldout"].confidence
    assert np.array_equal(again[even], before["logprob"]["heldout"].confidence[even])
    assert not np.array_equal(again[~even], before["logprob"]["heldout"].confidence[~even])


def test_a_row_of_halves_learns_from_the_other_half_alone() -> None:
    """In even problems .9 is always right, in odd ones never: each half is told what holds in the
    other.
    """
    r = records([0, 1] * 20, [1, 0] * 20, [0.9] * 40)
    assert fitted_by_halves(r, isotonic_of("confidence")).confidence.tolist() == [0, 1] * 20


@pytest.mark.slow
def test_the_published_tables_are_those_of_the_published_records(tmp_path) -> None:
    for test in ("test", "final"):
        (tmp_path / f"{test}_records.tar.xz").symlink_to(PUBLISHED / f"{test}_records.tar.xz")
        tables(tmp_path, test)
        for name in (f"{test}.json", f"{test}_tables.md"):
            assert (tmp_path / name).read_text() == (PUBLISHED / name).read_text()
