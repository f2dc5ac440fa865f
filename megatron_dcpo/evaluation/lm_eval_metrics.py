"""Metrics for a task of lm-eval: accuracy, ECE, Brier score, AUROC, and AUROC within kinds of
problem and within problems, of the confidence that a generated answer states.

A task names them in its YAML, through a file beside it (``examples/elsewhere/lm_eval_task``):

    process_results: !function calibration.process_results
    metric_list:
      - {metric: accuracy, aggregation: mean, higher_is_better: true}
      - {metric: ece, aggregation: !function calibration.ece, higher_is_better: false}

The samples of a run (``--log_samples``) are read by ``dcpo report``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dcpo import calibration
from megatron_dcpo.data.labels import as_kind, kind_of_row
from megatron_dcpo.judging.answers import extract_boxed
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.math.pool import equivalent_math
from megatron_dcpo.types import CONFIDENCE_TAG

# a confidence, None if none is stated, and whether the answer is right
Pair = tuple[float | None, float]
# a pair, and the kind of the problem
Triple = tuple[float | None, float, str | None]


def process_results(
    doc: Mapping[str, Any],
    results: Sequence[str | list[str]],
    target: str = "answer",
    marker: str = CONFIDENCE_TAG,
    kinds: str = "",
) -> dict[str, Any]:
    """Return the metrics of one document: the answer in the last box is compared with the column
    ``target``, and the kind of problem is what the column ``kinds`` says, by default the first of
    ``kind``, ``type``, ``level``, ``difficulty``, ``subject`` and ``task`` that there is. Of
    several answers (a task with ``repeats`` whose filter keeps them all) the first has the metrics,
    and all are compared within the problem.
    """
    texts = [text for each in results for text in (each if isinstance(each, list) else [each])]
    pairs = [_pair_of(text, target=str(doc[target]), marker=marker) for text in texts]
    kind = as_kind(doc[kinds]) if kinds else kind_of_row(doc)
    _, right = pairs[0]
    triple: Triple = (*pairs[0], kind)
    return {
        "accuracy": right,
        **dict.fromkeys(("ece", "brier", "auroc"), pairs[0]),
        "auroc_within": triple,
        "auroc_within_problem": pairs,
    }


def ece(pairs: Sequence[Pair]) -> float:
    """Return the expected calibration error of a task, twenty bins of equal width."""
    return calibration.ece(*_columns(pairs))


def brier(pairs: Sequence[Pair]) -> float:
    """Return the Brier score of a task."""
    return calibration.brier(*_columns(pairs))


def auroc(pairs: Sequence[Pair]) -> float:
    """Return the area under the ROC curve of a task."""
    return calibration.auroc(*_columns(pairs))


def auroc_within(triples: Sequence[Triple]) -> float:
    """Return the area under the ROC curve within kinds of problem of a task; NaN if no document
    names a kind.
    """
    kinds = [kind for _, _, kind in triples]
    if all(kind is None for kind in kinds):
        return math.nan
    confidences, correct = _columns([(confidence, right) for confidence, right, _ in triples])
    return calibration.auroc_within(confidences, correct, kinds).value


def auroc_within_problem(problems: Sequence[Sequence[Pair]]) -> float:
    """Return the area under the ROC curve among the answers to one problem, the mean over problems;
    NaN if no problem has a right and a wrong answer.
    """
    confidences, correct = _columns([pair for pairs in problems for pair in pairs])
    numbers = [number for number, pairs in enumerate(problems) for _ in pairs]
    return calibration.auroc_within_problem(confidences, correct, numbers).value


def _pair_of(text: str, target: str, marker: str) -> Pair:
    answer = extract_boxed(text.partition(marker)[0])
    right = answer is not None and equivalent_math(answer, target)
    parsed = parse_confidence(text, marker=marker, finished=True, opener="")
    return parsed.confidence, float(right)


def _columns(pairs: Sequence[Pair]) -> tuple[list[float | None], list[float]]:
    return [confidence for confidence, _ in pairs], [correct for _, correct in pairs]
