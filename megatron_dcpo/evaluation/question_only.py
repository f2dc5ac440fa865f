"""How likely an answer to a question is right, read from the question alone: what a confidence has
to beat before it knows anything of its answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.calibration.kinds import FOLDS, folds_of
from megatron_dcpo.evaluation.samples import Sample

FEWEST_QUESTIONS = 10 * FOLDS
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SIGNS = "+-*/=^()?,\\"
_FIRST_NUMBERS = 8
_MOST_WORDS = 300


@dataclass(frozen=True)
class ReadQuestions:
    """Of each sample, the share of right answers that is ``expected`` [N] of its question, and the
    ``fold`` [N] that the question is in.
    """

    expected: Sequence[float]
    fold: np.ndarray


def read_questions(samples: Sequence[Sample], correct: Sequence[float]) -> ReadQuestions | None:
    """Return what a random forest expects of the question of each sample, from its numbers, signs,
    length, words and pairs of words. It is fitted on the questions of the other folds, weighted by
    their numbers of answers; samples of one text are in one fold. None if there are fewer than
    ``FEWEST_QUESTIONS`` texts.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.feature_extraction.text import CountVectorizer

    texts = [question_of(sample) for sample in samples]
    questions = list(dict.fromkeys(texts))
    if len(questions) < FEWEST_QUESTIONS:
        return None
    number_of = {question: number for number, question in enumerate(questions)}
    codes = np.array([number_of[text] for text in texts])
    answers = np.bincount(codes)
    shares = np.bincount(codes, weights=correct) / answers
    words = CountVectorizer(
        ngram_range=(1, 2), max_features=_MOST_WORDS, min_df=2, token_pattern=r"[^\W\d_]+"
    )
    try:
        of_words = words.fit_transform(questions).toarray()
    except ValueError:  # no word stands in two questions
        of_words = np.empty((len(questions), 0))
    features = np.hstack([[_numbers_of(question) for question in questions], of_words])
    fold = folds_of([""] * len(questions), questions)
    expected = np.empty(len(questions))
    for number in range(FOLDS):
        inside = fold == number
        forest = RandomForestRegressor(
            n_estimators=200, min_samples_leaf=5, max_features=0.3, random_state=0
        )
        forest.fit(features[~inside], shares[~inside], sample_weight=answers[~inside])
        expected[inside] = forest.predict(features[inside])
    return ReadQuestions(expected=expected[codes].tolist(), fold=fold[codes])


def question_of(sample: Sample) -> str:
    """Return the text of a sample's problem, or what the policy was asked where it has none."""
    prompt = sample.prompt
    return prompt.problem or "\n".join(str(message.get("content")) for message in prompt.messages)


def _numbers_of(question: str) -> list[float]:
    """Return the features of a question that are no words: its first numbers and their digits, how
    many there are, the length, and the number of each sign.
    """
    found = _NUMBER.findall(question)
    first = [math.log1p(min(float(text), 1e300)) for text in found[:_FIRST_NUMBERS]]
    digits = [len(text) for text in found]
    return [
        *first,
        *[-1.0] * (_FIRST_NUMBERS - len(first)),
        len(found),
        sum(digits),
        max(digits, default=0),
        math.log1p(len(question)),
        len(question.split()),
        *(question.count(sign) for sign in _SIGNS),
    ]
