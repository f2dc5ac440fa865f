"""The note after the answer: graphs and notes by their seeds, what a policy shows of a text, losses
by hand, the endpoints in their sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.fitted import LEAST_LOGPROB, Records
from lab.note import cells, reading, tables
from lab.note.arms import ARMS, CONTROLLED, log_odds, stacked
from lab.note.transcripts import (
    ASKS,
    OPENS,
    Seen,
    Transcripts,
    answer_of,
    note,
    world,
    write_problems,
)
from lab.results import write_archive
from tests.helpers.paths import REPOSITORY

POLICY = REPOSITORY / "examples" / "quickstart" / "policy"
PUBLISHED = REPOSITORY / "docs" / "lab"
FIT_SHA256 = "99a6a90962ff2b901b9b64e830823adbb0af9bbfd5d333767149ab5ef61cb24d"


def transcripts(problems: int = 3, repeats: int = 4, part: str = "fit") -> Transcripts:
    """Answers of which every second one is right, with their notes."""
    problem = np.repeat(np.arange(problems), repeats)
    count = len(problem)
    index = np.tile(np.arange(repeats), problems)
    truth = [str(10 + number) for number in problem]
    box = [right if row % 2 else "99" for row, right in enumerate(truth)]
    rng = np.random.default_rng(0)
    return Transcripts(
        part=part,
        records=Records(
            problem=problem,
            kind=np.array([str(number % 2) for number in problem]),
            correct=np.arange(count) % 2.0,
            confidence=np.full(count, np.nan),
            logprob=-rng.random(count),
            tokens=np.full(count, 20.0),
        ),
        index=index,
        question=tuple(f"q{number}=" for number in problem),
        answer=tuple(f"Ab \\boxed{{{number}}}" for number in box),
        box=tuple(box),
        note=tuple(
            note(right, f"{part}/{number}/{place}", 0.2)
            for right, number, place in zip(truth, problem, index, strict=True)
        ),
    )


def seen(of: Transcripts) -> Seen:
    rng = np.random.default_rng(1)
    return Seen(
        transcripts=of,
        note_logprob=-rng.random(len(of)),
        box_logprob=-rng.random(len(of)),
        state=rng.normal(size=(len(of), 3)),
    )


def test_the_seed_makes_the_graphs_to_fit_and_no_split_has_one(tmp_path: Path) -> None:
    write_problems(tmp_path)
    assert hashlib.sha256((tmp_path / "fit.jsonl").read_bytes()).hexdigest() == FIT_SHA256
    names = world()
    rows = [json.loads(line) for line in (tmp_path / "fit.jsonl").read_text().splitlines()]
    keys = {names["key"](names["parse"](row["problem"])) for row in rows}
    assert len(keys) == 3000
    for split in names["SPLITS"]:
        assert not keys & {names["key"](problem) for problem in names["read_split"](split)}
    for row in rows[:100]:
        assert names["question"](names["parse"](row["problem"]))[1:] == (row["answer"], row["type"])


def test_a_note_is_wrong_in_one_digit_at_its_rate() -> None:
    names = [f"test/{number}/0" for number in range(4000)]
    wrong = {name for name in names if note("37", name, 0.2) != "37"}
    assert len(wrong) / len(names) == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / 4000))
    for name in names[:500]:
        number = note("37", name, 0.2)
        assert sum(a != b for a, b in zip(number, "37", strict=True)) == (name in wrong)
    shifted = {name: note("37", name, 0.4) for name in names}
    assert all(shifted[name] == note("37", name, 0.2) for name in wrong)
    assert sum(number != "37" for number in shifted.values()) / 4000 == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AbBa \\boxed{3}\n<conf> Confidence: 0.83", ("AbBa \\boxed{3}", "3")),
        ("AbBa \\boxed{3} more", ("AbBa \\boxed{3}", "3")),
        ("Ab \\boxed{3} \\boxed{4}\n", ("Ab \\boxed{3} \\boxed{4}", "4")),
        ("AbBa\n<conf> \\boxed{3}", ("AbBa", "")),
        ("AbBa \\boxed{3", ("AbBa \\boxed{3", "")),
    ],
)
def test_an_answer_ends_behind_its_box(text: str, expected: tuple[str, str]) -> None:
    assert answer_of(text) == expected


def test_texts_and_changes_of_notes_and_answers() -> None:
    some = transcripts()
    assert some.asking[1] == f"q0=Ab \\boxed{{10}}{OPENS}{some.note[1]}{ASKS}"
    assert some.without_notes().asking[1] == f"q0=Ab \\boxed{{10}}{ASKS}"
    others = some.with_notes_of_another_problem()
    assert others.note == (*some.note[4:], *some.note[:4])
    assert others.answer == some.answer
    rows, places = cells.first_right_and_wrong(some)
    assert rows.tolist() == [1, 5, 9, 0, 4, 8]
    before = some.chosen(rows)
    after = before.with_answers_of(places)
    assert after.note == before.note
    assert after.box == ("99", "99", "99", "10", "11", "12")
    assert before.chosen(before.records.correct == 1).box == ("10", "11", "12")


def test_a_policy_shows_the_same_of_a_text_whatever_is_beside_it() -> None:
    policy = reading.Policy(POLICY)
    before, texts = ["12*34=", "7*8=1 \\boxed{"], ["408", "6}"]
    found = policy.logprobs(before, texts)
    for number, (first, second) in enumerate(zip(before, texts, strict=True)):
        ids = policy.tokenizer(first + second, return_tensors="pt")["input_ids"]
        logprobs = policy.model(ids).logits[0].log_softmax(-1)
        places = range(ids.shape[1] - len(second), ids.shape[1])
        expected = sum(logprobs[place - 1, ids[0, place]].item() for place in places)
        assert found[number] == pytest.approx(expected, abs=1e-4)
        np.testing.assert_allclose(
            policy.states(before)[number], policy.states([first])[0], atol=1e-4
        )


def test_what_is_seen_has_no_log_prob_without_a_note_or_a_box() -> None:
    policy = reading.Policy(POLICY)
    some = transcripts(problems=2, repeats=1)
    some = some.with_answers_of(np.array([0, 0]))
    shown = policy.seen(some)
    assert (shown.note_logprob < 0).all()
    assert (shown.box_logprob < 0).all()
    none = policy.seen(some.without_notes())
    assert none.note_logprob.tolist() == none.box_logprob.tolist() == [LEAST_LOGPROB] * 2


def test_the_number_is_what_the_policy_writes() -> None:
    policy = reading.Policy(POLICY)
    asking = [f"12*34=804 \\boxed{{408}}{ASKS}", f"7*8=65 \\boxed{{56}}{ASKS}"]
    written = policy.written(asking)
    assert ((written >= 0) & (written <= 1)).all()
    assert written[1] == policy.written(asking[1:])[0]
    assert np.isnan(policy.written(["12*34="])).all()


def test_a_reader_begins_as_a_line_on_the_frozen_state_and_learns() -> None:
    some = transcripts(problems=8)
    reader = reading.Reader(POLICY)
    with torch.no_grad():
        reader.line.weight.fill_(0.1)
    states = reading.Policy(POLICY).states(some.asking)
    np.testing.assert_allclose(reader.logits(some.asking), 0.1 * states.sum(axis=1), atol=1e-4)
    lesson = reading.Lesson(
        texts=some.asking,
        correct=some.records.correct,
        problem=some.records.problem,
        loss=reading.cross_entropy,
    )
    rows = lesson.steps(np.random.default_rng(0))
    assert sorted(np.concatenate(rows)) == list(range(32))
    learned = reading.fitted(POLICY, lesson, 1e-2).logits(some.asking)
    assert learned[some.records.correct == 1].mean() > learned[some.records.correct == 0].mean()


def test_pairs_are_within_problems() -> None:
    """-log sigmoid of 2 - 1 and of 2 - 0; the right answer of problem 1 has no partner."""
    loss = reading.pairs_within_problems(
        torch.tensor([2.0, 1.0, 0.0, 5.0]),
        torch.tensor([1.0, 0.0, 0.0, 1.0]),
        torch.tensor([0, 0, 0, 1]),
    )
    assert loss.item() == pytest.approx((np.log1p(np.exp(-1)) + np.log1p(np.exp(-2))) / 2)


@pytest.fixture(scope="module")
def fit() -> Seen:
    return seen(transcripts(problems=60))


@pytest.mark.parametrize("name", ARMS)
def test_arms_state_probabilities_of_other_answers(name: str, fit: Seen) -> None:
    test = seen(transcripts(problems=20, repeats=8, part="test"))
    stated = ARMS[name](fit)(test)
    assert stated.shape == (160,)
    assert ((stated >= 0) & (stated <= 1)).all()
    correct = test.correct
    apart = stated[correct == 1].mean() - stated[correct == 0].mean()
    if "equality" in name:
        assert apart > 0.5
    if name == "question only":
        assert np.ptp(stated.reshape(20, 8), axis=1).max() == 0
    assert set(CONTROLLED) < set(ARMS)


def test_what_is_stated_is_added_to_the_bar(fit: Seen) -> None:
    given = np.where(fit.correct == 1, 0.9, 0.2)
    stated = stacked(fit, given)(fit, given)
    assert np.mean((stated - fit.correct) ** 2) < 0.02
    assert log_odds(np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx(
        [-np.log(199), 0, np.log(199)]
    )


def numbers(seed: int, of: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Any:
    """A pretraining's record: 200 problems, 8 answers; ``of`` says what readers state."""
    rng = np.random.default_rng(seed)
    correct = np.tile([1, 1, 1, 0, 0, 0, 0, 0], 200)
    by_bar = np.clip(0.3 + 0.3 * correct + rng.normal(0, 0.1, 1600), 0.01, 0.99)
    by_equality = np.clip(0.1 + 0.8 * correct + rng.normal(0, 0.02, 1600), 0.01, 0.99)
    stated = of(correct, rng)
    names = ("bar", "bar + log p(note)", "generic", "bar + equality", "stated", "reader")
    values = (by_bar, by_bar, by_bar, by_equality, stated, by_bar)
    arms = dict(zip(names, map(np.ndarray.tolist, values), strict=True))
    arms |= {"bar + stated": arms["stated"], "bar + reader": arms["bar"]}
    before = np.concatenate([np.full(200, 0.9), np.full(200, 0.2)])
    return {
        "commit": "c",
        "started": "s",
        "problem": np.repeat(np.arange(200), 8).tolist(),
        "correct": correct.tolist(),
        "unread": 0.0,
        "arms": arms,
        "shifted": {"bar": arms["bar"]},
        "controls": {
            change: {"generic": arms["generic"]} for change in ("another problem's note", "no note")
        },
        "swaps": {
            "problem": [*range(200), *range(200)],
            "stated": [before.tolist(), np.roll(before, 200).tolist()],
            "reader": [before.tolist(), before.tolist()],
        },
    }


