"""The responses that a page shows: groups, what a reader looks for, tools and turns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.codec import VERSION
from megatron_dcpo.evaluation import shown_rollouts
from megatron_dcpo.evaluation.report import render_report
from megatron_dcpo.evaluation.runs import find_runs
from megatron_dcpo.evaluation.shown_rollouts import rollouts_of
from tests.helpers.evaluated import trained
from tests.helpers.paths import FIXTURES


def row(problem: str, correct: float, confidence: float | None, **more: Any) -> dict[str, Any]:
    return {
        "prompt_id": problem,
        "problem": problem,
        "ground_truth": "2",
        "correct": correct,
        "confidence": confidence,
        "text": "a<conf> b",
        **more,
    }


def test_groups_are_whole_and_the_largest_error_comes_first() -> None:
    rows = [row("p", 1, 0.9), row("q", 0, 0.95), row("p", 0, 0.3), row("q", 1, 0.9)]
    shown = rollouts_of(rows, "<conf>")
    assert [group.problem for group in shown.groups] == ["q", "p"]
    assert [len(group.responses) for group in shown.groups] == [2, 2]
    assert shown.of == 2
    assert "1 of 2 right" in shown.groups[1].facts
    assert "0.60" in shown.groups[1].facts


@pytest.mark.parametrize(
    ("correct", "confidence", "more", "tag"),
    [
        (0, 0.9, {}, "sure-wrong"),
        (0, 0.5, {}, ""),
        (1, 0.2, {}, "unsure-right"),
        (1, None, {"status": "missing"}, "malformed"),
        (1, 0.9, {"finish_reason": "length"}, "cut"),
        (0, 0.9, {"finish_reason": "abort"}, "sure-wrong cut"),
        (1, 0.9, {"finish_reason": "stop"}, ""),
    ],
)
def test_what_a_reader_looks_for(
    correct: float, confidence: float | None, more: dict[str, Any], tag: str
) -> None:
    (group,) = rollouts_of([row("p", correct, confidence, **more)], "<conf>").groups
    assert group.responses[0].tags == tag


def test_a_session_has_its_tools_its_turns_and_both_advantages() -> None:
    pieces = [
        ["[2*3]", "reasoning", 0.5],
        ["6", "other", 0.0],
        ["\\boxed{6}", "reasoning", 0.5],
        ["0.4", "confidence", -0.25],
    ]
    session = row("p", 1, 0.4, pieces=pieces, turn_confidences=[[1, 0.81], [2, None]])
    (group,) = rollouts_of([session | {"training_step": 7}], "<conf>").groups
    (response,) = group.responses
    assert [piece.text for piece in response.pieces] == [text for text, _, _ in pieces]
    assert response.pieces[1].title == "not sampled by the policy"
    facts = " | ".join(response.facts)
    for fact in ("R = 1", "says 0.40", "A reasoning +0.50", "A confidence -0.25", "turn 1: 0.81"):
        assert fact in facts
    assert "turn 2: none" in facts
    assert rollouts_of([session | {"training_step": 7}], "<conf>").step == 7


def test_a_token_on_which_engine_and_trainer_differ_says_by_how_much() -> None:
    pieces = [["1", "reasoning", 0.5], ["2", "reasoning", 0.5, 0.31], ["0.4", "confidence", -0.25]]
    (group,) = rollouts_of([row("p", 1, 0.4, pieces=pieces)], "<conf>").groups
    (response,) = group.responses
    assert [piece.apart for piece in response.pieces] == [None, 0.31, None]
    assert "0.31" in response.pieces[1].title


def test_a_page_holds_no_more_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(str(number), 0, number / 100) for number in range(100)]
    assert len(rollouts_of(rows, "<conf>").groups) == 40
    monkeypatch.setattr(shown_rollouts, "_CHARACTERS", 50)
    few = rollouts_of(rows, "<conf>")
    assert (len(few.groups), few.of) == (5, 100)
    assert len(rollouts_of([row("p", 0, 0.5, text="x" * 100)], "<conf>").groups) == 1


def test_the_page_of_a_group_and_of_a_session_of_three_segments_is_the_golden_one(
    tmp_path: Path,
) -> None:
    """``DCPO_WRITE_GOLDEN=1`` writes it anew, to be looked at in a browser."""
    group = [
        row("87*3=", 1, 0.84, pieces=[["162 \\boxed{261}", "reasoning", 0.58]], ground_truth="261"),
        row("87*3=", 0, 0.91, pieces=[["152 \\boxed{251}", "reasoning", -1.73]]),
        row("87*3=", 0, None, status="missing", finish_reason="length", text="162 <b>"),
    ]
    session = row(
        "49*76=",
        1,
        0.43,
        prompt_id="session",
        ground_truth="3724",
        contexts=[[0, 16], [6, 21], [12, 6]],
        turn_confidences=[[1, 0.85], [2, 0.22]],
        pieces=[
            ["[49*76]", "reasoning", 1.0, 0.42],
            ["4273", "other", 0.0],
            [" \\boxed{3724}\n<conf>", "reasoning", 1.0],
            [" Confidence: 0.43<|endoftext|>", "confidence", 0.52],
        ],
    )
    trained(tmp_path / "run")
    (tmp_path / "run" / "samples").mkdir()
    lines = [
        json.dumps({"version": VERSION, "training_step": 10, **one}) for one in (*group, session)
    ]
    (tmp_path / "run" / "samples" / "step_000010.jsonl").write_text("\n".join(lines) + "\n")
    page = render_report(find_runs([tmp_path / "run"]))
    shown = page[page.index('<section id="rollouts">') : page.index("</main>")]
    golden = FIXTURES / "rollouts.html"
    if os.environ.get("DCPO_WRITE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()
