"""Logs that others wrote become samples: small files that the packages wrote themselves (Inspect
0.3.285, lm-eval 0.4.13, lighteval 0.13.0, TRL 1.16, verifiers 0.4.0) or that follow verl's writer,
and tables.
"""

from __future__ import annotations

import csv
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.foreign import PRESETS, parse_columns, read_any
from tests.helpers.paths import REPOSITORY

FOREIGN = REPOSITORY / "tests" / "fixtures" / "foreign"


def shown(path: Path, **columns: str) -> list[tuple[str, float, float | None]]:
    """Problem, verdict and confidence of every sample."""
    return [
        (s.prompt.prompt_id, s.judgement.correct, s.judgement.confidence)
        for s in read_any(path, columns or None)
    ]


def test_a_log_of_inspect_has_verdicts_and_confidences() -> None:
    assert shown(FOREIGN / "arith.eval") == [
        ("a", 1.0, 0.9),
        ("b", 0.0, 0.7),
        ("c", 1.0, 0.4),
        ("d", 0.0, None),
    ]
    (first, *_) = read_any(FOREIGN / "arith.eval")
    assert (first.prompt.task, first.prompt.problem) == ("arith", "2*3=")


def test_lm_evals_generations() -> None:
    (path,) = FOREIGN.glob("samples_gen_*")
    samples = read_any(path)
    assert [s.prompt.task for s in samples] == ["gen"] * 3
    assert [s.judgement.confidence for s in samples] == [0.99] * 3
    assert samples[0].prompt.problem == "2*3="


def test_lm_evals_choices_have_the_share_of_the_chosen_one() -> None:
    (path,) = FOREIGN.glob("samples_arith_*")
    first = read_any(path)[0]
    logprobs = [-37.61513137817383, -33.25900650024414, -43.790130615234375]
    share = math.exp(logprobs[1]) / sum(map(math.exp, logprobs))
    assert first.judgement.confidence == pytest.approx(share, rel=1e-9)
    assert first.measures.token_confidence == first.judgement.confidence


@pytest.mark.parametrize(
    ("file", "words", "expected"),
    [
        ("1.jsonl", "verl", [("2*3=", 1.0, 0.8), ("2*3=", 0.0, 0.9)]),
        ("details_arith*", "lighteval", [("0", 1.0, 0.9), ("1", 0.0, 0.7), ("2", 1.0, None)]),
        (
            "traces.jsonl",
            "verifiers,correct=traces.rewards.correct.score",
            [("2*3=", 1.0, 0.9), ("2*3=", 0.0, 0.7), ("3*3=", 0.0, None)],
        ),
    ],
)
def test_whose_columns_they_are(
    file: str, words: str, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = FOREIGN.glob(file)
    assert shown(path, **parse_columns(words)) == expected
    assert ("1 rows" in caplog.text) == (file == "traces.jsonl"), "a failed episode is counted"


def test_completions_of_trl_are_grouped_by_prompt() -> None:
    samples = read_any(FOREIGN / "completions_00001.parquet", parse_columns("trl,correct=right"))
    assert len(samples) == 8
    assert len({s.prompt.prompt_id for s in samples}) == 2
    assert [s.response.sample_index for s in samples] == [0, 1, 2, 3] * 2
    assert sum(s.judgement.correct for s in samples) == 7


def test_a_column_inside_another_one(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "rewards": [{"score": 1.0}],
        "said": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    columns = {"correct": "rewards.score", "text": "said"}
    (sample,) = read_any(path, columns)
    assert sample.response.text == "a"
    several = {**row, "rewards": [{"score": 1.0}, {"score": 0.0}]}
    path.write_text(json.dumps(several) + "\n")
    with pytest.raises(UserError, match=r"rewards\.0"):
        read_any(path, columns)
    path.write_text(json.dumps({**row, "said": ["a", "b"]}) + "\n")
    with pytest.raises(UserError, match="2 responses"):
        read_any(path, columns)
    with pytest.raises(UserError, match="no answered problem"):
        read_any(path, {**columns, "correct": "rewards.none"})


def test_a_table_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "p", "right"])
        rows.writerows([["x", "0.25", "1"], ["x", "", "0"], ["y", "1.0", "True"]])
    columns = parse_columns("correct=right,confidence=p,group=id")
    assert shown(path, **columns) == [("x", 1.0, 0.25), ("x", 0.0, None), ("y", 1.0, 1.0)]


def test_without_a_group_rows_of_one_problem_are_its_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"right": 1, "asked": asked} for asked in ("2+2", "2+3", "2+2", "", "")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = read_any(path, parse_columns("correct=right,problem=asked"))
    assert len({sample.prompt.prompt_id for sample in samples}) == 4
    assert [sample.response.sample_index for sample in samples] == [0, 0, 1, 0, 0]
    assert "2 rows have no asked" in caplog.text