@pytest.mark.parametrize(
    ("of", "holds"),
    [
        (lambda y, rng: np.clip(0.1 + 0.8 * y + rng.normal(0, 0.02, len(y)), 0, 1), 6),
        (lambda y, rng: np.clip(0.25 + 0.5 * y + rng.normal(0, 0.02, len(y)), 0, 1), 2),
        (lambda y, rng: np.full(len(y), 0.5), 0),
    ],
)
def test_endpoints_hold_in_their_sequence(
    tmp_path: Path, of: Callable[[np.ndarray, np.random.Generator], np.ndarray], holds: int
) -> None:
    files = {f"graphs.{n}.json": json.dumps(numbers(n, of)).encode() for n in (1, 2, 3)}
    write_archive(tmp_path / tables.RECORDS, files)
    found = tables.tables(tmp_path / tables.RECORDS, tmp_path)
    claim = found["claims"]["stated"]
    assert claim["holds"] == holds
    assert claim["intervals"]["share of swaps"] == [1, 1, 1]
    assert found["claims"]["reader"]["intervals"]["share of swaps"] == [0.5, 0.5, 0.5]
    assert found["claims"]["reader"]["holds"] == 0
    assert found["mixed"] == [200, 200, 200]
    average = found["arms"][tables.AVERAGED]
    assert average["auroc_within_problem"] == [0.5, 0.5, 0.5]
    assert found["controls"]["no note"]["generic"][0] == 0
    assert "graphs.1, graphs.2, graphs.3" in (tmp_path / "note_tables.md").read_text()


