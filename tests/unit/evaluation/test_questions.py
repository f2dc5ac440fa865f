"""Benchmarks of questions through sampling, judging, scoring and judging again; what an abstention
leaves behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.data.datasets import message_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import AnswerJudge, evaluate_benchmark
from megatron_dcpo.evaluation.held_out import load_held_out
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.evaluation.results import write_evaluation
from megatron_dcpo.evaluation.samples import Sample, read_samples
from megatron_dcpo.evaluation.scoring import score_samples
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Response
from tests.helpers.evaluated import changed
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer
from tests.unit.data.test_questions import GPQA, MMLU, TRIVIA, lines, table

SAID = ("E", "7", "Eliot", "I don't know")


@pytest.fixture
def specs(tmp_path: Path) -> str:
    table(tmp_path / "gpqa.csv", [GPQA[7]])  # the right option is 7
    lines(tmp_path / "mmlu.jsonl", MMLU)
    lines(tmp_path / "trivia.jsonl", TRIVIA)
    return (
        f"gpqa={tmp_path / 'gpqa.csv'},"
        f"mmlupro={tmp_path / 'mmlu.jsonl'},trivia={tmp_path / 'trivia.jsonl'}"
    )


def evaluated(specs: str, judging: JudgingConfig | None = None) -> list[Sample]:
    """Every problem, answered by each of ``SAID``."""

    def complete(requests: Sequence[Any]) -> Iterator[list[Response]]:
        for request in requests:
            for repeat in request.repeats:
                text = f"So \\boxed{{{SAID[repeat]}}}\n<conf> Confidence: 0.5"
                yield [
                    Response(
                        request.prompt.prompt_id,
                        repeat,
                        np.empty(0),
                        np.empty(0),
                        "stop",
                        0,
                        text=text,
                    )
                ]

    samples: list[Sample] = []
    for one in load_problems(specs, judging or JudgingConfig()):
        samples += evaluate_benchmark(
            message_prompts(one.benchmark.records),
            complete,
            repeats=len(SAID),
            judged_by=AnswerJudge(one.judge, one.equivalent),
        )
    return samples


def verdicts(samples: Sequence[Sample]) -> dict[str, list[bool]]:
    return {
        name: [s.correct for s in samples if s.prompt.task == name]
        for name in ("gpqa", "mmlupro", "trivia")
    }


EXPECTED = {
    "gpqa": [False, True, False, False],
    "mmlupro": [True, True, False, False],
    "trivia": [False, False, True, False],
}


def test_each_is_judged_by_its_form_and_again(specs: str, tmp_path: Path) -> None:
    samples = evaluated(specs)
    assert verdicts(samples) == EXPECTED
    assert [s.judgement.abstained for s in samples] == [False, False, False, True] * 3
    wrong = [changed(s, correct=1.0 - s.correct, abstained=False) for s in samples]
    write_evaluation(tmp_path / "first", score_samples(wrong, ("verbal",), resamples=0), wrong)
    again = [
        "evaluate",
        "--samples",
        str(tmp_path / "first" / "samples.jsonl"),
        "--rejudge",
        "--resamples",
        "0",
    ]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    judged = read_samples(tmp_path / "again" / "samples.jsonl")
    assert verdicts(judged) == EXPECTED
    assert [(s.prompt.form, s.prompt.row, s.judgement.abstained) for s in judged] == [
        (s.prompt.form, s.prompt.row, s.judgement.abstained) for s in samples
    ]


def test_abstentions_are_in_the_summary(
    specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four responses one abstains; of mmlupro's three others two are right, of trivia's one."""
    samples = evaluated(specs)
    scores = score_samples(samples, ("verbal",), resamples=0)
    rates = {name: scores["benchmarks"][name]["abstention"] for name in ("mmlupro", "trivia")}
    assert rates["mmlupro"] == {
        "rate": 0.25,
        "coverage": 0.75,
        "selective_accuracy": pytest.approx(2 / 3),
        "hallucination_rate": 0.25,
    }
    assert rates["trivia"]["hallucination_rate"] == 0.5
    assert scores["overall"]["abstention"]["rate"] == 0.25
    answering = [s for s in samples if not s.judgement.abstained]
    assert "abstention" not in score_samples(answering, ("verbal",), resamples=0)["overall"]
    write_evaluation(tmp_path / "first", scores, samples)
    again = ["evaluate", "--samples", str(tmp_path / "first" / "samples.jsonl"), "--resamples", "0"]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    line = (
        "trivia abstention: rate 0.250, coverage 0.750, selective_accuracy 0.333, "
        "hallucination_rate 0.500"
    )
    assert line in out


