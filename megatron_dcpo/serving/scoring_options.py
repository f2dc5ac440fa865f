"""The options of how answers are scored and shown: those of ``dcpo serve``, and of a middleware
inside vLLM. Nothing heavy is imported before they are read, so that help appears at once.
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from megatron_dcpo.errors import UserError
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from megatron_dcpo.serving.calibrator import Calibrator
    from megatron_dcpo.serving.scorer import Scorer

logger = logging.getLogger(__name__)


def add_scoring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`scorer_of` reads."""
    parser.add_argument(
        "--calibrator",
        default="",
        metavar="FILE",
        help="predictor of dcpo calibrate (.npz); without one the confidence is the stated one",
    )
    parser.add_argument(
        "--accept-mismatch",
        action="store_true",
        help="apply the predictor to any model, prompt and sampling, fitted or not",
    )
    parser.add_argument(
        "--abstain-above",
        type=float,
        metavar="RISK",
        help="say of answers that they are below the threshold at which at most this share of the "
        "held-out answers was wrong",
    )
    parser.add_argument(
        "--abstain-text",
        default="",
        metavar="TEXT",
        help="add this text to answers below the threshold",
    )
    parser.add_argument(
        "--keep-tag", action="store_true", help="leave the confidence block in the text"
    )
    parser.add_argument(
        "--marker",
        default="",
        metavar="TEXT",
        help="confidence tag of the answers (default: the predictor's, or <conf>)",
    )


def scorer_of(args: argparse.Namespace) -> Scorer:
    """Return the scorer for parsed options. Raises :class:`UserError` for what does not go
    together.
    """
    from megatron_dcpo.serving.calibrator import load_calibrator
    from megatron_dcpo.serving.scorer import Scorer, choose_threshold, form_of_fit

    calibrator = None
    if args.calibrator:
        calibrator = load_calibrator(args.calibrator, args.accept_mismatch)
    elif args.accept_mismatch:
        raise UserError("--accept-mismatch goes with --calibrator")
    threshold = None
    if args.abstain_above is not None:
        threshold = choose_threshold(calibrator, args.calibrator, args.abstain_above)
        logger.info(
            "abstaining below a confidence of %.3f: %.1f%% of the held-out answers are above it, "
            "and %.1f%% of those wrong (95%% interval %.1f%% to %.1f%%)",
            threshold.confidence,
            100 * threshold.coverage,
            100 * threshold.risk,
            100 * threshold.low,
            100 * threshold.high,
        )
    elif args.abstain_text:
        raise UserError("--abstain-text goes with --abstain-above")
    return Scorer(
        calibrator=calibrator,
        marker=_marker(args.marker, calibrator),
        form=form_of_fit(calibrator),
        keep_tag=args.keep_tag,
        threshold=threshold,
        abstention=args.abstain_text,
    )


def _marker(given: str, calibrator: Calibrator | None) -> str:
    """Return the confidence tag: the one ``given``, that of the fit, or the usual one."""
    fitted = CONFIDENCE_TAG
    if calibrator is not None and calibrator.fitted_on is not None:
        fitted = calibrator.fitted_on.markers[0]
        if given and given != fitted:
            raise UserError(
                f"--marker {given}: the predictor was fitted on answers with {fitted}; leave it "
                "out, or give --accept-mismatch"
            )
    return given or fitted