def test_the_confidence_is_all_that_the_stated_arm_samples(tmp_path: Path) -> None:
    study = cells.Study(tmp_path)
    command = study.stated_command(tmp_path / "run", tmp_path / "out", 1e-3)
    assert {
        "objective.preset=dcpo_proper",
        "objective.weight_reasoning=0",
        "training.steps=2000",
        f"data.path={tmp_path / 'out' / 'transcripts.jsonl'}",
    } <= set(command)


@pytest.mark.slow
def test_every_arm_states_a_number_for_every_answer_to_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "EPOCHS", 1)
    monkeypatch.setattr(
        cells.Study,
        "transcripts",
        lambda self, run, part, error_rate=0.2: transcripts(30, cells.REPEATS[part], part),
    )
    study = cells.Study(tmp_path, learned=20)
    for name in cells.PRETRAININGS[:2]:
        run = tmp_path / "cells" / name / "grpo" / "seed1"
        run.mkdir(parents=True)
        (run / "policy").symlink_to(POLICY)
        found = {"commit": "", "started": "", **study.numbers(run, POLICY)}
        assert set(ARMS) | {"stated", "bar + reader", "reader, pairs"} < set(found["arms"])
        assert {len(values) for values in found["arms"].values()} == {240}
        assert len(found["swaps"]["reader"][0]) == len(found["swaps"]["problem"]) == 60
        (run / cells.NUMBERS).write_text(json.dumps(found))
    assert study.pack(tmp_path / tables.RECORDS) == 2
    result = tables.tables(tmp_path / tables.RECORDS, tmp_path)
    assert result["mixed"] == [30, 30]
    assert set(result["controls"]["no note"]) == {*CONTROLLED, "reader"}


@pytest.mark.slow
def test_the_published_tables_are_those_of_the_published_records(tmp_path: Path) -> None:
    tables.tables(PUBLISHED / tables.RECORDS, tmp_path)
    for name in ("note.json", "note_tables.md"):
        assert (tmp_path / name).read_text() == (PUBLISHED / name).read_text()