def test_rows_without_a_group_are_problems_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No number that names a problem is taken by a row that has none."""
    path = tmp_path / "mine.jsonl"
    groups = [3, 3, None, "", "  ", float("nan")]
    rows = [{"right": 1, "id": group, "level": group} for group in groups]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = read_any(path, parse_columns("correct=right,group=id,kind=level"))
    problems = [sample.prompt.prompt_id for sample in samples]
    assert problems[:2] == ["3", "3"]
    assert len(set(problems[2:]) - {"3"}) == 4
    assert [sample.response.sample_index for sample in samples] == [0, 1, 0, 0, 0, 0]
    assert [sample.prompt.kind for sample in samples] == ["3", "3", None, None, None, None]
    assert len(caplog.records) == 1
    assert "4 rows have no id" in caplog.text
    caplog.clear()
    read_any(path, parse_columns("correct=right"))
    assert not caplog.records


def test_our_own_samples_stay_what_they_are(tmp_path: Path) -> None:
    row = {
        "version": 2,
        "prompt_id": "a",
        "ground_truth": "6",
        "task": "t",
        "sample_index": 0,
        "finish_reason": "stop",
        "weights_version": 0,
        "text": "6",
        "correct": 1.0,
        "confidence": 0.5,
        "status": "ok",
        "boundary": None,
        "length": 0,
    }
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert shown(path) == [("a", 1.0, 0.5)]


@pytest.mark.parametrize(
    ("name", "rows", "columns", "named"),
    [
        ("a.jsonl", [{"x": 1, "y": 2}], {}, "--columns"),
        ("a.jsonl", [{"x": 1}], {"confidence": "x"}, "correct"),
        ("a.jsonl", [{"x": 1}], {"correct": "y"}, "'y'"),
        ("a.jsonl", [{"x": 7}], {"correct": "x"}, "row 1"),
        ("a.jsonl", [{"x": 1, "p": 1.2}], {"correct": "x", "confidence": "p"}, "1.2"),
        ("a.jsonl", [{"input": "a", "output": "b", "score": 3.5}], {"correct": "score"}, "3.5"),
        ("a.jsonl", [{"input": "a", "output": "b", "score": 1}], {}, "verl"),
        (
            "a.jsonl",
            [{"doc_id": 1, "resps": [["a"]], "target": "b", "bleu": 1, "metrics": ["bleu"]}],
            {},
            "bleu",
        ),
    ],
)
def test_what_has_no_verdict_is_refused_by_name(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], columns: dict[str, str], named: str
) -> None:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=named):
        read_any(path, columns or None)


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    whole = (FOREIGN / "arith.eval").read_bytes()
    damaged = tmp_path / "a.eval"
    middle = len(whole) // 4
    damaged.write_bytes(whole[:middle] + bytes(3000) + whole[middle + 3000 :])
    with pytest.raises(UserError, match=r"a\.eval"):
        read_any(damaged)
    without = tmp_path / "b.eval"
    with zipfile.ZipFile(without, "w") as log:
        log.writestr("header.json", "{}")
    with pytest.raises(UserError, match="verdict"):
        read_any(without)


@pytest.mark.parametrize("text", ["correct", "correct=", "right=x"])
def test_odd_columns_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--columns"):
        parse_columns(text)


@pytest.mark.draws
def test_a_report_of_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    files = [str(path) for path in sorted(FOREIGN.glob("[as]*"))]
    assert main(["report", *files, "--out", str(page)]) == 0
    assert "arith" in capsys.readouterr().out
    assert page.read_text().count("<svg") >= 2
    # and one of them on its own, beside itself
    copied = tmp_path / "arith.eval"
    copied.write_bytes((FOREIGN / "arith.eval").read_bytes())
    assert main(["report", str(copied)]) == 0
    assert (tmp_path / "arith.report.html").is_file()


def test_a_log_is_evaluated(tmp_path: Path) -> None:
    out = tmp_path / "scored"
    arguments = ["evaluate", "--samples", str(FOREIGN / "arith.eval"), "--out", str(out)]
    assert main([*arguments, "--confidence", "verbal", "--resamples", "0"]) == 0
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["overall"]["accuracy"] == 0.5
    assert evaluation["overall"]["verbal"]["parse_rate"] == 0.75


# -------------------------------------------------------- filters, repeats, scores of many kinds


def lm_eval_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """A log of lm-eval; each row has a document, a response and a verdict."""
    file = path / "samples_gsm8k_2026.jsonl"
    whole = [{"doc": {}, "target": "4", "metrics": ["exact_match"], **row} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in whole))
    return file


def two_filters(path: Path) -> Path:
    rows = [
        {
            "doc_id": n,
            "filter": name,
            "resps": [["4\n<conf> Confidence: 0.8"]],
            "exact_match": right,
        }
        for name, rights in (("strict-match", (0.0, 1.0)), ("flexible-extract", (1.0, 1.0)))
        for n, right in enumerate(rights)
    ]
    return lm_eval_rows(path, *rows)


def test_a_document_counts_once_whatever_filters_log_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The task's first filter, or the one that is named; the others are said."""
    file = two_filters(tmp_path)
    assert shown(file) == [("0", 0.0, 0.8), ("1", 1.0, 0.8)]
    assert "flexible-extract" in caplog.text
    assert shown(file, filter="flexible-extract") == [("0", 1.0, 0.8), ("1", 1.0, 0.8)]
    with pytest.raises(UserError, match="strict-match, flexible-extract"):
        read_any(file, {"filter": "lenient"})


