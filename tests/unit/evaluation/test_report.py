"""The report: finds runs, is self-contained, contains the numbers, survives odd runs."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.cli import report as cli
from megatron_dcpo.codec import VERSION
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import report
from megatron_dcpo.evaluation.alike import evaluated_alike
from megatron_dcpo.evaluation.headline import format_value
from megatron_dcpo.evaluation.runs import find_runs
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.evaluation.scoring import score_samples, scored_kinds
from tests.helpers.evaluated import changed, evaluated, make_sample, make_samples, trained

# the benchmarks of the paper's overall numbers
PAPERS = ("math500", "aime24", "aime25", "amc23", "amc24")


class Outside(HTMLParser):
    """Collects everything that would load something, and checks that elements close."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"link", "img", "iframe", "object", "embed", "video", "image"}:
            self.loads.append(tag)
        self.loads += [
            f"{tag} {k}={v}"
            for k, v in attrs
            if k in {"src", "href", "xlink:href"} and not str(v).startswith("#")
        ]
        if tag in {"section", "table", "details", "figure", "svg", "article", "pre"}:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in {"section", "table", "details", "figure", "svg", "article", "pre"}:
            assert self.stack.pop() == tag


@pytest.mark.draws
def test_report_is_self_contained_and_holds_the_numbers(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "base")
    second = evaluated(tmp_path / "dcpo", seed=5)
    trained(tmp_path / "dcpo")
    page = report.render_report(find_runs([tmp_path / "base", tmp_path / "dcpo"]))
    outside = Outside()
    outside.feed(page)
    assert outside.loads == []
    assert outside.stack == []
    assert "url(http" not in page
    assert "@import" not in page
    for evaluation in (first, second):
        overall = evaluation["overall"]
        assert isinstance(overall, dict)
        assert f"{overall['verbal']['ece']:.3f}</td>" in page
        assert f"{overall['verbal']['auroc']:.3f}</td>" in page
        assert f"{100 * overall['accuracy']:.1f}%</td>" in page
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert (
        page.count("<svg") == 4 + 2 + 2
    )  # two runs x two kinds, coverage of two kinds, two logged curves
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    embedded = json.loads(
        re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)[0]
    )
    assert embedded["dcpo"] == report.summary_of(find_runs([tmp_path / "dcpo"])[0])


def test_runs_on_different_benchmarks_are_said_to_be_so(tmp_path: Path) -> None:
    evaluated(tmp_path / "a", samples=make_samples(8, benchmark="one"))
    evaluated(
        tmp_path / "b", samples=make_samples(8, benchmark="one") + make_samples(8, benchmark="two")
    )
    page = report.render_report(find_runs([tmp_path]))
    assert "<h3>one</h3>" in page
    assert "<h3>one, two</h3>" in page
    assert "<summary>two, verbal confidence</summary>" in page
    assert "<tbody></tbody>" not in page.replace("\n", "")


def test_intervals_stand_beside_the_values() -> None:
    assert format_value("accuracy", 0.65, (0.61, 0.69)) == "65.0% ± 4.0"
    assert format_value("ece", 0.1, (0.08, 0.13)) == "0.100 ± 0.025"


def test_a_recalibrated_run_stands_in_the_main_table(tmp_path: Path) -> None:
    evaluated(tmp_path / "grpo")
    calibrated = evaluated(tmp_path / "grpo_calibrated")
    overall: Any = calibrated["overall"]
    overall["posthoc"] = overall["verbal"] | {"ece": 0.0123, "auroc": 0.9876}
    (tmp_path / "grpo_calibrated" / "evaluation.json").write_text(
        json.dumps(calibrated | {"model": "hubmodel"})
    )
    runs = find_runs([tmp_path])
    table = report._tables(runs)[0]
    recalibrated = "grpo_calibrated, recalibrated"
    names = ["grpo", "grpo, lookup", "grpo_calibrated", recalibrated, "grpo_calibrated, lookup"]
    assert list(table["rows"]) == names
    texts = [cell["text"] for cell in table["rows"][recalibrated]]
    assert any(text.startswith("0.012") for text in texts)
    assert report.comparison(runs)[recalibrated]["auroc"] == 0.9876
    assert "hubmodel" in report.render_report(runs), "the model of an evaluation"


