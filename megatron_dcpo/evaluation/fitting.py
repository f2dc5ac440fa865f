"""Fit a post-hoc confidence on files of judged samples, save it, and score it on the problems that
were held out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dcpo.evaluation import posthoc_predictors
from megatron_dcpo.evaluation.fit_record import finish_reasons_of, fitted_on_of, record_of
from megatron_dcpo.evaluation.foreign import read_any
from megatron_dcpo.evaluation.samples import Sample, at_each_turn
from megatron_dcpo.evaluation.scoring import (
    RANKING_ONLY,
    checked_kinds,
    confidences_of,
    parse_kinds,
    scores_of_arms,
)

logger = logging.getLogger(__name__)

# sources that are no kind of confidence
_INPUTS = ("mean", "full", *posthoc_predictors.FEATURES)


@dataclass(frozen=True)
class PosthocFit:
    """What is fitted: the ``method`` (``posthoc_predictors.METHODS``), its ``source``, and the
    share of the problems that is ``held_out``. ``kinds_by`` names the kinds of problem of the
    scores, ``columns`` those of a table (``foreign.read_any``).
    """

    method: str = "logistic"
    source: str | None = None
    held_out: float = 0.2
    seed: int = 0
    epochs: int = 200
    kinds_by: str = ""
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True)
class FittedScores:
    """The scores on the held-out problems, by the name of the confidence: what is stated, what was
    fitted on, what was fitted, and the lookup; none if no problem was held out. ``kinds`` says what
    the kinds of problem are (``kinds.described``).
    """

    rows: dict[str, dict[str, Any]]
    kinds: dict[str, Any]


def fit_on_files(files: Sequence[str], out: str, options: PosthocFit) -> FittedScores:
    """Fit a predictor on the samples of these files and save it at ``out``. Raises
    :class:`UserError` for samples that there is nothing to learn from.
    """
    if options.source and options.source.partition(":")[0] not in _INPUTS:
        parse_kinds(options.source)
    samples = [sample for path in files for sample in read_any(path, options.columns)]
    if _is_of_turns(samples, options):
        options = replace(options, source=posthoc_predictors.TURNS)
        samples = at_each_turn(samples)
    kinds = checked_kinds(samples, options.kinds_by)
    predictor, held_out = posthoc_predictors.fit(
        options.method,
        samples,
        options.source,
        held_out=options.held_out,
        seed=options.seed,
        epochs=options.epochs,
    )
    _say_left_out(predictor.source, samples, options)
    fitted_on = fitted_on_of(files, samples)
    if fitted_on is None:
        logger.warning(
            "there is no settings.json next to the samples, so the predictor does not say what it "
            "was fitted on, and dcpo serve takes it only with --accept-mismatch"
        )
    elif mixed := fitted_on.mixed():
        logger.warning(
            "the samples are a mixture (%s): a predictor that is calibrated on all of them need "
            "not be so on any of them; fit one on each",
            "; ".join(mixed),
        )
    confidences = predictor.predict(held_out or samples)
    record = record_of(fitted_on, held_out, confidences)
    record = replace(record, finish_reasons=finish_reasons_of(samples))
    replace(predictor, record=record).save(out)
    if not held_out:
        return FittedScores(rows={}, kinds=kinds)
    before = predictor.source
    if before == posthoc_predictors.TURNS:
        before = "verbal"
    elif before.partition(":")[0] in (*_INPUTS, *RANKING_ONLY):
        before = "token"
    arms = {kind: confidences_of(held_out, kind) for kind in ("verbal", before)}
    arms[options.method] = confidences_of(held_out, "posthoc")
    return FittedScores(rows=scores_of_arms(held_out, arms, options.kinds_by), kinds=kinds)


def _is_of_turns(samples: Sequence[Sample], options: PosthocFit) -> bool:
    """Return whether the numbers of all turns are fitted: if that is chosen, or if nothing is and
    agents were asked for them.
    """
    if options.method != "logistic" or options.source is not None:
        return options.source == posthoc_predictors.TURNS
    return any(sample.response.turn_confidences for sample in samples)


def _say_left_out(source: str, samples: Sequence[Sample], options: PosthocFit) -> None:
    """Log how many responses that are not held out were fitted, if some lack the inputs."""
    inside = []
    for sample in samples:
        if not posthoc_predictors.is_held_out(
            posthoc_predictors.problem_of(sample), options.held_out, options.seed
        ):
            inside.append(sample)
    _, known = posthoc_predictors.inputs_of(inside, source)
    if len(known) < len(inside):
        logger.warning(
            "fitted on %d of %d responses; the others lack %s",
            len(known),
            len(inside),
            posthoc_predictors.needs_of(source),
        )
