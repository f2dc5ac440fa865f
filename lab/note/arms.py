"""The arms of the study: what is fitted on the answers to some problems and states a number for
answers to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from lab.fitted import bar_inputs, logistic_curve, surprise
from lab.note.transcripts import Seen, Transcripts

GRAMS = (1, 8)  # characters
LEAST_TEXTS = 20  # that an n-gram stands in
MOST_GRAMS = 2000
LEAST_ODDS = 0.005  # a stated confidence is cut to this and its complement


Columns = Callable[[Seen, np.ndarray], np.ndarray]  # and the kinds of problems -> [N, F]
States = Callable[[Seen], np.ndarray]
Arm = Callable[[Seen], States]


def on_columns(*columns: Columns) -> Arm:
    """Return the arm that is a logistic regression on columns."""

    def arm(fit: Seen) -> States:
        kinds = np.unique(fit.transcripts.records.kind)

        def inputs(of: Seen) -> np.ndarray:
            return np.column_stack([column(of, kinds) for column in columns])

        curve = logistic_curve(inputs(fit), fit.correct)
        return lambda of: curve(inputs(of))

    return arm


def on_grams(texts: Callable[[Transcripts], Sequence[str]], *columns: Columns) -> Arm:
    """Return the arm that is boosted trees on n-grams of texts and on columns."""

    def arm(fit: Seen) -> States:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.feature_selection import SelectKBest, chi2

        kinds = np.unique(fit.transcripts.records.kind)
        counted = CountVectorizer(
            analyzer="char",
            ngram_range=GRAMS,
            lowercase=False,
            min_df=LEAST_TEXTS,
            dtype=np.float32,
        )
        counts = counted.fit_transform(texts(fit.transcripts))
        chosen = SelectKBest(chi2, k=min(MOST_GRAMS, counts.shape[1])).fit(counts, fit.correct)

        def inputs(of: Seen) -> np.ndarray:
            grams = chosen.transform(counted.transform(texts(of.transcripts))).toarray()
            return np.column_stack([grams, *(column(of, kinds) for column in columns)])

        trees = HistGradientBoostingClassifier(random_state=0).fit(inputs(fit), fit.correct)
        return lambda of: trees.predict_proba(inputs(of))[:, 1]

    return arm


def stacked(fit: Seen, stated: np.ndarray) -> Callable[[Seen, np.ndarray], np.ndarray]:
    """Fit a logistic regression on the bar's inputs and the log-odds of what is stated; return
    what it says of others and of what is stated there.
    """
    kinds = np.unique(fit.transcripts.records.kind)

    def inputs(of: Seen, confidence: np.ndarray) -> np.ndarray:
        return np.column_stack([_bar(of, kinds), log_odds(confidence)])

    curve = logistic_curve(inputs(fit, stated), fit.correct)
    return lambda of, confidence: curve(inputs(of, confidence))


def log_odds(confidence: np.ndarray) -> np.ndarray:
    """Return the log-odds of confidences that are cut to ``LEAST_ODDS`` and its complement."""
    cut = np.clip(confidence, LEAST_ODDS, 1 - LEAST_ODDS)
    found: np.ndarray = np.log(cut / (1 - cut))
    return found


def _bar(of: Seen, kinds: np.ndarray) -> np.ndarray:
    return bar_inputs(of.transcripts.records, kinds)


def _kind(of: Seen, kinds: np.ndarray) -> np.ndarray:
    is_kind: np.ndarray = of.transcripts.records.kind[:, None] == kinds
    return is_kind


def _note_logprob(of: Seen, kinds: np.ndarray) -> np.ndarray:
    return surprise(of.note_logprob)


def _box_logprob(of: Seen, kinds: np.ndarray) -> np.ndarray:
    return surprise(of.box_logprob)


def _state(of: Seen, kinds: np.ndarray) -> np.ndarray:
    return of.state


def _agrees(of: Seen, kinds: np.ndarray) -> np.ndarray:
    return of.agrees


def _texts(transcripts: Transcripts) -> Sequence[str]:
    return transcripts.texts


def _questions(transcripts: Transcripts) -> Sequence[str]:
    return transcripts.question


BAR_AND_NOTE = "bar + log p(note)"
GENERIC = "generic"
ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "probe": on_columns(_state),
        "question only": on_grams(_questions, _kind),
        "bar": on_columns(_bar),
        BAR_AND_NOTE: on_columns(_bar, _note_logprob),
        GENERIC: on_grams(_texts, _bar),
        "equality": on_columns(_agrees),
        "bar + equality": on_columns(_bar, _agrees),
        "bar + log p(N in the box)": on_columns(_bar, _box_logprob),
        "generic, with log p(note)": on_grams(_texts, _bar, _note_logprob),
    }
)
CONTROLLED = (BAR_AND_NOTE, GENERIC)  # once more with other notes, and without