def test_the_verdict_that_is_read_is_said_where_there_are_several(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"doc_id": 0, "resps": [["4"]], "exact_match": 0.0, "math_verify": 1.0}
    file = lm_eval_rows(tmp_path, row)
    assert [verdict for _, verdict, _ in shown(file)] == [0.0]
    assert "exact_match (and not math_verify)" in caplog.text
    caplog.clear()
    two = answer("C")
    two["scores"]["judge"] = {"value": "I"}
    file = inspect_json(tmp_path, two)
    assert [verdict for _, verdict, _ in shown(file)] == [1.0]
    assert "match, judge" in caplog.text
    caplog.clear()
    assert [verdict for _, verdict, _ in shown(file, correct="judge")] == [0.0]
    assert not caplog.text


def test_a_document_counts_once_where_columns_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = two_filters(tmp_path)
    named = {"correct": "exact_match", "group": "doc_id", "text": "resps.0.0"}
    assert shown(file, **named) == [("0", 0.0, 0.8), ("1", 1.0, 0.8)]
    assert "2 rows of the filter strict-match" in caplog.text
    named["filter"] = "flexible-extract"
    assert shown(file, **named) == [("0", 1.0, 0.8), ("1", 1.0, 0.8)]
    with pytest.raises(UserError, match="strict-match, flexible-extract"):
        read_any(file, {**named, "filter": "lenient"})


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<|im_end|>\n<|endoftext|>", "</s></s>\n", "<｜end▁of▁sentence｜>", ""]
)
def test_end_tokens_that_a_log_has_kept_are_no_text(tmp_path: Path, end: str) -> None:
    file = tmp_path / "1.jsonl"
    row = {"input": "2+2=", "output": f"4\n<conf> Confidence: 0.8{end}", "score": 1.0, "step": 1}
    file.write_text(json.dumps(row) + "\n")
    assert shown(file, **PRESETS["verl"]) == [("2+2=", 1.0, 0.8)]


@pytest.mark.parametrize("responses", [[["4", "5"]], [["4"], ["5"]]])
def test_one_verdict_about_several_responses_is_refused(tmp_path: Path, responses: Any) -> None:
    file = lm_eval_rows(tmp_path, {"doc_id": 0, "resps": responses, "exact_match": 1.0})
    with pytest.raises(UserError, match="repeats"):
        read_any(file)


def test_options_alone_are_no_options(tmp_path: Path) -> None:
    """``acc_mutual_info`` logs log p(option) behind log p(option | question)."""
    conditional = [-1.0, -2.0, -3.0]
    alone = [-0.5, -9.0, -9.0]
    row = {
        "doc_id": 0,
        "resps": [[[value, "False"]] for value in (*conditional, *alone)],
        "metrics": ["acc", "acc_mutual_info"],
        "acc": 1.0,
        "acc_mutual_info": 1.0,
    }
    (sample,) = read_any(lm_eval_rows(tmp_path, row))
    share = math.exp(-1.0) / sum(map(math.exp, conditional))
    assert sample.judgement.confidence == pytest.approx(share, rel=1e-9)


def inspect_json(
    path: Path, *samples: dict[str, Any], status: str = "success", problems: int | None = None
) -> Path:
    """The JSON form of an Inspect log, which may know how many ``problems`` its data set has."""
    file = path / "log.json"
    whole = [{"id": n, "input": "2+2=", "target": "4", **s} for n, s in enumerate(samples)]
    about: dict[str, Any] = {"task": "sums"}
    if problems is not None:
        about["dataset"] = {"name": "sums", "samples": problems}
    log = {"version": 2, "status": status, "eval": about, "samples": whole}
    file.write_text(json.dumps(log))
    return file


