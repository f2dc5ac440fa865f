r"""Decide whether the boxed answer to a question is right, and whether it is an abstention.

- ``exact`` asks for one of the accepted texts, compared as in SQuAD (:func:`normalize`);
- ``f1`` takes the largest F1 of the words against any accepted text, which is right from
  ``judging.threshold`` on;
- ``choice`` asks for the letter of the right option, or its text.

The accepted texts are those of the row's ``answer`` if that is a list or TriviaQA's object
(``data.questions.accepted_texts``), or else the ground truth. A response without a box is wrong.
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
    {
        "dont know",
        "do not know",
        "idk",
        "unknown",
        "not sure",
        "unsure",
        "i dont know",
        "i do not know",
        "i am not sure",
        "i am unsure",
        "im not sure",
        "im unsure",
    }
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
    articles and repeated white space. TeX's text commands are replaced with their content.
    """
    plain = _TEX_TEXT.sub(r"\1", text).replace("~", " ").lower().translate(_PUNCTUATION)
    words = [word for word in plain.split() if word not in ("a", "an", "the")]
    return " ".join(words) or text.strip().lower()


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the normalized words, as in SQuAD. As in
    HotpotQA, yes and no score 0 or 1, nothing in between.
    """
    given = normalize(answer).split()
    wanted = normalize(truth).split()
    if given != wanted and (given in _NO_PARTS or wanted in _NO_PARTS):
        return 0.0
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    return 2 * common / (len(given) + len(wanted))


_NO_PARTS = (["yes"], ["no"], ["noanswer"])


def chosen_letter(answer: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer names by its letter, by its text, or by both.

    None if it names no option, or if letter and text differ. Without ``options`` any letter counts.
    """
    answer = _option_text(answer)
    match = _LETTER.fullmatch(answer)
    if match:
        letter = match[1].upper()
        if not options or letter in string.ascii_uppercase[: len(options)]:
            return letter
    texts = [_option_text(option) for option in options]
    both = _LETTER_AND_TEXT.fullmatch(answer)
    if both:
        letter = both[1].upper()
        position = letter_index(letter)
        if position is not None and texts[position : position + 1] == [both[2]]:
            return letter
    if texts.count(answer) != 1:
        return None
    return string.ascii_uppercase[texts.index(answer)]


def _option_text(text: str) -> str:
    """Return the text of an option without TeX markup. Punctuation stays, since -5 and 5 may both
    be options.
    """
    plain = _TEX_TEXT.sub(r"\1", text).strip().strip("$").lower()
    return " ".join(plain.split()).removesuffix(".")


def is_abstention(answer: str | None) -> bool:
    """Return whether the content of a box says that the answer is not known."""
    if answer is None or len(answer) > _LONGEST_ABSTENTION:
        return False
    return normalize(answer) in ABSTENTIONS


def same_answer(a: str, b: str) -> bool:
    """Return whether two answers to one question are the same text, or the same letter."""
    if normalize(a) == normalize(b):
        return True
    return (chosen_letter(a, ()) or a) == (chosen_letter(b, ()) or b)


# ---------------------------------------------------------------------------------------- verifiers


def _score_exact(attempt: Attempt, answer: str) -> float:
    accepted = _accepted(attempt.truth, attempt.row)
    given = normalize(answer)
    return float(any(given == normalize(text) for text in accepted))


def _score_f1(attempt: Attempt, answer: str) -> float:
    accepted = _accepted(attempt.truth, attempt.row)
    return max((f1(answer, text) for text in accepted), default=0.0)


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
    """Return the verifier (``judge.Verifier``) of a ``name`` in :data:`SCORES`."""
    threshold = options.threshold if name == "f1" else 1.0

    def verify(attempts: Sequence[Attempt]) -> list[Outcome]:
        outcomes = []
        for attempt in attempts:
            score = 0.0
            if attempt.answer is not None:
                score = SCORES[name](attempt, attempt.answer)
            outcome = Outcome(score >= threshold)
            if name == "f1":
                graded = score if options.graded else None
                outcome = outcome._replace(score=graded, logged={"score": score})
            outcomes.append(outcome)
        return outcomes

    return verify


def check_questions(name: str, problems: Iterable[Any], source: str) -> None:
    """Raise :class:`UserError` for the first problem (a record or a prompt) that the verifier
    ``name`` cannot judge, because it has no accepted text or no letter.
    """
    if name not in SCORES:
        return
    for problem in problems:
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
    if isinstance(answer, list | Mapping):
        return accepted_texts(answer)
    return accepted_texts(truth)
