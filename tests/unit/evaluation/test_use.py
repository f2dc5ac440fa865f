"""``dcpo evaluate --use``: what the confidence is for, in evaluation.json and in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.calibration import json_ready
from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.samples import write_samples
from megatron_dcpo.evaluation.scoring import use_scores
from tests.helpers.evaluated import make_samples


def test_uses_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Votes agree with the samples; the report has the section; the order of the lines does not matter."""
    samples = make_samples(20)
    second = [replace(s, correct=True) for s in samples]
    write_samples(samples, tmp_path / "samples.jsonl")
    write_samples(second, tmp_path / "second.jsonl")
    options = ["--use", "--route-to", str(tmp_path / "second.jsonl"), "--route-cost", "3", "--confidence", "verbal"]
    run = ["evaluate", "--samples", str(tmp_path / "samples.jsonl"), "--out", str(tmp_path / "out"), "--resamples", "0"]
    assert main([*run, *options]) == 0
    use = json.loads((tmp_path / "out" / "evaluation.json").read_text())["benchmarks"]["toy"]["use"]["verbal"]
    assert use["votes"]["single"] == pytest.approx(np.mean([s.correct for s in samples]))
    assert (use["routing"][-1]["accuracy"], use["routing"][-1]["cost"]) == (1.0, 4.0)
    again = use_scores(samples[::-1], ["verbal", "token"], lambda _, a, b: a == b, second, 3.0)["toy"]
    assert json_ready(again["verbal"]) == use
    assert again["token"]["votes"]["majority"] == use["votes"]["majority"], "no confidence is in a plain majority"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What the confidence is for" in page
    assert "Cost per question" in page
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--route-to", "other.jsonl"], "has none of these problems"),
        (["--route-to", "missing.jsonl"], "missing.jsonl"),
        (["--use", "--route-cost", "-1"], "--route-cost must be at least 0, not -1.0"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(make_samples(3), "samples.jsonl")
    write_samples(make_samples(3, benchmark="other"), "other.jsonl")
    assert main(["evaluate", "--samples", "samples.jsonl", "--out", "out", *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()