def test_a_file_is_scored_by_every_confidence_that_its_samples_have(tmp_path: Path) -> None:
    samples = [changed(s, min_logprob=None) for s in make_samples(10)]
    fitted = [changed(s, posthoc_confidence=0.5, posthoc_by="task") for s in samples]
    write_samples(samples, tmp_path / "plain.jsonl")
    write_samples(fitted, tmp_path / "fitted.jsonl")
    plain, with_fit = find_runs([tmp_path / "plain.jsonl", tmp_path / "fitted.jsonl"])
    assert plain.evaluation is not None
    assert with_fit.evaluation is not None
    of_tokens = ["token", "token_product", "token_mean_logprob"]
    assert scored_kinds(plain.evaluation["overall"]) == ["verbal", *of_tokens, "consistency"]
    overall = with_fit.evaluation["overall"]
    assert scored_kinds(overall) == ["verbal", *of_tokens, "consistency", "posthoc"]
    assert overall["posthoc"]["mean_confidence"] == 0.5


def test_only_what_is_separable_is_bold() -> None:
    rows = {"a": {"ece": 0.05}, "b": {"ece": 0.10}, "c": {"ece": 0.30}}
    narrow = {"a": {"ece": (0.04, 0.06)}, "b": {"ece": (0.09, 0.11)}, "c": {"ece": (0.25, 0.35)}}
    assert report.separable_best("ece", rows, narrow) == "a"
    assert report.separable_best("ece", rows, narrow | {"b": {"ece": (0.055, 0.15)}}) is None
    assert report.separable_best("ece", rows, narrow | {"c": {}}) is None
    assert report.separable_best("ece", rows | {"b": {"ece": 0.05}}, narrow) is None
    assert report.separable_best("n", rows, narrow) is None


def test_other_sampling_stands_in_a_table_of_its_own(tmp_path: Path) -> None:
    for name, temperature in (("a", 0.7), ("b", 1.0)):
        evaluated(tmp_path / name)
        settings = {"temperature": temperature, "top_p": 1.0, "template": "raw"}
        (tmp_path / name / "settings.json").write_text(json.dumps(settings))
    page = report.render_report(find_runs([tmp_path]))
    for temperature in ("0.7", "1.0"):
        assert f"temperature {temperature}, top-p 1.0, template raw, " in page


def test_thinking_stands_in_a_table_of_its_own(tmp_path: Path) -> None:
    for name, thinking in (("a", {}), ("b", {"thinking": "on"})):
        evaluated(tmp_path / name)
        (tmp_path / name / "settings.json").write_text(json.dumps({"template": "raw", **thinking}))
    runs = find_runs([tmp_path])
    assert len(evaluated_alike(runs)) == 2
    assert "template raw, thinking on, " in report.render_report(runs)


def test_runs_that_answered_other_problems_are_said_to_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(tmp_path / "all", samples=make_samples(12))
    evaluated(tmp_path / "few", samples=make_samples(8, seed=1))
    [group] = evaluated_alike(find_runs([tmp_path]))
    [line] = group.other_problems
    assert "all 12" in line
    assert "few 8" in line
    assert line in report.render_report(find_runs([tmp_path]))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert line in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    [alike] = json.loads(capsys.readouterr().out)["alike"]
    assert (alike["runs"], alike["other_problems"]) == (["all", "few"], [line])


def test_nothing_is_bold_among_other_problems(tmp_path: Path) -> None:
    right = [changed(sample, correct=1.0) for sample in make_samples(12)]
    wrong = [changed(sample, correct=0.0) for sample in make_samples(12)]

    def page_of(first: list[Sample], second: list[Sample]) -> str:
        for name, samples in (("first", first), ("second", second)):
            evaluation = evaluated(tmp_path / name, samples=samples)
            evaluation |= score_samples(samples, ["verbal"], resamples=50, seed=0)
            (tmp_path / name / "evaluation.json").write_text(json.dumps(evaluation))
        return report.render_report(find_runs([tmp_path]))

    assert "class=best" in page_of(right, wrong)
    assert "class=best" not in page_of(right, wrong[4:])


@pytest.mark.parametrize("changes", [{"problem": "What else?"}, {"ground_truth": "1000"}])
def test_as_many_problems_may_be_other_ones(tmp_path: Path, changes: dict[str, str]) -> None:
    first = make_samples(8)
    evaluated(tmp_path / "a", samples=first)
    evaluated(tmp_path / "b", samples=make_samples(8, seed=1))
    [group] = evaluated_alike(find_runs([tmp_path]))
    assert group.other_problems == []
    others = [changed(s, **changes) if s.prompt.prompt_id == "toy/3" else s for s in first]
    evaluated(tmp_path / "c", samples=others)
    [group] = evaluated_alike(find_runs([tmp_path]))
    [line] = group.other_problems
    assert "answered 7 of these" in line


