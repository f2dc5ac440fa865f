"""pass@k: the unbiased estimate, its interval, where it is written and printed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.evaluation.scoring import pass_at_k, passes, score_samples
from tests.helpers.evaluated import make_sample


def judged(right: list[list[int]], task: str = "b") -> list[Sample]:
    """Return samples of one problem per list, in which 1 is right."""
    samples = []
    for number, outcomes in enumerate(right):
        for index, outcome in enumerate(outcomes):
            fields = {"task": task, "prompt_id": f"p{number}", "sample_index": index}
            samples.append(make_sample(**fields, correct=float(outcome)))
    return samples


@pytest.mark.parametrize(("count", "right"), [(4, 0), (4, 1), (4, 3), (4, 4), (7, 2)])
def test_it_is_the_share_of_all_draws_with_a_right_response(count: int, right: int) -> None:
    outcomes = [1] * right + [0] * (count - right)
    for k in range(1, count + 1):
        draws = list(itertools.combinations(outcomes, k))
        share = np.mean([any(draw) for draw in draws])
        assert pass_at_k(count, right, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_no_more_than_the_responses(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 4"):
        pass_at_k(4, 2, k)


def test_the_mean_over_problems_for_the_k_that_repeats_allow() -> None:
    found = passes(judged([[1, 0, 0, 0, 0, 0], [0] * 6]), resamples=0, seed=0)
    assert found.values == pytest.approx({1: 1 / 12, 2: 1 / 6, 4: 1 / 3, 6: 1 / 2})
    assert found.intervals == {}
    # the problem with the fewest responses
    assert list(passes(judged([[1, 0, 0], [0, 1]]), 0, 0).values) == [1, 2]
    assert passes([], 10, 0).values == {}


def test_intervals_are_over_problems() -> None:
    """Repeats of a problem agree: 100 problems of a rate of one half, sd .05, not .025."""
    found = passes(judged([[i % 2] * 4 for i in range(100)]), resamples=400, seed=1)
    assert found.values == {1: 0.5, 2: 0.5, 4: 0.5}
    for low, high in found.intervals.values():
        assert low == pytest.approx(0.4, abs=0.03)
        assert high == pytest.approx(0.6, abs=0.03)


def test_in_the_scores() -> None:
    samples = judged([[1, 0], [0, 0]], "a") + judged([[1, 1, 0, 0]], "b")
    scores = score_samples(samples, ["verbal"], resamples=20)
    assert scores["benchmarks"]["a"]["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert list(scores["benchmarks"]["b"]["pass_at_k"]) == ["1", "2", "4"]
    low, high = scores["benchmarks"]["a"]["ci95"]["pass_at_k"]["2"]
    assert 0 <= low <= 0.5 <= high <= 1
    overall = scores["overall"]
    assert overall["pass_at_k"] == pytest.approx({"1": 1 / 3, "2": (1 + 0 + 5 / 6) / 3})
    assert overall["macro"]["pass_at_k"] == pytest.approx({"1": 0.375, "2": (0.5 + 5 / 6) / 2})


def test_dcpo_evaluate_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(judged([[1, 0, 0], [0, 0, 0]], "toy"), tmp_path / "samples.jsonl")
    out = tmp_path / "out"
    arguments = ["--samples", str(tmp_path / "samples.jsonl"), "--out", str(out)]
    assert main(["evaluate", *arguments, "--resamples", "50"]) == 0
    printed = capsys.readouterr().out
    for words in ("pass@1", "pass@2", "pass@3", "16.7% (", "33.3% (", "50.0% ("):
        assert words in printed
    written = json.loads((out / "evaluation.json").read_text())
    toy = written["benchmarks"]["toy"]
    assert toy["pass_at_k"] == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 1 / 2})
    assert set(toy["ci95"]["pass_at_k"]) == {"1", "2", "3"}
    page = (out / "report.html").read_text()
    assert all(f"<th>pass@{k}</th>" in page for k in (1, 2, 3))
    assert "<td>50.0%" in page
