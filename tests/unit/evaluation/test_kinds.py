"""The kinds of problem that a confidence is measured within: named by the data, or by --kinds in
evaluate, calibrate and report.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.calibration import auroc_within, auroc_within_problem, fitted_lookup
from megatron_dcpo.calibration.kinds import folds_of
from megatron_dcpo.cli import main
from megatron_dcpo.data.datasets import load_records
from megatron_dcpo.data.problem_kinds import (
    NO_KIND,
    check_kinds,
    columns_of,
    kind_of,
    kinds_of,
    possible_kinds,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.headline import METRICS
from megatron_dcpo.evaluation.lm_eval_metrics import auroc_within as of_lm_eval
from megatron_dcpo.evaluation.lm_eval_metrics import auroc_within_problem as problems_of_lm_eval
from megatron_dcpo.evaluation.lm_eval_metrics import process_results
from megatron_dcpo.evaluation.samples import Sample, read_samples, write_samples
from megatron_dcpo.evaluation.scoring import score_samples
from megatron_dcpo.training.step_metrics import response_metrics
from megatron_dcpo.types import Prompt, TrainingSample
from tests.helpers.evaluated import changed, make_samples


def by_kind(problems: int = 40, kinds: bool = True) -> list[Sample]:
    """Answers to easy and hard problems; what is stated knows only which of the two it is."""
    samples = []
    for sample in make_samples(problems, repeats=4):
        number = int(sample.prompt.ground_truth)
        hard = number % 2 == 1
        samples.append(
            changed(
                sample,
                kind=("hard" if hard else "easy") if kinds else None,
                labels={"subject": "sums" if number % 3 else "products", "id": f"p{number}"},
                correct=float((number + sample.response.sample_index) % (3 if hard else 5) > hard),
                confidence=0.3 if hard else 0.8,
                status="ok",
                token_confidence=0.5,
                reasoning_logprob=-1.0 - number % 7,
                boundary=3,
                length=5,
            )
        )
    return samples


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "in" / "samples.jsonl"
    path.parent.mkdir()
    write_samples(by_kind(), path)
    return str(path)


@pytest.fixture
def without_kinds(tmp_path: Path) -> str:
    path = tmp_path / "plain" / "samples.jsonl"
    path.parent.mkdir()
    write_samples(by_kind(kinds=False), path)
    return str(path)


def expected(samples: list[Sample], kinds: list[str]) -> float:
    return auroc_within(
        [s.judgement.confidence for s in samples], [float(s.correct) for s in samples], kinds
    ).value


# ----------------------------------------------------------------------------- what a kind may be


def prompt(**fields: object) -> Prompt:
    values = {"prompt_id": "p", "messages": (), "token_ids": (), "ground_truth": "12", "task": "t"}
    return Prompt(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by", "fields", "kind"),
    [
        ("kind", {"kind": "a"}, "a"),
        ("kind", {}, None),
        ("benchmark", {}, "t"),
        ("task", {}, "t"),
        ("digits", {}, "2"),
        ("digits", {"ground_truth": "-1,234.50"}, "4"),
        ("digits", {"ground_truth": "x+1"}, None),
        ("subject", {"labels": {"subject": "sums"}}, "sums"),
        ("subject", {"row": {"subject": 3}}, "3"),
        ("subject", {"row": {"subject": True}}, None),
        ("subject", {}, None),
    ],
)
def test_a_kind_is_what_is_named(by: str, fields: dict[str, object], kind: str | None) -> None:
    assert kind_of(prompt(**fields), by) == kind


def test_problems_without_a_kind_are_one_kind_of_their_benchmark() -> None:
    found = kinds_of([prompt(kind="a"), prompt(), prompt(task="u")])
    assert found.by == "kind"
    assert found.names == (("t", "a"), ("t", NO_KIND), ("u", NO_KIND))
    nothing = kinds_of([prompt(), prompt()])
    assert (nothing.by, nothing.within()) == ("", None)


def test_an_unknown_column_is_refused_with_those_there_are() -> None:
    prompts = [prompt(labels={"subject": "sums"}), prompt(row={"level": 2})]
    assert columns_of(prompts) == ["benchmark", "digits", "level", "subject"]
    with pytest.raises(UserError, match="benchmark, digits, level, subject"):
        check_kinds(prompts, "subjekt")
    check_kinds(prompts, "")


def test_possible_kinds_sort_the_problems() -> None:
    prompts = [
        prompt(prompt_id=str(n), labels={"subject": str(n % 2), "id": str(n)}) for n in range(6)
    ]
    assert possible_kinds(prompts) == ["subject"]


def test_the_data_keeps_short_columns_as_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = {"problem": "1+1", "answer": "2", "level": 3, "subject": "sums", "solution": "x" * 200}
    path.write_text(json.dumps(row) + "\n")
    record = load_records(str(path))[0]
    assert record.kind == "3"
    assert record.labels == {"level": "3", "subject": "sums"}


# ------------------------------------------------------------------------------------- evaluations


def test_scores_have_the_auroc_within_kinds_and_the_lookup() -> None:
    samples = by_kind()
    scores = score_samples(samples, ["verbal"], resamples=50)
    toy = scores["benchmarks"]["toy"]
    assert scores["kinds"]["by"] == "kind"
    assert toy["verbal"]["auroc"] > 0.6
    assert toy["verbal"]["auroc_within"] == 0.5
    assert (toy["verbal"]["kinds_used"], toy["verbal"]["kinds_left_out"]) == (2, 0)
    assert toy["ci95"]["verbal"]["auroc_within"] == [0.5, 0.5]
    lookup = fitted_lookup(
        [float(s.correct) for s in samples],
        [s.prompt.kind for s in samples],
        ["/".join(s.problem_key) for s in samples],
    )
    y = [float(s.correct) for s in samples]
    fold = folds_of([s.prompt.kind for s in samples], ["/".join(s.problem_key) for s in samples])
    assert toy["lookup"]["auroc"] == pytest.approx(auroc_within(lookup, y, fold).value)
    assert toy["verbal"]["auroc_within_problem"] == 0.5  # it states one number for a problem
    assert toy["verbal"]["problems_used"] > 20
    assert toy["lookup"]["brier"] == pytest.approx(((lookup - y) ** 2).mean())
    assert (toy["lookup"]["kinds"], toy["lookup"]["skill"]) == (2, 0.0)
    assert toy["lookup"]["auroc_within"] == 0.5
    low, high = toy["ci95"]["lookup"]["brier"]
    assert low < toy["lookup"]["brier"] < high


def test_kinds_of_two_benchmarks_are_apart() -> None:
    one = by_kind()
    two = [changed(s, task="two", prompt_id=f"two/{s.prompt.prompt_id}") for s in by_kind(20)]
    overall = score_samples([*one, *two], ["verbal"], resamples=0)["overall"]
    assert overall["verbal"]["kinds_used"] == 4
    by_benchmark = score_samples([*one, *two], ["verbal"], resamples=0, kinds_by="benchmark")
    assert by_benchmark["overall"]["verbal"]["kinds_used"] == 2
    assert by_benchmark["benchmarks"]["two"]["lookup"]["kinds"] == 1


def test_without_kinds_the_number_is_absent_and_possible_ones_are_named() -> None:
    scores = score_samples(by_kind(kinds=False), ["verbal"], resamples=20)
    assert scores["kinds"] == {"by": None, "possible": ["digits", "subject"]}
    toy = scores["benchmarks"]["toy"]
    assert toy["verbal"]["auroc_within"] is None
    assert "auroc_within" not in toy["ci95"]["verbal"]


def evaluate(file: str, out: Path, *options: str) -> int:
    return main(["evaluate", "--samples", file, "--out", str(out), "--resamples", "20", *options])


def test_evaluate_measures_within_the_named_column(file: str, tmp_path: Path) -> None:
    assert evaluate(file, tmp_path / "out", "--kinds", "subject", "--confidence", "verbal") == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    samples = read_samples(file)
    subjects = [(s.prompt.labels or {})["subject"] for s in samples]
    toy = found["benchmarks"]["toy"]
    assert found["kinds"]["by"] == "subject"
    assert toy["verbal"]["auroc_within"] == pytest.approx(expected(samples, subjects))
    assert set(toy["by_kind"]) == {"sums", "products"}
    assert "Within kinds" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("verb", ["evaluate", "calibrate", "report"])
def test_every_verb_refuses_an_unknown_column(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    out = str(tmp_path / "out")
    given = {
        "evaluate": ["--samples", file],
        "calibrate": ["--samples", file],
        "report": [file],
    }
    assert main([verb, *given[verb], "--out", out, "--kinds", "subjekt"]) == 2
    said = capsys.readouterr().err
    assert "subjekt" in said
    assert "benchmark, digits, id, subject" in said


def test_report_scores_again_within_the_named_column(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert evaluate(file, run) == 0
    capsys.readouterr()
    page = str(tmp_path / "page.html")
    assert main(["report", str(run), "--out", page, "--json", "--kinds", "subject"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert list(rows) == ["run", "run, lookup"]
    samples = read_samples(file)
    subjects = [(s.prompt.labels or {})["subject"] for s in samples]
    assert rows["run"]["auroc_within"] == pytest.approx(expected(samples, subjects))
    assert set(rows["run"]) == set(METRICS)
    assert rows["run, lookup"]["accuracy"] == rows["run"]["accuracy"]


def test_report_refuses_kinds_of_samples_that_are_gone(file: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert evaluate(file, run) == 0
    (run / "samples.jsonl").unlink()
    assert main(["report", str(run), "--kinds", "subject"]) == 2
    assert main(["report", str(run)]) == 0


def test_evaluate_and_report_say_which_kinds_are_possible(
    without_kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(without_kinds, tmp_path / "run") == 0
    assert "digits, subject" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "digits, subject" in capsys.readouterr().out


def test_calibrate_shows_the_stated_confidence_and_the_lookup(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "fitted.npz")
    assert main(["calibrate", "--samples", file, "--out", out, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["held_out"]
    assert list(rows) == ["verbal", "token", "logistic", "lookup"]
    assert rows["verbal"]["auroc_within"] == 0.5
    assert rows["lookup"]["skill"] == 0.0
    assert rows["logistic"]["kinds_used"] == 2


def test_calibrate_says_which_kinds_are_possible(
    without_kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "fitted.npz")
    assert main(["calibrate", "--samples", without_kinds, "--out", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds"] == {"by": None, "possible": ["digits", "subject"]}
    assert found["held_out"]["logistic"]["auroc_within"] is None


def test_a_predictor_says_what_the_posthoc_confidence_is(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "fitted.npz")
    assert main(["calibrate", "--samples", file, "--out", out, "--held-out", "0"]) == 0
    assert evaluate(file, tmp_path / "out", "--calibrator", out) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["benchmarks"]["toy"]["posthoc"]["by"] == ["logistic"]


# ------------------------------------------------------------------------------ training and others


def test_a_training_step_has_the_metric() -> None:
    samples = by_kind()
    trained = [
        TrainingSample(
            prompt=s.prompt,
            response=replace(s.response, token_ids=np.array([1, 2])),
            judgement=s.judgement,
            advantages=np.zeros(2),
            block_ids=np.zeros(2, np.int8),
            weights=np.zeros(2),
        )
        for s in samples
    ]
    metrics = response_metrics(trained)
    assert metrics["calibration/auroc_within"] == 0.5
    assert metrics["calibration/auroc"] > 0.6


def test_lm_eval_aggregates_within_the_kinds_of_the_documents() -> None:
    texts = {"a": "\\boxed{1}\n<conf> Confidence: 0.9", "b": "\\boxed{2}\n<conf> Confidence: 0.1"}
    triples = []
    for kind in ("x", "y"):
        for text in texts.values():
            document = {"answer": "1", "type": kind}
            triples.append(process_results(document, [text])["auroc_within"])
    assert triples[0] == (0.9, 1.0, "x")
    assert of_lm_eval(triples) == 1.0
    named = process_results({"answer": "1", "topic": "z"}, [texts["a"]], kinds="topic")
    assert named["auroc_within"] == (0.9, 1.0, "z")
    unnamed = process_results({"answer": "1"}, [texts["a"]])["auroc_within"]
    assert str(of_lm_eval([unnamed])) == "nan"
    several = process_results({"answer": "1"}, [[texts["a"], texts["b"]]])["auroc_within_problem"]
    assert len(several) == 2
    assert (
        problems_of_lm_eval([several])
        == auroc_within_problem(
            [confidence for confidence, _ in several], [right for _, right in several], ["p", "p"]
        ).value
    )


def test_columns_of_a_table_that_say_something_of_an_answer_are_no_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    lines = ["group,right,p,level,reward"]
    for number in range(60):
        for right in (0, 1):
            lines.append(f"g{number},{right},{0.1 * (number % 9):.1f},{number % 3},{2 * right}")
    file.write_text("\n".join(lines))
    options = ["--columns", "correct=right,confidence=p,group=group", "--out", str(tmp_path / "o")]
    assert main(["evaluate", "--samples", str(file), *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "level" in said["kinds"]["possible"]
    for column in ("right", "p", "group", "reward"):
        assert column not in said["kinds"]["possible"]
        refused = [*options[:-1], str(tmp_path / column), "--kinds", column]
        assert main(["evaluate", "--samples", str(file), *refused]) == 2


def test_one_answer_to_each_problem_does_not_show_what_is_of_the_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    lines = ["right,p,level,reward"]
    for number in range(60):
        right = number % 2
        lines.append(f"{right},{0.1 * (number % 9):.1f},{number % 3},{2 * right}")
    file.write_text("\n".join(lines))

    def evaluated(name: str, columns: str, *more: str) -> int:
        options = [
            "--columns",
            f"correct=right,confidence=p{columns}",
            "--resamples",
            "0",
            "--json",
        ]
        out = ["--out", str(tmp_path / name)]
        return main(["evaluate", "--samples", str(file), *options, *out, *more])

    assert evaluated("one", "") == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["possible"] == []
    assert evaluated("two", "", "--kinds", "reward") == 2
    assert evaluated("three", ",kind=level") == 0
    lines = [f"{line},{max(number - 1, 0) // 4}" for number, line in enumerate(lines)]
    lines[0] = lines[0].replace(",0", ",group")
    file.write_text("\n".join(lines))
    assert evaluated("four", ",kind=reward,group=group") == 2
    assert "row 2" in capsys.readouterr().err


def test_the_number_of_problems_with_both_verdicts_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("right,p,q\n1,.9,a\n0,.2,a\n1,.8,b\n0,.3,b\n1,.5,c\n1,.5,c\n")
    columns = ("--columns", "correct=right,confidence=p,problem=q", "--resamples", "0")
    options = (*columns, "--out", str(tmp_path / "out"))
    assert main(["evaluate", "--samples", str(file), *options]) == 0
    assert "2 of the 3 problems" in capsys.readouterr().out
    overall = json.loads((tmp_path / "out" / "evaluation.json").read_text())["overall"]
    assert (overall["verbal"]["auroc_within_problem"], overall["verbal"]["problems_used"]) == (1, 2)


def test_a_text_with_half_a_character_has_a_fold() -> None:
    assert folds_of(["a", "a"], ["\ud83d", "b"]).tolist() in ([0, 1], [1, 0])


def test_the_question_alone_is_a_row_where_there_are_enough_questions() -> None:
    few = score_samples(by_kind(20), ["verbal"], resamples=20)
    assert "question only" not in few["overall"]
    samples = []
    for sample in by_kind(120):
        number = int(sample.prompt.ground_truth)
        text = f"What is {number}{' squared' if number % 2 else ''}?"
        samples.append(
            replace(
                sample,
                prompt=replace(sample.prompt, problem=text),
                judgement=replace(sample.judgement, correct=float(number % 2 == 0)),
            )
        )
    of_question = score_samples(samples, ["verbal"], resamples=20)["overall"]["question only"]
    assert of_question["brier"] < 0.05  # the word says it
    assert of_question["auroc"] > 0.95
    assert of_question["auroc_within_problem"] is None  # no problem has both verdicts
    assert of_question["n"] == len(samples)
