"""The options of ``dcpo serve``, which a middleware inside vLLM reads from the environment variable
``DCPO_SERVE``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex

from prometheus_client import REGISTRY

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.served_models import ModelRow
from megatron_dcpo.serving.arguments import add_scoring_arguments
from megatron_dcpo.serving.calibrator import Calibrator, Names, load_calibrator
from megatron_dcpo.serving.limits import ServeLimits
from megatron_dcpo.serving.scorer import Scorer, choose_threshold, form_of_fit
from megatron_dcpo.serving.service import Service, build_service
from megatron_dcpo.types import CONFIDENCE_TAG

ENVIRONMENT = "DCPO_SERVE"
_NO_LIMIT = 1 << 60

logger = logging.getLogger(__name__)


def scorer_of(args: argparse.Namespace) -> Scorer:
    """Return the scorer for parsed options. Raises :class:`UserError` for what does not go
    together.
    """
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


def names_of(rows: list[ModelRow]) -> Names:
    """Return the names of each model that an upstream lists: its id, and vLLM's ``root``, which is
    the directory or the name on the hub.
    """
    names = {}
    for row in rows:
        known = [row["id"]]
        root = row.get("root")
        if isinstance(root, str) and root not in known:
            known.append(root)
        names[row["id"]] = known
    return names


def service_from_environment() -> Service:
    """Return the service of a middleware inside vLLM, whose metrics stand among the server's.
    Raises :class:`UserError`, or exits with a usage line, for wrong options.
    """
    parser = argparse.ArgumentParser(prog=ENVIRONMENT)
    add_scoring_arguments(parser)
    args = parser.parse_args(shlex.split(os.environ.get(ENVIRONMENT, "")))
    scorer = scorer_of(args)
    # how many requests it takes at a time is the server's affair
    limits = ServeLimits(concurrent=_NO_LIMIT, held_bytes=_NO_LIMIT)
    return build_service(scorer, REGISTRY, is_proxy=False, limits=limits)
