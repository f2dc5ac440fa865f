"""The options of how answers are scored and shown, for ``dcpo serve`` and for a middleware inside
vLLM. It imports nothing heavy, so that help appears at once.
"""

from __future__ import annotations

import argparse


def add_scoring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`megatron_dcpo.serving.options.scorer_of` reads."""
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
