"""The accuracy of a policy that does not read the prompt, and the accuracy by kind: in
evaluation.json, on the terminal, in the report.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.data.problem_kinds import MOST_KINDS, NO_KIND
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.evaluation.scoring import by_kind, prompt_blind, score_samples
from tests.helpers.evaluated import changed, evaluated, make_sample


def benchmark(keys: dict[str, list[str]], name: str = "toy", right: float = 0.0) -> list[Sample]:
    """Two responses to each problem, by kind and key."""
    return [
        make_sample(
            task=name,
            prompt_id=f"{kind}/{number}",
            sample_index=repeat,
            kind=kind,
            ground_truth=key,
            correct=right,
            confidence=0.5,
            status="ok",
        )
        for kind, of_kind in keys.items()
        for number, key in enumerate(of_kind)
        for repeat in range(2)
    ]


LETTERS = {"letters": ["1", "1", "1", "2"], "sums": ["7", "2", "9", "11", "2", "13"]}


def test_the_most_frequent_key_of_the_problems() -> None:
    found = prompt_blind(benchmark(LETTERS))
    assert found == {"accuracy": pytest.approx(3 / 10), "answer": "1"}
    once = [s for s in benchmark(LETTERS) if s.response.sample_index == 0]
    more = benchmark({"sums": ["7"] * 1})[:1] * 9
    assert prompt_blind([*once, *more])["answer"] == "1", "a problem counts once"


def test_several_benchmarks_have_an_answer_each() -> None:
    both = [*benchmark({"a": ["1", "1"]}, "one"), *benchmark({"b": ["2", "3"]}, "two")]
    assert prompt_blind(both) == {"accuracy": 0.75}
    assert by_kind(both) == {}


def test_programs_and_missing_keys_are_not_guessed() -> None:
    programs = benchmark({"a": ["tests:0", "tests:0"]})
    assert prompt_blind(programs) == {}
    assert prompt_blind(benchmark({"a": ["", " "]})) == {}
    forecasts = [
        replace(sample, prompt=replace(sample.prompt, form="forecast"))
        for sample in benchmark({"a": ["1.0", "1.0"]})
    ]
    assert prompt_blind(forecasts) == {}
    assert (
        "prompt_blind" not in score_samples(programs, ["verbal"], resamples=0)["benchmarks"]["toy"]
    )


def test_by_kind_says_which_kinds_can_be_guessed() -> None:
    samples = benchmark({"letters": LETTERS["letters"]}, right=1.0)
    samples += benchmark({"sums": LETTERS["sums"]})
    found = by_kind(samples)
    assert list(found) == ["letters", "sums"]
    assert found["letters"]["accuracy"] == 1
    assert found["letters"]["prompt_blind"] == {"accuracy": 0.75, "answer": "1"}
    assert found["sums"]["prompt_blind"]["accuracy"] == pytest.approx(2 / 6)
    assert (found["sums"]["n"], found["sums"]["problems"]) == (12, 6)
    total = sum(kind["n"] * kind["accuracy"] for kind in found.values())
    assert total / len(samples) == pytest.approx(8 / 20)
    some = [changed(s, kind=None) if s.prompt.kind == "sums" else s for s in samples]
    assert set(by_kind(some)) == {"letters", NO_KIND}
    assert by_kind(benchmark({"letters": ["1"]})) == {}
    names = {f"k{number}": ["1"] for number in range(MOST_KINDS + 1)}
    assert by_kind(benchmark(names)) == {}, "names of problems are no kinds"


def test_evaluate_records_and_prints_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kind may have any name, also that of a key of the scores."""
    keys = {"letters": LETTERS["letters"], "bins": LETTERS["sums"]}
    write_samples(benchmark(keys), tmp_path / "s.jsonl")
    options = ["--samples", str(tmp_path / "s.jsonl"), "--resamples", "0"]
    assert main(["evaluate", *options, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line.split() for line in lines if line.startswith("  letters")]
    assert line == ["letters", "4", "0.0%", "75.0%", "1"]
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    toy = written["benchmarks"]["toy"]
    assert toy["prompt_blind"] == {"accuracy": 0.3, "answer": "1"}
    assert toy["by_kind"]["letters"]["prompt_blind"]["accuracy"] == 0.75
    assert written["overall"]["prompt_blind"] == toy["prompt_blind"]


def test_the_report_shows_them_beside_each_run(tmp_path: Path) -> None:
    keys = {"all": LETTERS["letters"], "sums": LETTERS["sums"]}
    for name, right in (("base", 0.0), ("grpo", 1.0)):
        evaluated(tmp_path / name, samples=benchmark(keys, right=right))
    page = tmp_path / "report.html"
    runs = [str(tmp_path / name) for name in ("base", "grpo")]
    assert main(["report", *runs, "--out", str(page)]) == 0
    html = page.read_text().split("accuracy by kind", 1)[1].split("</table>")[0]
    cells = [row.split("<td>")[1:] for row in html.split("<tr>")[2:]]
    texts = [[cell.split("<")[0] for cell in row] for row in cells]
    assert texts == [
        ["30.0%", "75.0%", "33.3%"],
        ["0.0%", "0.0%", "0.0%"],
        ["100.0%", "100.0%", "100.0%"],
    ]


def test_a_report_of_an_older_evaluation_has_no_such_table(tmp_path: Path) -> None:
    found = evaluated(tmp_path / "old", samples=benchmark(LETTERS))
    for scores in (found["overall"], *found["benchmarks"].values()):
        del scores["prompt_blind"], scores["by_kind"]
    (tmp_path / "old" / "evaluation.json").write_text(json.dumps(found))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "old"), "--out", str(page)]) == 0
    assert "accuracy by kind" not in page.read_text()
