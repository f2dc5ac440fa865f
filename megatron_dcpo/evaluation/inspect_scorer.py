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

import math
from collections.abc import Callable, Sequence

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
from megatron_dcpo.data.labels import kind_of_row
from megatron_dcpo.judging.answers import extract_boxed
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.math.pool import equivalent_math
from megatron_dcpo.types import CONFIDENCE_TAG

Measure = Callable[[Sequence[float | None], Sequence[float]], float]


def _over_samples(measure: Measure) -> Metric:
    to_float = value_to_float()

    def compute(scores: list[SampleScore]) -> float:
        confidences = [(one.score.metadata or {}).get("confidence") for one in scores]
        correct = [to_float(one.score.value) for one in scores]
        return float(measure(confidences, correct))

    return compute


@metric
def ece() -> Metric:
    """Expected calibration error, twenty bins of equal width."""
    return _over_samples(calibration.ece)


@metric
def brier() -> Metric:
    """Brier score."""
    return _over_samples(calibration.brier)


@metric
def auroc() -> Metric:
    """Area under the ROC curve: how well the confidence tells right answers from wrong ones."""
    return _over_samples(calibration.auroc)


@metric
def auroc_within() -> Metric:
    """Area under the ROC curve within kinds of problem; NaN if no sample has a kind."""
    to_float = value_to_float()

    def compute(scores: list[SampleScore]) -> float:
        metadata = [one.score.metadata or {} for one in scores]
        kinds = [each.get("kind") for each in metadata]
        if all(kind is None for kind in kinds):
            return math.nan
        confidences = [each.get("confidence") for each in metadata]
        correct = [to_float(one.score.value) for one in scores]
        return calibration.auroc_within(confidences, correct, kinds).value

    return compute


@metric
def auroc_within_problem() -> Metric:
    """Area under the ROC curve among the answers to one sample, the mean over the samples; NaN
    where the epochs of a sample are reduced to one score, as they are unless the task says
    otherwise.
    """
    to_float = value_to_float()

    def compute(scores: list[SampleScore]) -> float:
        confidences = [(one.score.metadata or {}).get("confidence") for one in scores]
        correct = [to_float(one.score.value) for one in scores]
        problems = [one.sample_id for one in scores]
        return calibration.auroc_within_problem(confidences, correct, problems).value

    return compute


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
                "kind": state.metadata.get(kinds) if kinds else kind_of_row(state.metadata),
            },
        )

    return score