def answer(value: Any, stop_reason: str = "stop", confidence: str = "0.6") -> dict[str, Any]:
    text = f"4\n<conf> Confidence: {confidence}"
    return {
        "scores": {"match": {"value": value}},
        "output": {"completion": text, "choices": [{"message": {}, "stop_reason": stop_reason}]},
    }


def test_an_inspect_log_as_json(tmp_path: Path) -> None:
    file = inspect_json(tmp_path, answer("C"), answer("I"))
    assert shown(file) == [("0", 1.0, 0.6), ("1", 0.0, 0.6)]
    assert read_any(file)[0].prompt.task == "sums"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 3}, "3"),
        ({"version": "2"}, "version"),
        ({"eval": ["sums"]}, "convert"),
        ({"samples": ["one"]}, "convert"),
        ({"samples": [{**answer("C"), "scores": ["C"]}]}, "convert"),
        ({"samples": [{**answer("C"), "output": {"choices": ["4"]}}]}, "convert"),
    ],
)
def test_a_log_of_another_form_is_one_line(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    file = inspect_json(tmp_path, answer("C"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=named) as error:
        read_any(file)
    assert "\n" not in str(error.value)
    binary = tmp_path / "log.eval"
    header = {**json.loads(file.read_text()), "samples": None}
    with zipfile.ZipFile(binary, "w") as log:
        log.writestr("header.json", json.dumps(header))
        for number, sample in enumerate(json.loads(file.read_text())["samples"]):
            log.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample))
    with pytest.raises(UserError, match=named):
        read_any(binary)


def test_a_log_whose_evaluation_did_not_end_names_what_mends_it(tmp_path: Path) -> None:
    file = tmp_path / "log.eval"
    with zipfile.ZipFile(file, "w") as log:
        log.writestr("samples/0_epoch_1.json", json.dumps(answer("C")))
        log.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {}}))
    with pytest.raises(UserError, match="inspect log recover"):
        read_any(file)


@pytest.mark.parametrize("status", ["cancelled", "error", "started"])
@pytest.mark.parametrize("problems", [None, 70])
def test_a_log_that_did_not_end_well_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: str, problems: int | None
) -> None:
    assert len(shown(inspect_json(tmp_path, answer("C"), answer("I"), problems=problems))) == 2
    assert not caplog.records
    file = inspect_json(tmp_path, answer("C"), answer("I"), status=status, problems=problems)
    assert len(shown(file)) == 2
    (record,) = caplog.records
    said = record.getMessage()
    assert status in said
    assert " 2 samples" in said
    assert ("70" in said) is (problems is not None)


@pytest.mark.parametrize(
    ("stop_reason", "status"),
    [
        ("stop", "ok"),
        ("tool_calls", "ok"),  # an agent that submits by a tool
        ("max_tokens", "truncated"),
        ("model_length", "truncated"),
        ("content_filter", "truncated"),
    ],
)
def test_which_answers_of_inspect_are_complete(
    tmp_path: Path, stop_reason: str, status: str
) -> None:
    (sample,) = read_any(inspect_json(tmp_path, answer("C", stop_reason)))
    assert sample.response.finish_reason == ("stop" if status == "ok" else "length")


def test_partly_right_is_one_half_and_no_number_is_no_score(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = inspect_json(tmp_path, answer("P"), answer("N"), answer(float("nan")), answer(None))
    assert [verdict for _, verdict, _ in shown(file)] == [0.5, 0.0]
    assert "2 of 4" in caplog.text
    assert "1 of 2" in caplog.text, "a verdict between 0 and 1 is said to count as wrong"


def test_a_score_of_several_values_has_to_be_named(tmp_path: Path) -> None:
    file = inspect_json(
        tmp_path, answer({"accuracy": 1, "style": 0}), answer({"accuracy": 0, "style": 1})
    )
    with pytest.raises(UserError, match=r"correct=match\.KEY.*accuracy, style"):
        read_any(file)
    assert [v for _, v, _ in shown(file, correct="match.style")] == [0.0, 1.0]
    with pytest.raises(UserError, match="match"):
        read_any(file, {"correct": "judge"})


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "</s>", "<end_of_turn>\n", "<|eot_id|>", "<|im_end|>\n<|endoftext|>\n"]
)
def test_an_end_token_that_a_log_kept_is_no_part_of_the_answer(tmp_path: Path, end: str) -> None:
    file = tmp_path / "1.jsonl"
    row = {
        "input": "2+2=",
        "output": f"4\n<conf> Confidence: 0.8{end}",
        "score": 1.0,
        "data_source": "sums",
    }
    file.write_text(json.dumps(row) + "\n")
    (sample,) = read_any(file, parse_columns("verl,task=data_source"))
    assert sample.judgement.status == "ok"
    assert sample.judgement.confidence == 0.8
    assert sample.prompt.task == "sums"
