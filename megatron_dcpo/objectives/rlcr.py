"""RLCR: the Brier score added to the answer's reward (Damani et al. 2025;
docs/algorithms.md#2-methods).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import coupled
from megatron_dcpo.objectives.advantages import Scores, shared_advantage
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import CALIBRATION_REWARD, ObjectiveConfig

# Weights of format, accuracy and Brier term in the original code.
FORMAT = 0.5
ACCURACY = 0.5
BRIER = 0.5


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return the scores of r_i = R_i - w (R_i - c_i)^2, malformed r_i = R_i - w (``canonical``), or
    of the published code's sum (``original``).
    """
    if options.options["variant"] == "original":
        return original(R, c, options)
    return coupled.score_group(R, c, logprob, options)


def original(R: np.ndarray, c: np.ndarray, options: ObjectiveConfig) -> Scores:
    """Return the scores of r = 0.5 f + 0.5 acc + 0.5 (1 - (acc - c)^2) if the format holds (f = 1),
    otherwise of 0.

    A wrong format also voids the accuracy. The reported ``R_c`` is the part of r that does not come
    from the accuracy.
    """
    f = (~np.isnan(c)).astype(np.float64)
    accuracy = f * R
    R_c = f * (FORMAT + BRIER * (1 - np.square(accuracy - np.where(f > 0, c, 0.0))))
    return shared_advantage(
        target=R.copy(), rewards=ACCURACY * accuracy + R_c, R_c=R_c, options=options
    )


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Return the response's own label (lam 0) as target and Brier as score, and for ``original``
    the settings of its trainer. Its reward has no options: raises :class:`UserError` if one is set.
    """
    values: dict[str, Any] = {"lam": 0.0, "calibration_loss": "brier"}
    if config.preset == "verl_compat":
        values["w"] = 0.3
    if config.options.get("variant") == "original":
        unread = CALIBRATION_REWARD & set(config.explicit)
        unread |= {"w"} & set(config.options)
        if unread:
            raise UserError(
                f"objective.{min(unread)} has no effect with objective.variant=original, whose "
                "reward is fixed; remove it (or set it to null)"
            )
        values |= {
            "advantage_normalization": "mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 0.0,
            "loss_aggregation": "token_mean",
            "mask_truncated": True,
            "malformed_placement": "confidence",
        }
    return values


OWN_OPTIONS = {**coupled.OWN_OPTIONS, "variant": ("canonical", "original")}
MEANINGS = {
    **coupled.MEANINGS,
    "variant": "The reward of the equation, or that of its authors' code.",
}
METHOD = Method(
    score_group=score_group,
    reads=coupled.READS,
    own_options=OWN_OPTIONS,
    meanings=MEANINGS,
    defaults=defaults,
)
