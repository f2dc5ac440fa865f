"""The verb `objective` on bad input: one clear line each. Its numbers are in the golden tests."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.cli import objective as verb
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Measures, Origin
from megatron_dcpo.objectives import worksheet
from megatron_dcpo.types import MALFORMED


def response(**more: Any) -> dict[str, Any]:
    row = {
        "prompt_id": "p",
        "correct": 1,
        "confidence": 0.5,
        "status": "ok",
        "boundary": 2,
        "length": 3,
        "version": 2,
    }
    return row | {"old_logprobs": [-1.0] * 3, "logprobs": [-1.0] * 3} | more


def group(*responses: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "method": "dcpo",
        "options": {},
        "responses": list(responses) or [response(), response(correct=0)],
    } | more


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (group(method="dcop"), "did you mean 'dcpo'"),
        (group(options={"lamb": 1}), "did you mean 'lam'"),
        (group(options={"lam": 2}), "lam: Input should be less than or equal to 1 (found 2)"),
        (group(options={"preset": "papr"}), "preset: Input should be 'paper'"),
        (group(options={"dual_clip": 0.5}), "dual_clip must be 0 (off) or greater than 1"),
        (group(options=[1]), "options must be an object"),
        (group(option={}), "did you mean 'options'"),
        (group(responses=[]), "non-empty list"),
        (group(response()), "at least 2"),
        (group(response(), response(status="okay")), "unknown status 'okay'; did you mean 'ok'"),
        (
            group(response(), response(logprobs=[1])),
            "responses[1]: logprobs must have one value for each of the 3 tokens",
        ),
        (group(response(), response(logprobs=[0, 0, float("inf")])), "finite"),
        (group(response(), response(logprobs=["a", 0, 0])), "finite"),
        (group(response(), response(confidence=1.5)), "responses[1]: confidence is 1.5"),
        (group(response(), response(confidence=None)), "'ok' with confidence None"),
        (group(response(), response(correct=2)), "responses[1]: correct is 2"),
        (group(response(), response(correct=10**400)), "responses[1]: correct"),
        (group(response(), response(length=-1)), "responses[1]: length is -1"),
        (group(response(), response(boundary=4)), "responses[1]: boundary"),
        (group(response(), response(version=3)), "responses[1]: version"),
        (group(response(), response(abstain=True)), "responses[1]: unknown key 'abstain'"),
        (group(response(abstain=True)), "did you mean 'abstained'"),
        (group(response(old_logprob=[-1.0] * 3)), "did you mean 'old_logprobs'"),
        (group(response(), {"prompt_id": "p"}), "responses[1]: correct is missing"),
        (group(options={"kl_coef": 0.1}), "kl_coef needs ref_logprobs"),
    ],
)
def test_bad_input_is_one_clear_line(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        worksheet.evaluate(bad)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000])
def test_unreadable_files(text: str, tmp_path: Path) -> None:
    source = tmp_path / "group.json"
    source.write_text(text)
    for path in (source, tmp_path / "absent.json", tmp_path):
        with pytest.raises(UserError):
            worksheet.read(str(path))


@pytest.mark.parametrize("status", [*MALFORMED, "range", "Out of range", "no-marker"])
def test_every_status_is_understood(status: str) -> None:
    result = worksheet.evaluate(group(response(), response(status=status, confidence=None)))
    assert result["R_c"][1] == -1.0


def test_several_prompts_in_response_order() -> None:
    rows = [response(prompt_id=p, correct=R) for p, R in (("a", 1), ("b", 0), ("a", 0), ("b", 0))]
    result = worksheet.evaluate(group(*rows, options={"lam": 1.0}))
    assert result["targets"] == [0.5, 0.0, 0.5, 0.0]


def test_absent_values_are_null_and_the_table_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = worksheet.evaluate(group(method="grpo"))
    assert result["targets"] == result["R_c"] == [None, None]
    source = tmp_path / "group.json"
    source.write_text(json.dumps(group(method="grpo")))
    assert verb.run(argparse.Namespace(input=str(source), json=False)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("loss ")


def test_reference_log_probs_may_be_given() -> None:
    rows = [response(ref_logprobs=[-1.1] * 3), response(correct=0, ref_logprobs=[-1.1] * 3)]
    with_kl = worksheet.evaluate(group(*rows, options={"kl_coef": 0.1}))["loss"]
    assert with_kl > worksheet.evaluate(group(*rows))["loss"]


def test_the_input_that_help_shows_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key that is read and every status stands in it, and the example is scored."""
    with pytest.raises(SystemExit):
        main(["objective", "--help"])
    text = capsys.readouterr().out
    example, keys = (text[text.index("{") : text.rindex("}") + 1], text[text.rindex("}") :])
    scored = worksheet.evaluate(json.loads(example))
    assert scored["R"] == [1.0, 0.0]
    assert {
        *worksheet.REQUIRED,
        *worksheet.PER_TOKEN,
        *worksheet.STATUSES,
        "confidence",
        "abstained",
    } <= set(re.findall(r"\w+", text))
    assert all(status in keys for status in worksheet.STATUSES)


def test_errors_of_form_point_to_the_help() -> None:
    with pytest.raises(UserError, match="dcpo objective --help shows an input"):
        worksheet.evaluate({"responses": [{"prompt_id": "p"}]})


def test_a_row_of_an_evaluation_is_an_input() -> None:
    """What it has beside the judgement is known by name, and not read."""
    fields = {field.name for kind in (Measures, Origin) for field in dataclasses.fields(kind)}
    assert fields <= set(worksheet.BESIDE_RECORDS)
    beside = {"text": "t", "task": "toy", "problem": "2+3", "kind": "sum", "sample_index": 0}
    rows = [response(**beside), response(**beside, correct=0)]
    assert worksheet.evaluate(group(*rows)) == worksheet.evaluate(group())
