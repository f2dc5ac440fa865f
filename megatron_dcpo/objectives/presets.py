"""Named overrides of the options' defaults (``objective.preset``; docs/algorithms.md#6-presets)."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # The paper where it is explicit; the intent of the released code where it is silent: the
    # defaults.
    "paper": {},
    # The intent of the released code with its four defects repaired. Its KL loss needs a reference
    # policy, so it stays an explicit choice (kl_coef: 0.001).
    "verl_compat": {
        "calibration_loss": "brier",
        "malformed_placement": "sentinel",
        "fallback": "last_two",
        "ddof": 1,
        "loss_aggregation": "token_mean",
        "dual_clip": 3.0,
    },
    # A strictly proper score of the response's own label, with less noise and one scale for all
    # groups; why each option is there: docs/algorithms.md#6-presets.
    "dcpo_proper": {
        "lam": 0.0,
        "calibration_loss": "brier",
        "advantage_normalization_confidence": "batch_std",
        "marker_block": "reasoning",
    },
}
