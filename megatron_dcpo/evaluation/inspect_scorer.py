"""A scorer for Inspect (``inspect_ai``): whether an answer is right, the confidence that is stated
behind it, and ECE, Brier score, AUROC, and AUROC within kinds of problem and within problems as
metrics of a log.

    from megatron_dcpo.evaluation.inspect_scorer import calibrated
    Task(..., scorer=calibrated())              # answers in a box, as dcpo evaluate judges them
    Task(..., scorer=calibrated(includes()))    # by another scorer of Inspect's

Installed beside this package, Inspect knows it as ``megatron_dcpo/calibrated``. ``dcpo report``
draws its logs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    metric,
    scorer,
    value_to_float,
)
from inspect_ai.solver import TaskState

from megatron_dcpo import calibration
from megatron_dcpo.data.labels import as_kind, kind_of_row
from megatron_dcpo.judging.answers import extract_boxed
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.math.pool import equivalent_math
from megatron_dcpo.types import CONFIDENCE_TAG

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ScoredAnswers:
    """The confidence of each answer, whether it is right, and the kind and id of its sample."""

    confidences: Sequence[float | None]
    correct: Sequence[float]
    kinds: Sequence[str | None]
    samples: Sequence[int | str | None]


def _over_answers(measure: Callable[[_ScoredAnswers], float]) -> Metric:
    """Return a metric of answers, NaN where a verdict is between right and wrong: the confidence
    beside a mean over epochs is that of the first one.
    """
    to_float = value_to_float()

    def compute(scores: list[SampleScore]) -> float:
        correct = [to_float(one.score.value) for one in scores]
        if not set(correct) <= {0.0, 1.0}:
            logger.warning(
                "a verdict is between right and wrong, so there is no calibration; "
                "Task(epochs=Epochs(N, [])) keeps the verdict of each epoch"
            )
            return math.nan
        metadata = [one.score.metadata or {} for one in scores]
        answers = _ScoredAnswers(
            confidences=[each.get("confidence") for each in metadata],
            correct=correct,
            kinds=[each.get("kind") for each in metadata],
            samples=[one.sample_id for one in scores],
        )
        return float(measure(answers))

    return compute


@metric
def ece() -> Metric:
    """Expected calibration error, twenty bins of equal width."""
    return _over_answers(lambda answers: calibration.ece(answers.confidences, answers.correct))


@metric
def brier() -> Metric:
    """Brier score."""
    return _over_answers(lambda answers: calibration.brier(answers.confidences, answers.correct))


@metric
def auroc() -> Metric:
    """Area under the ROC curve: how well the confidence tells right answers from wrong ones."""
    return _over_answers(lambda answers: calibration.auroc(answers.confidences, answers.correct))


@metric
def auroc_within() -> Metric:
    """Area under the ROC curve within kinds of problem; NaN if no sample has a kind."""

    def measure(answers: _ScoredAnswers) -> float:
        if all(kind is None for kind in answers.kinds):
            return math.nan
        return calibration.auroc_within(answers.confidences, answers.correct, answers.kinds).value

    return _over_answers(measure)


@metric
def auroc_within_problem() -> Metric:
    """Area under the ROC curve among the answers to one sample, the mean over the samples; NaN
    where the epochs of a sample are reduced to one score, as they are unless the task says
    otherwise.
    """
    return _over_answers(
        lambda answers: (
            calibration.auroc_within_problem(
                answers.confidences, answers.correct, answers.samples
            ).value
        )
    )


@scorer(
    metrics=[accuracy(), ece(), brier(), auroc(), auroc_within(), auroc_within_problem()],
)
def calibrated(by: Scorer | None = None, marker: str = CONFIDENCE_TAG, kinds: str = "") -> Scorer:
    """Return a scorer whose verdict is that of ``by``, or of the answer in the last box against the
    target; the confidence behind ``marker`` is in the score's metadata, null if there is none.

    ``kinds`` names the kind of problem in the sample's metadata, by default the first of ``kind``,
    ``type``, ``level``, ``difficulty``, ``subject`` and ``task`` that there is.
    """

    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        about = state.metadata
        finished = state.output.stop_reason in ("stop", "unknown")
        parsed = parse_confidence(text, marker=marker, finished=finished, opener="")
        if by is not None:
            verdict = await by(state, target)
            assert verdict is not None
            value, answer = verdict.value, verdict.answer
        else:
            answer = extract_boxed(text.partition(marker)[0])
            right = answer is not None and equivalent_math(answer, target.text)
            value = CORRECT if right else INCORRECT
        return Score(
            value=value,
            answer=answer,
            metadata={
                "confidence": parsed.confidence,
                "status": parsed.status,
                "kind": as_kind(about.get(kinds)) if kinds else kind_of_row(about),
            },
        )

    return score
