"""Several verifiers with weights: the score, what is right, what is logged, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.cli import main
from megatron_dcpo.config import Config, JudgingConfig, as_dict, load_config, to_yaml, validate
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.config.field_types import VerifierChoice, WeightedVerifier, as_written
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluation_run import settings_of
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.judging.answers import BOXED, FENCED, FREE, Attempt, Outcome
from megatron_dcpo.judging.verifiers import (
    check_problems,
    check_verifier,
    digest_of,
    form_of,
    verifier_for,
    verifiers,
)
from megatron_dcpo.judging.weighted import Member, WeightedSum, labels
from megatron_dcpo.runtime.run_records import today
from megatron_dcpo.training.provenance import differences
from megatron_dcpo.training.sources import load_sources
from megatron_dcpo.training.step_metrics import verifier_metrics
from megatron_dcpo.types import Prompt, Response
from tests.helpers.judging import judge_many
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer

FUNCTIONS = """
def right(response, answer, **columns):
    if "raise" in response:
        raise ValueError("no")
    return {"score": float(f"boxed{{{answer}}}" in response), "seen": columns.get("level", 0)}


def short(prompts, completions, **columns):
    return [0.5 for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(FUNCTIONS)
    return path


def judging(verifier: object, **options: object) -> JudgingConfig:
    head = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    return validate({**head, "judging": {"verifier": verifier, **options}}).judging


def fixed(*outcomes: Outcome) -> Any:
    return lambda attempts: list(outcomes)


def combined(weights: Sequence[float], outcomes: Sequence[Outcome], **options: Any) -> Outcome:
    members = [
        Member(f"m{number}", weight, fixed(outcome))
        for number, (weight, outcome) in enumerate(zip(weights, outcomes, strict=True))
    ]
    (outcome,) = WeightedSum(members, JudgingConfig(**options))([Attempt("", "")])
    return outcome


RIGHT, WRONG = Outcome(True), Outcome(False)
HALF = Outcome(False, logged={"score": 0.5, "n": 3, "why": "x"})


def test_the_score_is_the_weighted_mean() -> None:
    """0.7 * 1 + 0.3 * 0.5 = 0.85; with graded it is the reward."""
    outcome = combined([0.7, 0.3], [RIGHT, HALF], threshold=0.8)
    assert (outcome.correct, outcome.category, outcome.score) == (True, None, None)
    assert outcome.logged == {"score": 0.85, "m0": 1.0, "m1": 0.5, "m1/n": 3, "m1/why": "x"}
    assert not combined([0.7, 0.3], [RIGHT, HALF], threshold=0.9).correct
    assert combined([7, 3], [RIGHT, HALF], graded=True).score == 0.85
    assert combined([1e308, 1e308], [RIGHT, WRONG], graded=True).score == 0.5


def test_by_default_every_member_must_give_one() -> None:
    assert combined([0.7, 0.2, 0.1], [RIGHT] * 3).correct
    for wrong in range(3):
        outcomes = [WRONG if number == wrong else RIGHT for number in range(3)]
        assert not combined([0.7, 0.2, 0.1], outcomes).correct


@pytest.mark.parametrize("weights", [(0.6, 0.3, 0.1), (0.1, 0.8, 0.1), (3, 6, 1)])
def test_weights_that_sum_to_the_threshold_reach_it(weights: Any) -> None:
    """Although 0.6 + 0.3 may be less than 0.9 in floating point."""
    threshold = 0.9
    outcome = combined(weights, [RIGHT, RIGHT, WRONG], threshold=threshold)
    assert outcome.correct


@given(st.lists(st.tuples(st.floats(1e-300, 1e300), st.floats(0, 1)), min_size=1, max_size=5))
def test_the_score_is_between_the_least_and_the_largest(pairs: list[tuple[float, float]]) -> None:
    outcomes = [Outcome(False, logged={"score": score}) for _, score in pairs]
    score = combined([weight for weight, _ in pairs], outcomes, graded=True).score
    assert score is not None
    scores = [score for _, score in pairs]
    assert max(0.0, min(scores) - 1e-12) <= score <= min(1.0, max(scores) + 1e-12)


def test_a_member_that_does_not_judge_makes_the_response_one_that_is_not_judged() -> None:
    options = JudgingConfig(threshold=0.5)
    members = [Member("a", 0.9, lambda _: [RIGHT]), Member("b", 0.1, lambda _: [None])]
    assert WeightedSum(members, options)([Attempt(None, "")]) == [None]


def test_the_category_of_a_program_is_kept() -> None:
    outcome = combined([0.5, 0.5], [Outcome(False, "timeout"), HALF])
    assert outcome.category == "timeout"


def test_functions_and_built_in_verifiers_judge_one_response(file: Path) -> None:
    """Ours, TRL's, verl's and math: 0.4 * 1 + 0.2 * 0.5 + 0.2 * 1 + 0.2 * math."""
    names = {f"{file}:right": 0.4, f"{file}:short": 0.2, f"{file}:compute_score": 0.2}
    options = judging({**names, "math": 0.2}, threshold=0.8, graded=True)
    verifier, form = verifiers(options, {})(options.verifier)
    row = {"answer": "6", "level": 2}
    prompts = {"p": Prompt("p", (), (), "6", "", row=row)}
    texts = ["\\boxed{6}", "\\boxed{6.0}", "raise \\boxed{6}", "no box"]
    responses = [
        Response("p", 0, [], [], "stop", 0, text=f"{text}\n<conf> Confidence: 0.5")
        for text in texts
    ]
    judged = judge_many(responses, prompts, verifier=verifier, form=form)
    assert judged[2] is None
    kept = [one for one in judged if one is not None]
    assert [one.score for one in kept] == [0.9, 0.5, 0.3]
    assert [one.correct for one in kept] == [1.0, 0.0, 0.0]
    assert [one.answered for one in kept] == [True, True, False]
    assert kept[0].confidence == 0.5
    metrics = verifier_metrics(kept)
    assert metrics["verifier/math"] == pytest.approx(2 / 3)
    assert metrics["verifier/my.right"] == pytest.approx(1 / 3)
    assert metrics["verifier/my.short"] == 0.5
    assert metrics["verifier/my.right/seen"] == 2
    assert metrics["verifier/score"] == pytest.approx((0.9 + 0.5 + 0.3) / 3)


def test_members_have_short_names() -> None:
    names = ["math", "/a/one.py:f", "/b/one.py:f", "package.rewards:g", "https://host:8008/path/"]
    members = [WeightedVerifier(name) for name in names]
    assert labels(members) == ["math", "one.f_1", "one.f_2", "rewards.g", "host_8008/path"]


# ------------------------------------------------------------------------------- the configuration


def test_a_mapping_is_read_written_and_read_again(tmp_path: Path, file: Path) -> None:
    head = "run_dir: r\nmodel: {path: m}\n"
    config = tmp_path / "run.yaml"
    config.write_text(
        f"{head}data: {{path: [{{path: d, verifier: {{exact: 1, f1: 3}}}}, e]}}\n"
        "judging: {verifier: {'my.py:right': 0.7, math: 2}}\n"
    )
    read = load_config(config)
    assert as_written(read.judging.verifier) == {f"{file}:right": 0.7, "math": 2.0}
    source, _ = read.data.sources
    assert source.verifier == (WeightedVerifier("exact", 1.0), WeightedVerifier("f1", 3.0))
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(read))
    for copy in (load_config(again), validate(as_dict(read))):
        assert (copy.judging, copy.data) == (read.judging, read.data)
    evaluated = load_evaluation({"run_dir": "e"}, as_trained=str(again))
    assert evaluated.judging == read.judging
    assert evaluated.data.sources[0].verifier == source.verifier
    evaluated = load_evaluation({"run_dir": "e"}, file=str(config))
    assert evaluated.judging == read.judging
    assert evaluated.data.sources[0].verifier == source.verifier


