"""A predictor is applied to what it was fitted on, and to nothing else unless it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.data.prompts import confidence_instruction
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from megatron_dcpo.serving.calibrator import Calibrator, check_models, load_calibrator
from megatron_dcpo.serving.scorer import choose_threshold
from tests.helpers.serving import (
    CHAT,
    COMPLETION,
    FITTED_ON,
    QUESTION,
    halving,
    logistic,
    proxied,
    record,
    scorer_with,
)
from tests.helpers.upstream import chunks_of, events_of

NAMES = {"policy": ("policy", "/models/policy"), "other": ("other",)}


def calibrator(**fitted_on: Any) -> Calibrator:
    return Calibrator(halving(), replace(FITTED_ON, **fitted_on))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "other"),
        ({"model": None}, "model"),
        ({"temperature": 0.2}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"messages": [{"role": "user", "content": "2*3="}]}, "template"),
    ],
)
def test_a_request_unlike_the_fit_has_no_confidence(change: dict[str, Any], named: str) -> None:
    with proxied(scorer_with(logistic()), names=NAMES) as proxy:
        body = {**CHAT, **change}
        choice = proxy.choice(body)
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith("mismatch:")
        assert named in choice["confidence_reason"]
        assert choice["confidence_raw"] == 0.83, "what is stated is no less stated"
        assert proxy.upstream.asked[-1] == body, "and nothing is asked beside it"
    with proxied(scorer_with(logistic(None)), names=NAMES) as told:
        assert told.choice(body)["confidence"] is not None


def test_options_that_the_client_leaves_out_are_those_of_the_fit() -> None:
    body = calibrator(temperatures=(0.7,), top_ks=(20,)).completed({"top_p": None})
    assert body == {"temperature": 0.7, "top_p": 1.0, "top_k": 20}
    two = calibrator(temperatures=(0.7, 1.0))
    assert "temperature" not in two.completed({})
    assert "temperature" in two.mismatch({**CHAT, "top_p": 1.0}, "chat", {})
    assert two.mismatch({**CHAT, "top_p": 1.0, "temperature": 0.7}, "chat", {}) == ""
    assert Calibrator(halving(), None).completed({}) == {}


def test_every_name_of_the_upstream_is_the_models() -> None:
    by_root = calibrator(models=("/models/policy",))
    body = {**CHAT, "temperature": 1.0, "top_p": 1.0}
    assert by_root.mismatch(body, "chat", NAMES) == ""
    assert by_root.mismatch(body, "chat", {}) != ""
    assert by_root.mismatch({**body, "model": None}, "chat", NAMES) != ""
    only = {"policy": NAMES["policy"]}
    assert by_root.mismatch({**body, "model": None}, "chat", only) == ""
    check_models(by_root, "c.npz", NAMES)
    with pytest.raises(UserError, match=r"c\.npz.*elsewhere.*policy.*--accept-mismatch"):
        check_models(calibrator(models=("elsewhere",)), "c.npz", NAMES)


def test_a_directory_is_known_by_any_of_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path)
    here = calibrator(models=("policy",))
    body = {**CHAT, "model": "served", "temperature": 1.0, "top_p": 1.0}
    names = {"served": ("served", str(tmp_path / "policy"))}
    assert here.mismatch(body, "chat", names) == ""


def test_the_template_is_looked_for_in_each_prompt() -> None:
    fitted = calibrator()
    body = {**COMPLETION, "temperature": 1.0, "top_p": 1.0}
    two = {**body, "prompt": [QUESTION, "2*3="]}
    assert fitted.mismatch(body, "completions", {}) == ""
    assert "template" in fitted.mismatch(two, "completions", {})
    assert fitted.mismatch({**body, "prompt": [1, 2]}, "completions", {}) == ""
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url"}]
    spoken = {**CHAT, "messages": [{"role": "user", "content": parts}]}
    sampled = {"temperature": 1.0, "top_p": 1.0}
    assert fitted.mismatch({**spoken, **sampled}, "chat", {}) == ""
    other = confidence_instruction("2*3=", "<sure>")
    assert fitted.mismatch({**body, "prompt": other}, "completions", {}) != ""
    plain = calibrator(templates=("raw",), instructions=((),))
    assert plain.mismatch(body, "completions", {}) == ""
    assert "/v1/completions" in plain.mismatch({**CHAT, **sampled}, "chat", {})


def by_task() -> Posthoc:
    weights = {
        "mean": np.zeros(4),
        "deviation": np.ones(4),
        "slopes": np.zeros(4),
        "intercept": np.array(0.0),
        "tasks": np.array(["easy", "hard"]),
        "task_intercepts": np.array([2.0, -2.0]),
        "task_slopes": np.zeros(2),
    }
    return Posthoc("logistic", "task", MappingProxyType(weights), record())


def test_the_task_is_read_from_the_metadata() -> None:
    with proxied(scorer_with(by_task())) as proxy:
        easy = proxy.choice({**CHAT, "metadata": {"kind": "easy"}})
        hard = proxy.choice({**CHAT, "metadata": {"kind": "hard"}})
        assert easy["confidence"] == pytest.approx(1 / (1 + np.exp(-2)))
        assert hard["confidence"] == pytest.approx(1 / (1 + np.exp(2)))
        for metadata in (None, {}, {"kind": "unheard of"}, ["kind"]):
            choice = proxy.choice({**CHAT, "metadata": metadata})
            assert choice["confidence"] is None
            assert choice["confidence_reason"].startswith("no_task:")


@pytest.mark.parametrize("source", ["consistency", "posthoc"])
def test_what_one_answer_does_not_have_is_refused(tmp_path: Path, source: str) -> None:
    replace(halving(), source=source).save(tmp_path / "c.npz")
    with pytest.raises(UserError, match=source):
        load_calibrator(tmp_path / "c.npz", accept_mismatch=True)


def test_a_file_that_does_not_say_its_fit_is_refused_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    for nothing in (None, record(None)):
        replace(halving(), record=nothing).save(path)
        with pytest.raises(UserError, match=r"c\.npz.*dcpo calibrate.*--accept-mismatch"):
            load_calibrator(path)
        assert load_calibrator(path, accept_mismatch=True).fitted_on is None
    halving().save(path)
    assert load_calibrator(path).fitted_on == FITTED_ON
    halving(replace(FITTED_ON, markers=("<conf>", "<sure>"))).save(path)
    with pytest.raises(UserError, match="<sure>"):
        load_calibrator(path)


def test_an_older_release_reads_the_file(tmp_path: Path) -> None:
    """The header and the weights are where they were."""
    halving().save(tmp_path / "c.npz")
    with np.load(tmp_path / "c.npz") as file:
        header = json.loads(str(file["header"]))
        assert (header["method"], header["source"]) == ("isotonic", "verbal")
        assert {"x", "y"} <= set(file.files)


# ------------------------------------------------------------------------------------ the threshold


def test_an_answer_below_the_threshold_says_so() -> None:
    """Of the held-out answers those from .5 on are right, so that at a risk of a tenth those from
    .45 on are answered: 5 of 55 are wrong.
    """
    scorer = scorer_with(halving(), abstention="Better ask somebody.")
    threshold = choose_threshold(scorer.calibrator, "c.npz", 0.1)
    assert threshold.confidence == pytest.approx(0.45)
    assert threshold.risk == pytest.approx(5 / 55)
    assert threshold.low < threshold.risk < threshold.high
    with proxied(replace(scorer, threshold=threshold)) as proxy:
        below = proxy.choice(CHAT)
        assert below["confidence"] == pytest.approx(0.415)
        assert below["confidence_abstains"] is True
        text = below["message"]["content"]
        assert text == "2*3 is \\boxed{6}\n\n\nBetter ask somebody."
        events = chunks_of(events_of(proxy.post({**CHAT, "stream": True}).content))
        pieces = [event["choices"][0]["delta"]["content"] for event in events]
        assert "".join(pieces) == text
        proxy.upstream.says = lambda body, index: "\\boxed{6} <conf> 1.0"
        above = proxy.choice(CHAT)
        assert above["confidence_abstains"] is False
        assert above["message"]["content"] == "\\boxed{6} "
        proxy.upstream.says = lambda body, index: "\\boxed{6}"
        assert proxy.choice(CHAT)["confidence_abstains"] is None


def test_a_threshold_needs_held_out_answers_and_a_risk_that_can_be_had() -> None:
    with pytest.raises(UserError, match="--calibrator"):
        choose_threshold(None, "", 0.1)
    for risk in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="--abstain-above"):
            choose_threshold(Calibrator(halving(), None), "c.npz", risk)
    fitted_on_all = replace(
        record(), held_out_confidences=np.empty(0), held_out_correct=np.empty(0)
    )
    one = Calibrator(replace(halving(), record=fitted_on_all), None)
    with pytest.raises(UserError, match="--held-out"):
        choose_threshold(one, "c.npz", 0.1)
    wrong = replace(record(), held_out_correct=np.zeros(100))
    one = Calibrator(replace(halving(), record=wrong), None)
    with pytest.raises(UserError, match="100"):
        choose_threshold(one, "c.npz", 0.1)
