r"""Decide whether the boxed answer to a question is right.

- ``exact`` asks for one of the accepted texts, compared as SQuAD's script does
  (:func:`abstention.normalize`), or as TriviaQA's does if the row has
  TriviaQA's object (:func:`normalize_triviaqa`);
- ``f1`` takes the largest F1 of the words against any accepted text, which is right from
  ``judging.threshold`` on;
- ``choice`` asks for the letter of the right option, or its text (``choices.py``).

The accepted texts are those of the row's ``answer`` if that is a list or TriviaQA's object
(``data.answer_keys.accepted_texts``), or else the ground truth. A response without a box is
wrong.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.answer_keys import accepted_texts
from megatron_dcpo.data.datasets import Record
from megatron_dcpo.data.question_options import letter_index
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.abstention import normalize, without_articles, without_tex
from megatron_dcpo.judging.answers import BOXED, Attempt, Outcome
from megatron_dcpo.judging.option_letters import bare_letter, chosen_letter
from megatron_dcpo.judging.verifier_kind import Problems, VerifierKind, check_plain_answers

_SPACE_FOR_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
Normalize = Callable[[str], str]


def normalize_triviaqa(text: str) -> str:
    """Return the text as TriviaQA's script compares it: as :func:`normalize`, but punctuation and
    typographic apostrophes become spaces. ``AC/DC`` is ``AC DC``, ``U.S.`` is not ``US``.
    """
    plain = without_tex(text).lower().translate(_SPACE_FOR_PUNCTUATION)
    return without_articles(plain) or text.strip().lower()


def f1(answer: str, truth: str, normalized: Normalize = normalize) -> float:
    """Return the harmonic mean of precision and recall of the normalized words, as in SQuAD. As in
    HotpotQA, yes and no score 0 or 1, nothing in between.
    """
    answer_words = normalized(answer).split()
    wanted = normalized(truth).split()
    if answer_words != wanted and (answer_words in _NO_PARTS or wanted in _NO_PARTS):
        return 0.0
    common = sum((Counter(answer_words) & Counter(wanted)).values())
    if not common:
        return 0.0
    return 2 * common / (len(answer_words) + len(wanted))


_NO_PARTS = (["yes"], ["no"], ["noanswer"])


def same_answer(a: str, b: str) -> bool:
    """Return whether two answers to one question are the same text, or the same letter."""
    if normalize(a) == normalize(b):
        return True
    return (bare_letter(a) or a) == (bare_letter(b) or b)


def same_choice(a: str, b: str) -> bool:
    """Return whether two answers to one question with options name the same letter or text."""
    if normalize(a) == normalize(b):
        return True
    return (chosen_letter(a, ()) or a) == (chosen_letter(b, ()) or b)


# ---------------------------------------------------------------------------------------- verifiers


def _score_exact(attempt: Attempt, answer: str) -> float:
    normalized = _normalization(attempt.row)
    accepted = _accepted(attempt.truth, attempt.row)
    answer_words = normalized(answer)
    return float(any(answer_words == normalized(text) for text in accepted))


def _score_f1(attempt: Attempt, answer: str) -> float:
    normalized = _normalization(attempt.row)
    accepted = _accepted(attempt.truth, attempt.row)
    return max((f1(answer, text, normalized) for text in accepted), default=0.0)


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


def _check_problems(name: str, problems: Problems, source: str) -> None:
    """Raise :class:`UserError` for the first problem that has no accepted text or no letter."""
    check_plain_answers(name, problems, source)
    for problem in problems:
        truth = problem.answer if isinstance(problem, Record) else problem.ground_truth
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


def _normalization(row: Mapping[str, Any] | None) -> Normalize:
    """Return TriviaQA's normalization for a row with TriviaQA's object, or else SQuAD's."""
    if isinstance((row or {}).get("answer"), Mapping):
        return normalize_triviaqa
    return normalize


def _kind(same: Callable[[str, str], bool]) -> VerifierKind:
    return VerifierKind(
        form=BOXED,
        build=lambda name, options, tests: question_verifier(name, options),
        same=same,
        check_problems=_check_problems,
    )


TEXT = _kind(same_answer)
CHOICE = _kind(same_choice)