def test_a_later_mapping_replaces_an_earlier_one(tmp_path: Path) -> None:
    """Also of a base, and in an override: merged, they would have the weights of neither."""
    (tmp_path / "base.yaml").write_text(
        "run_dir: r\nmodel: {path: m}\ndata: {path: d}\njudging: {verifier: {math: 1, exact: 2}}\n"
    )
    run = tmp_path / "run.yaml"
    run.write_text("base: base.yaml\njudging: {verifier: {math: 1, f1: 1}}\n")
    read = load_config(run)
    assert as_written(read.judging.verifier) == {"math": 1.0, "f1": 1.0}
    for override, expected in (
        ("judging.verifier={exact: 3}", {"exact": 3.0}),
        ("judging.verifier=[exact, f1]", {"exact": 1.0, "f1": 1.0}),
        ("judging.verifier=exact", "exact"),
    ):
        changed = load_config(run, [override])
        assert as_written(changed.judging.verifier) == expected
        evaluated = load_evaluation(["run_dir=e", override], as_trained=str(run), file=str(run))
        assert as_written(evaluated.judging.verifier) == expected


@pytest.mark.parametrize(
    ("verifier", "named"),
    [
        ({"math": 0}, r"math.* 0"),
        ({"math": -1.5}, r"math.*-1\.5"),
        ({"math": float("nan")}, r"math.*nan"),
        ({"math": float("inf")}, r"math.*inf"),
        ({"math": 10**400}, r"math.*1000"),
        ({"math": True}, r"math.*True"),
        ({"math": "much"}, r"math.*much"),
        ({"math": None}, r"math.*None"),
        ({"mth": 1}, r"'math'"),
        ({"math": {"exact": 1}}, r"math.*exact"),
        ({"http://host/v": 1}, r"https://"),
        ({1: 1}, r"got 1"),
        ({}, r"no verifier"),
        ([], r"no verifier"),
        (["math", "math"], r"math"),
        ([["math", 1]], r"\['math', 1\]"),
        ([{"name": "math", "wieght": 2}], r"wieght"),
        ("{math: ", r"\{"),
        (3, r"3"),
    ],
)
def test_what_is_no_verifier_with_a_weight_is_refused_by_name(verifier: object, named: str) -> None:
    with pytest.raises(UserError, match=rf"judging\.verifier: .*{named}") as refused:
        judging(verifier)
    assert "\n" not in str(refused.value)