def test_without_samples_the_number_of_problems_tells(tmp_path: Path) -> None:
    for name, problems in (("a", 8), ("b", 8)):
        evaluated(tmp_path / name, samples=make_samples(problems))
        (tmp_path / name / "samples.jsonl").unlink()
    assert [group.other_problems for group in evaluated_alike(find_runs([tmp_path]))] == [[]]
    evaluated(tmp_path / "c", samples=make_samples(9))
    [group] = evaluated_alike(find_runs([tmp_path]))
    assert len(group.other_problems) == 1


def test_a_run_says_where_it_comes_from_and_what_it_was_warned_of(tmp_path: Path) -> None:
    for name, lam in (("one", 0.5), ("two", 1.0)):
        trained(tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(
            f"run_dir: {name}\nseed: 3\nmodel: {{path: m}}\nobjective: {{name: dcpo, lam: {lam}}}\n"
        )
        launch = {
            "time": "2026-11-25T04:05:06+00:00",
            "version": "0.2.0",
            "commit": "0123456789abcdef",
            "device": "cpu",
        }
        (tmp_path / name / "run.json").write_text(
            json.dumps({"launches": [launch | {"uncommitted_changes": True}]})
        )
    warning = {"step": 5, "watcher": "exploding", "text": "lower <optimizer.lr>"}
    (tmp_path / "two" / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    page = report.render_report(find_runs([tmp_path]))
    for shown in (
        "0.2.0 0123456789ab+",
        "<td>2026-11-25 04:05</td>",
        "Options that differ (1)",
        "objective.lam",
        "&lt;optimizer.lr&gt;",
    ):
        assert shown in page.replace("-<wbr>", "<wbr>") or shown in page, shown


def test_responses_are_escaped_and_their_blocks_coloured(tmp_path: Path) -> None:
    nasty = [
        make_sample(
            problem="<b>1 & 2</b>",
            text="think </pre><script>x</script> \\boxed{1}\n<conf> Confidence: 0.9",
            answer="1",
            ground_truth="2",
            confidence=0.9,
            status="ok",
        )
    ]
    evaluated(tmp_path / "<run>", samples=nasty)
    page = report.render_report(find_runs([tmp_path / "<run>"]))
    assert "<script>x" not in page
    assert 'class="confidence" title="confidence">&lt;conf&gt; Confidence: 0.9</span>' in page
    assert "&lt;b&gt;1 &amp; 2&lt;/b&gt;" in page
    assert "<run>" not in page


def test_runs_are_found_in_subdirectories_and_evaluations_join_their_training(
    tmp_path: Path,
) -> None:
    trained(tmp_path / "grpo")
    evaluated(tmp_path / "grpo" / "evaluation")
    trained(tmp_path / "dcpo")
    evaluated(tmp_path / "dcpo" / "eval-100")
    evaluated(tmp_path / "dcpo" / "eval-200", seed=1)
    evaluated(tmp_path / "base")
    runs = {run.name: run for run in find_runs([tmp_path])}
    assert set(runs) == {"base", "dcpo", "dcpo/eval-100", "dcpo/eval-200", "grpo"}
    assert runs["grpo"].evaluation is not None
    assert len(runs["grpo"].metrics) == 12
    assert runs["grpo"].samples
    assert runs["dcpo"].evaluation is None


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    evaluated(tmp_path / "a" / "run")
    evaluated(tmp_path / "b" / "run")
    names = [run.name for run in find_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == ["a/run", "b/run"]


def test_every_run_has_a_name_of_its_own_however_deep_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for study in ("s1", "s2"):
        for method in ("grpo", "dcpo"):
            evaluated(tmp_path / study / method / "eval")

    def named(*paths: str) -> list[str]:
        return [run.name for run in find_runs([tmp_path / path for path in paths])]

    assert named("s1/dcpo/eval", "s2/dcpo/eval") == ["s1/dcpo/eval", "s2/dcpo/eval"]
    assert named("s1", "s2") == ["s1/dcpo/eval", "s1/grpo/eval", "s2/dcpo/eval", "s2/grpo/eval"]
    files = ("s1/grpo/eval/samples.jsonl", "s1/dcpo/eval/samples.jsonl")
    assert named(*files) == ["grpo/eval/samples", "dcpo/eval/samples"]
    assert main(["report", *(str(tmp_path / path) for path in files), "--json"]) == 0
    assert {"grpo/eval/samples", "dcpo/eval/samples"} <= set(
        json.loads(capsys.readouterr().out)["runs"]
    )


def test_files_that_differ_in_the_suffix_alone_have_their_paths_as_names(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text("right\n1\n0\n" if name == "a.csv" else '{"right": 1}\n')
    paths = [tmp_path / "a.jsonl", tmp_path / "a.csv"]
    names = [run.name for run in find_runs(paths, {"correct": "right"})]
    assert names == [str(path.resolve()) for path in paths]


def test_a_name_with_its_parent_may_be_that_of_another_run(tmp_path: Path) -> None:
    for path in ("root/x/run", "root/y", "x/run", "z/run"):
        evaluated(tmp_path / path)
    runs = find_runs([tmp_path / path for path in ("root", "x/run", "z/run")])
    assert [run.path.relative_to(tmp_path).as_posix() for run in runs] == [
        "root/x/run",
        "root/y",
        "x/run",
        "z/run",
    ]
    assert len({run.name for run in runs}) == 4


def test_a_run_that_is_named_twice_is_there_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated(tmp_path / "runs" / "a")
    evaluated(tmp_path / "runs" / "b")
    runs = find_runs([tmp_path / "runs", tmp_path / "runs" / "a", tmp_path / "runs" / "b" / ".."])
    assert [run.name for run in runs] == ["a", "b"]
    assert len(caplog.records) == 3


@pytest.mark.draws
def test_a_training_run_alone(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "samples").mkdir()
    row = {
        "prompt_id": "p",
        "problem": "1+1?",
        "text": "so \\boxed{2}<conf> sure",
        "pieces": [["so \\boxed{2}", "reasoning", None], ["<conf> sure", "confidence", None]],
        "version": VERSION,
    }
    row |= {"correct": 1.0, "confidence": None, "status": "unparsable"}
    (tmp_path / "run" / "samples" / "step_000010.jsonl").write_text(json.dumps(row) + "\n")
    page = report.render_report(find_runs([tmp_path / "run"]))
    assert "Not evaluated: last training step" in page
    assert "61.0%</td>" in page
    assert "unparsable" in page
    assert 'class="confidence" title="confidence">&lt;conf&gt; sure</span>' in page


def test_a_run_that_was_never_evaluated_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it has a policy; and only such a run."""
    evaluated(tmp_path / "base")
    trained(tmp_path / "run")
    command = ["report", str(tmp_path / "base"), str(tmp_path / "run")]
    assert main(command) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")]
    assert "never evaluated" in line
    assert "--as-trained" not in line
    (tmp_path / "run" / "policy").mkdir()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"--model {tmp_path}/run/policy" in said
    assert f"--as-trained {tmp_path}/run/config.yaml" in said
    assert "base: never" not in said
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_evaluated"] == ["run"]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "rew')
    assert len(find_runs([tmp_path / "run"])[0].metrics) == 12


def test_wrong_directories_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        find_runs([tmp_path / "none"])
    with pytest.raises(UserError, match=r"neither evaluation\.json nor metrics\.jsonl"):
        find_runs([tmp_path])
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match=r"evaluation\.json:1: not valid JSON"):
        find_runs([tmp_path])
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(UserError, match="not an evaluation"):
        find_runs([tmp_path])
    (tmp_path / "evaluation.json").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not valid JSON"):
        find_runs([tmp_path])


@pytest.mark.slow
def test_dcpo_report_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated(tmp_path / "base")
    evaluated(tmp_path / "dcpo", seed=3)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(
        [
            "report",
            str(tmp_path / "base"),
            str(tmp_path / "dcpo"),
            "--json",
            "--out",
            str(tmp_path / "r.html"),
        ]
    )
    assert args.run(args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["runs"]) == {"base", "base, lookup", "dcpo", "dcpo, lookup"}
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    args = parser.parse_args(["report", str(tmp_path)])
    assert args.run(args) == 0
    assert "Accuracy" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.draws
def test_run_names_that_begin_with_a_digit_or_are_no_words(tmp_path: Path) -> None:
    for name in ("1", "0_base", "a\\1 b", "λ=0.5"):
        evaluated(tmp_path / name)
        page = report.render_report(find_runs([tmp_path / name]))
        outside = Outside()
        outside.feed(page)
        assert outside.stack == []
