"""Answers to questions: normalized texts with aliases, F1 of words, letters of options; what is no
answer at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.data.datasets import Record
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.abstention import is_abstention, normalize
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.option_letters import chosen_letter
from megatron_dcpo.judging.questions import (
    f1,
    normalize_triviaqa,
    question_verifier,
    same_answer,
    same_choice,
)
from megatron_dcpo.judging.verifiers import check_problems, verifier_for, verifiers
from megatron_dcpo.training.sources import load_sources
from megatron_dcpo.types import Prompt, Response
from tests.helpers.judging import judge_many
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer
from tests.unit.data.test_questions import HOTPOT, MMLU, TRIVIA, lines

ALIASES = {"answer": ["T. S. Eliot", "Eliot", "The Old Possum"]}


def correct(name: str, answer: str | None, truth: str, row: Any = None, **options: Any) -> bool:
    verify = question_verifier(name, JudgingConfig(verifier=name, **options))
    return verify([Attempt(answer, truth, "", row)])[0].correct


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel\tTower.", "eiffel tower"),
        (r"\text{An apple}", "apple"),
        ("New~York", "new york"),
        ("U.S.", "us"),
        ("Andy Warhol's theatre", "andy warhols theatre"),
        ("Andy Warhol\u2019s", "andy warhol\u2019s"),  # ASCII's punctuation only
        ("Spider-Man", "spiderman"),
        ("1,000", "1000"),
        ("The", "the"),  # nothing would be left
        ("?!", "?!"),
    ],
)
def test_texts_are_compared_as_squad_does(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Spider-Man", "spider man"),
        ("AC/DC", "ac dc"),
        ("U.S.A.", "u s"),  # its "a" is an article
        ("1,000", "1 000"),
        ("Andy Warhol\u2019s", "andy warhol s"),
        ("The_Beatles", "beatles"),
        (r"\text{An apple}", "apple"),
        ("The", "the"),
    ],
)
def test_texts_of_triviaqa_are_compared_as_its_script_does(text: str, normal: str) -> None:
    assert normalize_triviaqa(text) == normal


def test_the_comparison_is_that_of_the_data() -> None:
    trivia = {"answer": {"Value": "AC/DC", "Aliases": ["AC/DC"]}}
    assert correct("exact", "AC DC", "AC/DC", trivia)
    assert not correct("exact", "ACDC", "AC/DC", trivia)
    assert correct("f1", "AC DC", "AC/DC", trivia)
    assert correct("exact", "ACDC", "AC/DC", {"answer": ["AC/DC"]})
    assert not correct("exact", "AC DC", "AC/DC", {"answer": ["AC/DC"]})
    humans = {"answer": {"Aliases": ["x"], "HumanAnswers": ["AC/DC"]}}
    assert correct("exact", "ac dc", "x", humans)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("t.s. eliot", False),  # "ts eliot": as SQuAD
        ("T. S. Eliot.", True),
        (r"\text{Eliot}", True),
        ("old possum", True),
        ("George Eliot", False),
        ("", False),
        (None, False),
    ],
)
def test_exact_takes_any_alias(answer: str | None, right: bool) -> None:
    assert correct("exact", answer, "T. S. Eliot", ALIASES) is right


def test_exact_without_a_list_is_the_ground_truth() -> None:
    assert correct("exact", "paris", "Paris")
    assert not correct("exact", "paris", "Rome", {"answer": 3})
    assert correct("exact", "eliot", "T. S. Eliot", {"answer": TRIVIA["answer"]})


def test_f1_is_of_the_best_alias_and_right_from_the_threshold_on() -> None:
    """ "the cat sat" against "cat sat down": 2 of 2 and 2 of 3 words, 2 * 2 / 5 = 0.8."""
    assert f1("the cat sat", "cat sat down") == pytest.approx(0.8)
    assert f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert f1("yes it is", "yes") == 0.0, "as HotpotQA"
    assert f1("Yes.", "yes") == 1.0
    assert not correct("f1", "the cat sat", "cat sat down")
    assert correct("f1", "the cat sat", "cat sat down", threshold=0.8)
    assert correct("f1", "The cat sat", "dog", {"answer": ["dog", "a cat sat"]})
    graded = question_verifier("f1", JudgingConfig(verifier="f1", threshold=0.5, graded=True))
    half, none = graded([Attempt("cat", "cat sat down"), Attempt(None, "cat")])
    assert (half.correct, half.score, half.logged) == (True, 0.5, {"score": 0.5})
    assert (none.correct, none.score) == (False, 0.0)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        (r"\text{B}", "B"),
        (r"\textbf{(b)}", "B"),
        ("Option B", "B"),
        ("-5", "B"),
        ("$-5$", "B"),
        ("B. -5", "B"),
        ("(B) -5", "B"),
        ("A. -5", None),  # letter and text name two options
        ("5", "A"),
        ("Both of them", "C"),
        ("E", None),  # there is no fifth option
        ("7", None),
        ("A or B", None),
        ("", None),
    ],
)
def test_the_letter_or_the_text_of_an_option(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer, ["5", "-5", "both of  them.", "x"]) == letter


OPTIONS = ["Paris", "Rome", "a dog", "3.5 m"]


@pytest.mark.parametrize(
    "answer",
    [
        *(r"\textbf{(B)}\ Rome", r"\text{(B) }Rome", r"\textbf{B. }Rome", r"\mathrm{(B)}"),
        *(r"\textbf{(B) Rome}", r"\boxed{\textbf{(B)}}", r"\underline{B}", r"\(B\)", r"B\)"),
        *(
            r"\textcolor{red}{B}",
            r"B\quad Rome",
            r"\left(B\right)",
            "$B$",
            "{B}",
            "\uff08\uff22\uff09",
        ),
        *(
            "B ) Rome",
            "B) Rome",
            "B)Rome",
            "B: Rome",
            "B:Rome",
            "B - Rome",
            "B \u2013 Rome",
            "B-Rome",
        ),
        *("Option B: Rome", "Option B", "Choice (b)", "**B**", "**B**: Rome", "**B) Rome**"),
        *("[B]", "<B>", "`B`", "\u201cB\u201d", "B,  rome", "B (Rome)", "B = Rome", "B -> Rome"),
        *("The answer is B", "The correct answer is (B).", "the best answer is B: Rome"),
        *("Answer: B", "My answer: B", "So the answer is option B.", "The answer is Rome"),
        *("(B) is the correct answer", "Option B is correct", "B) Rome, because it is older"),
    ],
)
def test_letters_as_people_and_models_write_them(answer: str) -> None:
    assert chosen_letter(answer, OPTIONS) == "B"
    assert correct("choice", answer, "B", {"options": OPTIONS})
    assert not correct("choice", answer, "A", {"options": OPTIONS})


@pytest.mark.parametrize(
    "answer",
    [
        *("A - Rome", "B) Paris", "B. a dog", "B 3.5 m"),  # two options
        *("A or B", "A, B", "A/B", "AB", "B and C", "Option A or B", "A. B", "Options B"),
        *("B) Rome and A) Paris", "B) Rome or Paris", "not B", "neither", "E", "E) Rome is not"),
        *("Boston", "bread", "b-movie", "i.e. Rome", "e.g. Rome", "A-frame", "a big house"),
        *("D) 3", "D) -3.5 m", "B) 4", "", "\\text{}", "()", "**"),
    ],
)
def test_no_letter_and_two_letters(answer: str) -> None:
    assert chosen_letter(answer, OPTIONS) is None


@pytest.mark.parametrize(
    ("answer", "options", "letter"),
    [
        (r"\textbf{(B)}\ 4", ["3", "4"], "B"),
        ("B) $4$", ["3", "$4$"], "B"),
        (r"\textbf{(D)}~\frac{1}{2}", ["1", "2", "3", r"$\frac{1}{2}$"], "D"),
        ("(B) -5", ["5", "-5"], "B"),
        ("(A) -5", ["5", "-5"], None),
        ("A - 5", ["5", "-5"], "A"),
        ("C) both", ["one", "two", "both of them"], "C"),
        ("a dog", ["cat", "a dog"], "B"),
        (r"\textbf{(B)}\ \frac12", ["1", r"$\frac{1}{2}$"], "B"),
        ("1/2", ["1", r"$\frac{1}{2}$"], "B"),
        (r"2\sqrt3", ["3", r"$2\sqrt{3}$"], "B"),
        ("B) 0.50", ["0.5", "0.05"], None),
        ("B) 3.5", ["3.5", "35"], None),
        ("A) 35", ["3.5", "35"], None),
        ("B) jewelry-store", ["bank", "jewelry store"], "B"),
        ("Jewelry Store!", ["bank", "jewelry store"], "B"),
        ("B) It is Rome", ["Paris", "Rome"], "B"),
        ("B) It is not Rome", ["Paris", "Rome"], None),
        ("B) Rome, not Paris", ["Paris", "Rome"], None),
        ("B) Rome or Milan", ["Paris", "Rome"], None),
        ("B) Romeo", ["Paris", "Rome"], None),
        ("B) Rome, which is old and not far", ["Paris", "Rome"], "B"),
        ("x^2", ["x2", "x^2"], "B"),
        ("A) x^2", ["x2", "x^2"], None),
        ("true", ["True", "False"], "A"),
        ("A) yes", ["yes", "yes"], "A"),
    ],
)
def test_letters_next_to_texts(answer: str, options: list[str], letter: str | None) -> None:
    assert chosen_letter(answer, options) == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("B. Rome", "B"),
        ("Answer: (b)", "B"),
        ("B Rome", None),
        ("B) Rome and A) Paris", None),
        ("A. B", None),
        ("a dog", None),
    ],
)
def test_letters_without_options(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer, ()) == letter


def test_a_choice_is_read_from_the_box() -> None:
    row = {"options": ["Paris", "Rome"], "answer": "B"}
    assert [correct("choice", a, "B", row) for a in ("B", "rome", "A", "Paris", "C", None)] == [
        *(True, True),
        *(False, False, False, False),
    ]
    assert correct("choice", "(b)", "B"), "without options"
    twice = {"options": ["x", "x"], "answer": "B"}
    assert not correct("choice", "x", "B", twice), "a text that two options have names neither"


def test_repeats_agree_by_letter_or_text() -> None:
    assert same_answer("(B)", "b")
    assert same_answer("The Beatles", "beatles")
    assert not same_answer("A", "B")
    assert not same_answer("M. Night Shyamalan", "M. Butterfly")
    assert same_choice("B. Rome", r"\textbf{(B)}")
    assert not same_choice("A. Paris", "B. Rome")


@pytest.mark.parametrize(
    "text",
    [
        "I don't know",
        "I don’t know.",
        r"\text{I do not know}",
        "i dont know",
        "IDK",
        "Unknown",
        "I'm not sure",
    ],
)
def test_what_says_that_it_does_not_know_abstains(text: str) -> None:
    assert is_abstention(text)


@pytest.mark.parametrize(
    "text", ["", None, "I know", "don't", "5", "the unknown soldier", "I don't know " * 20]
)
def test_answers_are_no_abstentions(text: str | None) -> None:
    assert not is_abstention(text)


def test_the_judge_reads_the_abstention_in_the_box() -> None:
    def judged(text: str, truth: str) -> Any:
        response = Response("p", 0, [], [], "stop", 0, text=text)
        verifier, form = verifiers(JudgingConfig(verifier="exact"), {})("exact")
        return judge_many(
            [response], {"p": Prompt("p", (), (), truth, "")}, verifier=verifier, form=form
        )[0]

    said = judged("Hm. \\boxed{I don't know}\n<conf> Confidence: 0.1", "Paris")
    assert (said.abstained, said.correct, said.confidence, said.answered) == (True, 0.0, 0.1, True)
    assert not judged("I don't know \\boxed{Rome}\n<conf> 0.1", "Paris").abstained
    unknown = judged("\\boxed{unknown}\n<conf> 0.1", "Unknown")
    assert (unknown.correct, unknown.abstained) == (1.0, False), "an answer that is right is one"


@pytest.mark.parametrize(
    ("form", "named", "registered", "verifier"),
    [
        ("choice", "math", True, "choice"),
        ("choice", "f1", True, "choice"),
        ("short", "math", True, "exact"),
        ("short", "choice", True, "exact"),
        ("short", "f1", True, "f1"),
        ("math", "choice", True, "math"),  # math500 while training on options
        ("math", "exact", False, "exact"),  # a file of one's own
        ("math", "math", False, "math"),
        ("short", "own.py:verify", True, "own.py:verify"),
    ],
)
def test_the_verifier_of_a_benchmark(
    form: str, named: str, registered: bool, verifier: str
) -> None:
    assert verifier_for(form, named, registered) == verifier


def sources(tmp_path: Path, row: Any, *overrides: str) -> Any:
    path = lines(tmp_path / "rows.jsonl", row)
    more = (f"data.path={path}", "data.template=paper", "data.max_prompt_length=2000", *overrides)
    return load_sources(load_config(QUICKSTART / "dcpo.yaml", list(more)), ByteTokenizer())


def test_questions_are_trained_on_with_their_verifier(tmp_path: Path) -> None:
    (source,) = sources(tmp_path, MMLU, "judging.verifier=choice", "data.order=question_id")
    (prompt,) = source.prompts
    assert (prompt.ground_truth, prompt.row["options"]) == ("E", MMLU["options"])
    assert "the letter of the right option" in prompt.messages[-1]["content"]
    (source,) = sources(
        tmp_path, HOTPOT, "judging.verifier=f1", "judging.threshold=0.6", "judging.graded=true"
    )
    assert source.prompts[0].row == {"answer": HOTPOT["answer"]}
    (source,) = sources(
        tmp_path, {"problem": "?", "answer": ["a b", "c"]}, "judging.verifier=exact"
    )
    assert source.prompts[0].row == {"answer": ["a b", "c"]}


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        (MMLU, (), r"\b1 .*judging\.verifier=choice"),
        (TRIVIA, (), r"judging\.verifier=exact.*f1"),
        (
            {"problem": "?", "answer": "42"},
            ("judging.verifier=choice",),
            r"rows/0: .*judging\.verifier=choice.*'42'",
        ),
        (
            {"problem": "?", "answer": []},
            ("judging.verifier=exact",),
            r"rows\.jsonl: no problem with an answer",
        ),
        (MMLU, ("judging.verifier=choice", "judging.graded=true"), r"judging\.graded.*f1"),
        (MMLU, ("judging.verifier=choise",), "did you mean 'choice'|did you mean choice"),
    ],
)
def test_data_for_another_verifier_is_refused(
    row: Any, overrides: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        sources(tmp_path, row, *overrides)


def test_records_are_checked_as_prompts_are() -> None:
    with pytest.raises(UserError, match=r"f: t/0: judging\.verifier=choice"):
        check_problems("choice", [Record("t", 0, (), "x")], "f")
    check_problems("choice", [Record("t", 0, (), "A")], "f")
    check_problems("math", [Record("t", 0, (), "")], "f")


def test_dcpo_judge_takes_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prediction": "So \\boxed{eliot}\n<conf> 0.8", "reference": ["T. S. Eliot", "Eliot"]}]
    rows += [{"prediction": "eliot", "reference": "Eliot"}]
    pairs = lines(tmp_path / "pairs.jsonl", *rows)
    assert main(["judge", "--pairs", str(pairs), "--verifier", "exact"]) == 0
    assert capsys.readouterr().out == "2 predictions, 1 correct, 0 unjudged\n"