def test_members_are_looked_up_before_anything_is_loaded(file: Path) -> None:
    check_verifier(judging({"code": 1, f"{file}:right": 1}).verifier)
    with pytest.raises(UserError, match=r"'wrong'"):
        check_verifier(judging({"math": 1, f"{file}:wrong": 1}).verifier)
    with pytest.raises(UserError, match=r"judging\.verifier.*code"):
        check_verifier(judging({"code": 1, "exact": 1}).verifier)


def test_the_form_of_the_answer_is_that_which_a_member_needs() -> None:
    def form(*names: str) -> Any:
        return form_of(tuple(WeightedVerifier(name) for name in names))

    assert form("a.py:f", "https://h/v") is FREE
    assert form("a.py:f", "choice") is BOXED
    assert form("code", "a.py:f") is FENCED


def test_scores_need_no_user_s_verifier() -> None:
    assert judging({"math": 1, "exact": 1}, threshold=0.5, graded=True).graded
    with pytest.raises(UserError, match=r"judging\.threshold"):
        judging("math", threshold=0.5)


# ------------------------------------------------------------------------- evaluation, resumption


def test_a_changed_weight_is_another_verifier(file: Path) -> None:
    def digest(verifier: object) -> str:
        options = judging(verifier)
        return digest_of(options.verifier, options)

    name = f"{file}:right"
    before = digest({name: 0.7, "math": 0.3})
    assert digest({name: 0.7, "math": 0.3}) == before
    others = [
        digest({name: 0.8, "math": 0.2}),
        digest({name: 0.7, "exact": 0.3}),
        digest({name: 0.7}),
        digest(name),
    ]
    assert len({before, *others}) == 5


def test_a_resumed_run_names_a_changed_weight(tmp_path: Path) -> None:
    def config(weight: float) -> Config:
        head = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
        verifier = {"math": weight, "exact": 1}
        return validate({**head, "judging": {"verifier": verifier}})

    (tmp_path / "config.yaml").write_text(to_yaml(config(0.5)))
    assert not list(differences(tmp_path, config(0.5)))
    ((name, old, new),) = differences(tmp_path, config(0.6))
    assert name == "judging.verifier"
    assert (old[0]["weight"], new[0]["weight"]) == (0.5, 0.6)


def test_the_settings_of_an_evaluation_have_the_weights() -> None:
    given = {
        "run_dir": "e",
        "judging.verifier": {"math": 2, "f1": 1},
        "data.sources": [{"path": "d", "verifier": {"exact": 1}}],
    }
    settings = settings_of(load_evaluation(given), "m", today())
    assert json.loads(json.dumps(settings)) == settings
    assert settings["verifier"] == {"math": 2.0, "f1": 1.0}
    assert settings["sources"][0]["verifier"] == {"exact": 1.0}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("math", {"math": 0.5, "exact": 0.2, "a.py:f": 0.3}),
        ("choice", {"choice": 0.7, "a.py:f": 0.3}),
        ("short", {"exact": 0.7, "a.py:f": 0.3}),
    ],
)
def test_a_benchmark_of_another_kind_replaces_built_in_members(
    form: str, expected: dict[str, float]
) -> None:
    named = tuple(
        WeightedVerifier(name, weight)
        for name, weight in {"math": 0.5, "exact": 0.2, "a.py:f": 0.3}.items()
    )
    assert as_written(verifier_for(form, named)) == expected


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