def test_the_form_decides_whatever_else_is_trained_on(specs: str) -> None:
    assert verdicts(evaluated(specs, JudgingConfig(verifier="f1", threshold=0.5))) == EXPECTED
    assert verdicts(evaluated(specs, JudgingConfig(verifier="choice"))) == EXPECTED
    consistency = [
        s.measures.consistency_confidence for s in evaluated(specs) if s.prompt.task == "mmlupro"
    ]
    assert consistency == [0.25] * 4


def test_validation_of_a_run(specs: str) -> None:
    options = [
        "evaluation.interval=1",
        f"evaluation.benchmarks={json.dumps(specs.split(','))}",
        "data.template=abstain",
    ]
    tokens = TokenBytes((*(bytes([b]) for b in range(256)), b"", b""))
    held_out = load_held_out(
        load_config(QUICKSTART / "dcpo.yaml", options), ByteTokenizer(), tokens
    )
    assert held_out is not None
    responses = [
        Response(
            name, 0, np.empty(0), np.empty(0), "stop", 0, text="\\boxed{I don't know}\n<conf> 0.1"
        )
        for name in held_out.prompts
    ]
    found = held_out.metrics(held_out.judged(responses, []))
    assert found["evaluation/gpqa/abstention_rate"] == 1.0
    assert found["evaluation/gpqa/abstention_hallucination_rate"] == 0.0
    assert all(
        "\\boxed{I don't know}" in prompt.messages[-1]["content"]
        for prompt in held_out.prompts.values()
    )


MATHEMATICS = {"problem": "1 + 1 = ?", "answer": "2"}
PROGRAM = {"problem": "Print the sum.", "tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([MATHEMATICS, MATHEMATICS, MMLU], ("row 1", "row 3", "math", "choice")),
        ([MMLU, MATHEMATICS], ("row 1", "row 2", "choice", "math")),
        ([MMLU, TRIVIA], ("choice", "short")),
        ([MATHEMATICS, PROGRAM], ("row 1", "row 2", "math", "code")),
    ],
)
def test_a_benchmark_of_several_forms_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], named: Sequence[str]
) -> None:
    lines(tmp_path / "mixed.jsonl", *rows)
    with pytest.raises(UserError) as error:
        load_problems(f"mixed={tmp_path / 'mixed.jsonl'}", JudgingConfig())
    assert all(part in str(error.value) for part in ("mixed.jsonl", *named))


def test_forms_that_one_verifier_judges_may_be_mixed(tmp_path: Path) -> None:
    """Mathematics and short answers by ``exact``; anything by a verifier of the user's."""
    lines(tmp_path / "mixed.jsonl", MATHEMATICS, TRIVIA)
    spec = f"mixed={tmp_path / 'mixed.jsonl'}"
    (problems,) = load_problems(spec, JudgingConfig(verifier="exact"))
    assert (problems.verifier, len(problems.benchmark.records)) == ("exact", 2)
    own = tmp_path / "own.py"
    own.write_text("def right(response, row):\n    return 1.0\n")
    (problems,) = load_problems(spec, JudgingConfig(verifier=f"{own}:right"))
    assert problems.verifier == f"{own}:right"
