"""RLCR: the Brier score added to the answer's reward (Damani et al. 2025; docs/algorithms.md#2-methods)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import coupled
from megatron_dcpo.objectives.advantages import Group, GroupScore, by_group, shared_advantage
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import CALIBRATION_REWARD, ObjectiveConfig

# Weights of format, accuracy and Brier term in the original code.
FORMAT, ACCURACY, BRIER = 0.5, 0.5, 0.5


def score_group(group: Group, options: ObjectiveConfig) -> GroupScore:
    """``canonical``: r_i = R_i - w (R_i - c_i)^2, malformed r_i = R_i - w. ``original``: the published code's sum."""
    return original(group, options) if options.variant == "original" else coupled.score_group(group, options)


def original(group: Group, options: ObjectiveConfig) -> GroupScore:
    """r = 0.5 f + 0.5 acc + 0.5 (1 - (acc - c)^2) where the format holds (f = 1), and 0 where it does not.

    A wrong format voids the accuracy too; reported ``R_c`` is the part of r that is not the accuracy's.
    """
    f = group.well_formed.astype(np.float64)
    accuracy = f * group.correct
    c = np.where(group.well_formed, group.confidence, 0.0)
    R_c = f * (FORMAT + BRIER * (1 - np.square(accuracy - c)))
    return shared_advantage(group.correct.copy(), ACCURACY * accuracy + R_c, R_c, options)


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The label is the response's own (lam 0), the score is Brier; ``original`` brings its trainer's settings, and its
    reward has no options: raises :class:`UserError` where one is set."""
    if config.variant == "original" and (unread := sorted((CALIBRATION_REWARD | {"w"}) & set(config.explicit))):
        raise UserError(
            f"objective.{unread[0]} has no effect with objective.variant=original, whose reward is fixed; remove it (or "
            "set it to null)"
        )
    values: dict[str, Any] = {"lam": 0.0, "calibration_loss": "brier"}
    if config.preset == "verl_compat":
        values["w"] = 0.3
    if config.variant == "original":
        values |= {"advantage_normalization": "mean", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
        values |= {"loss_aggregation": "token_mean", "mask_truncated": True}
    return values


METHOD = Method(by_group(score_group), options=coupled.OPTIONS | {"variant"}, defaults=defaults)
