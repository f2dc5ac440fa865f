r"""Is the boxed answer to a question right? ``exact``, ``f1``, ``choice``; and does it say that it
is not known?

``exact``   one of the accepted texts, as SQuAD compares them (:func:`normalize`) ``f1``      the
largest F1 of the words against any accepted text; right from ``judging.threshold`` on ``choice``
the letter of the right option, or its text

What is accepted is the row's ``answer`` where that is a list or TriviaQA's object
(``data.questions.accepted_texts``), else the ground truth. No box is wrong.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.questions import accepted_texts, letter_index
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import Attempt, Outcome

ABSTENTIONS = frozenset(
    f"{who}{what}"
    for who, whats in {
        "": ("dont know", "do not know", "idk", "unknown", "not sure", "unsure"),
        "i ": ("dont know", "do not know", "am not sure", "am unsure"),
        "im ": ("not sure", "unsure"),
    }.items()
    for what in whats
)
_LONGEST_ABSTENTION = 80  # characters
_TEX_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + "‘’´“”")
_LETTER = re.compile(r"(?:option\s+)?\(?([A-Za-z])\)?[.:)]?")
_LETTER_AND_TEXT = re.compile(r"\(?([A-Za-z])[.:)]+\s*(\S.*)", re.DOTALL)


def normalize(text: str) -> str:
    """Return the text as SQuAD, HotpotQA and TriviaQA compare it: lower case, without punctuation,
    articles and repeated white space; TeX's text commands give their content.
    """
    plain = _TEX_TEXT.sub(r"\1", text).replace("~", " ").lower().translate(_PUNCTUATION)
    return (
        " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
        or text.strip().lower()
    )


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the normalized words, as SQuAD counts
    them; yes and no, as HotpotQA has it, are right or wrong.
    """
    given, wanted = normalize(answer).split(), normalize(truth).split()
    if given != wanted and (given in _NO_PARTS or wanted in _NO_PARTS):
        return 0.0
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


_NO_PARTS = (["yes"], ["no"], ["noanswer"])


def chosen_letter(answer: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer names: by its letter, by its text, or by both;
    None where it names none, or the two differ. ``options`` may be empty: then any letter counts.
    """
    answer = _option_text(answer)
    letter = _LETTER.fullmatch(answer)
    if letter and (
        not options or letter[1].upper() in string.ascii_uppercase[: len(options)]
    ):
        return letter[1].upper()
    texts = [_option_text(option) for option in options]
    both = _LETTER_AND_TEXT.fullmatch(answer)
    if (
        both
        and (place := letter_index(both[1].upper())) is not None
        and texts[place : place + 1] == [both[2]]
    ):
        return both[1].upper()
    return (
        string.ascii_uppercase[texts.index(answer)]
        if texts.count(answer) == 1
        else None
    )


def _option_text(text: str) -> str:
    """Return the text of an option without what TeX adds; punctuation stays: -5 and 5 may both be
    options.
    """
    return " ".join(
        _TEX_TEXT.sub(r"\1", text).strip().strip("$").lower().split()
    ).removesuffix(".")


def is_abstention(answer: str | None) -> bool:
    """Return whether the content of a box says that the answer is not known."""
    return (
        answer is not None
        and len(answer) <= _LONGEST_ABSTENTION
        and normalize(answer) in ABSTENTIONS
    )


def same_answer(a: str, b: str) -> bool:
    """Return whether two answers to one question are the same text, or the same letter."""
    return normalize(a) == normalize(b) or (chosen_letter(a, ()) or a) == (
        chosen_letter(b, ()) or b
    )


# ---------------------------------------------------------------------------------------- verifiers


def _score_exact(attempt: Attempt, answer: str) -> float:
    given = normalize(answer)
    return float(
        any(given == normalize(text) for text in _accepted(attempt.truth, attempt.row))
    )


def _score_f1(attempt: Attempt, answer: str) -> float:
    return max(
        (f1(answer, text) for text in _accepted(attempt.truth, attempt.row)),
        default=0.0,
    )


def _score_choice(attempt: Attempt, answer: str) -> float:
    options = (attempt.row or {}).get("options")
    listed = [str(option) for option in options] if isinstance(options, list) else []
    return float(chosen_letter(answer, listed) == attempt.truth.strip())


SCORES: Mapping[str, Callable[[Attempt, str], float]] = {
    "exact": _score_exact,
    "f1": _score_f1,
    "choice": _score_choice,
}


def question_verifier(
    name: str, options: JudgingConfig
) -> Callable[[Sequence[Attempt]], list[Outcome]]:
    """Return the verifier (``judge.Verifier``) of a name in :data:`SCORES`."""
    threshold = options.threshold if name == "f1" else 1.0

    def verify(attempts: Sequence[Attempt]) -> list[Outcome]:
        outcomes = []
        for attempt in attempts:
            score = (
                0.0 if attempt.answer is None else SCORES[name](attempt, attempt.answer)
            )
            graded = score if options.graded and name == "f1" else None
            outcomes.append(
                Outcome(
                    score >= threshold,
                    None,
                    graded,
                    {"score": score} if name == "f1" else None,
                )
            )
        return outcomes

    return verify


def check_questions(name: str, problems: Iterable[Any], source: str) -> None:
    """Raise :class:`UserError` for the first of the problems (records or prompts) that the verifier
    ``name`` cannot judge: without an accepted text, or without a letter.
    """
    for problem in problems if name in SCORES else ():
        truth = str(
            getattr(problem, "ground_truth", None) or getattr(problem, "answer", "")
        )
        where = f"{source}: {problem.prompt_id}"
        if name == "choice" and letter_index(truth) is None:
            raise UserError(
                f"{where}: judging.verifier=choice needs a capital letter as answer, got "
                f"{truth!r:.60}"
            )
        if name != "choice" and not _accepted(truth, problem.row):
            raise UserError(
                f"{where}: judging.verifier={name} needs a text, or a list of texts, as answer; "
                "found none"
            )


def _accepted(truth: str, row: Mapping[str, Any] | None) -> list[str]:
    answer = (row or {}).get("answer")
    return accepted_texts(answer if isinstance(answer, list | Mapping) else truth)