PROGRAM = {
    "problem": "Print the sum of two numbers.",
    "tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]},
}


def test_a_benchmark_of_programs_keeps_a_mixture_with_code(tmp_path: Path, file: Path) -> None:
    path = write(tmp_path / "rows.jsonl", PROGRAM)
    both = judging({"code": 1, f"{file}:right": 1})
    (problems,) = load_problems(f"own={path}", both)
    assert problems.verifier == both.verifier
    (problems,) = load_problems(f"own={path}", judging({"math": 1, f"{file}:right": 1}))
    assert problems.verifier == "code"
    words = write(tmp_path / "words.jsonl", {"problem": "1+1=", "answer": "2"})
    (problems,) = load_problems(f"own={words}", both)
    assert problems.verifier == "math"


@pytest.mark.parametrize(
    ("row", "verifier"),
    [
        ({"problem": "1+1=", "answer": ""}, "math"),
        ({"problem": "1+1="}, "math"),
        ({"problem": "1+1=", "answer": ["2", "two"]}, "math"),
        ({"problem": "1+1=", "answer": '["2"]'}, "exact"),
        ({"problem": "1+1=", "answer": {"target": "2"}}, "f1"),
        ({"problem": "1+1=", "answer": "2"}, "choice"),
        ({"problem": "1+1=", "answer": "2"}, "code"),
        (PROGRAM, "math"),
        ({"question": "1+1=", "options": ["1", "2"], "answer": "B"}, "math"),
    ],
)
def test_rows_that_a_built_in_member_cannot_judge_are_refused(
    row: dict[str, Any], verifier: str, tmp_path: Path, file: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    own = f"{file}:right"
    overrides = (
        f"data.path={path}",
        "data.max_prompt_length=200",
        f"judging.verifier={{{verifier}: 1, '{own}': 1}}",
    )
    config = load_config(QUICKSTART / "dcpo.yaml", overrides)
    with pytest.raises(
        UserError, match=rf"rows\.jsonl.*({verifier}|an answer)|set judging"
    ) as said:
        load_sources(config, ByteTokenizer())
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("order", ["", "level"])
def test_rows_without_an_answer_are_dropped_as_by_the_built_in_member_alone(
    order: str, tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it is the order that keeps the columns; a user's verifier alone needs none."""
    answered = {"problem": "1+1=", "answer": "2", "level": 1}
    open_ended = {"problem": "Why?", "answer": None, "level": 2}
    path = write(tmp_path / "rows.jsonl", answered, open_ended)
    own = f"{file}:right"
    for verifier, count in (
        ("math", 1),
        (f"{{math: 1, '{own}': 1}}", 1),
        (f"{{'{own}': 1}}", 2),
        (own, 2),
    ):
        overrides = (f"data.path={path}", f"data.order='{order}'")
        config = load_config(QUICKSTART / "dcpo.yaml", (*overrides, f"judging.verifier={verifier}"))
        caplog.clear()
        (source,) = load_sources(config, ByteTokenizer())
        assert len(source.prompts) == count
        assert ("dropped 1 rows" in caplog.text) == (count == 1)
        (problems,) = load_problems(f"own={path}", config.judging)
        assert len(problems.benchmark.records) == count


def test_built_in_members_alone_need_no_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"problem": "1+1=", "answer": "2", "x": 1})
    (problems,) = load_problems(f"own={path}", judging({"math": 1, "exact": 1}))
    (record,) = problems.benchmark.records
    assert record.row is None
    check_problems(problems.verifier, [record], "here")


# -------------------------------------------------------------------------------- the command line


def test_dcpo_judge_takes_weights(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write(
        tmp_path / "pairs.jsonl",
        {"prediction": "\\boxed{6}<conf> Confidence: 0.5", "reference": 6},
        {"prediction": "\\boxed{12/2}<conf> Confidence: 0.5", "reference": 6},
    )
    verifier: VerifierChoice = yaml.safe_dump(
        {"math": 0.5, f"{file}:right": 0.5}, default_flow_style=True
    ).strip()
    command = ["judge", "--pairs", pairs, "--verifier", verifier]
    assert main([*command, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["correct"], row["score"]) for row in rows] == [(True, 1), (False, 0.5)]
    assert [(row["math"], row["my.right"]) for row in rows] == [(1, 1), (1, 0)]
    assert main([*command, "--threshold", "0.5"]) == 0
    assert "2 predictions, 2 correct" in capsys.readouterr().out
