"""Write the theory's numbers (``theory.json``) and its two figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab.results import write_json
from lab.theory import scoring_rules
from lab.theory.drift import curve_of_run, drift_of_run
from lab.theory.gradient_conflict import fisher_conflict, negative_share, over_confident_policies
from lab.world2 import RECORDS, rows
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure
from megatron_dcpo.objectives import ObjectiveConfig

PROBABILITIES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
OBJECTIVES = {
    "l1, std": ObjectiveConfig(),
    "brier, mean": ObjectiveConfig(
        lam=0.0, calibration_loss="brier", advantage_normalization_confidence="mean"
    ),
}


def proper() -> dict[str, Any]:
    """Compute the best confidence under each score, the push on saturated groups, and the group's
    variances.
    """
    optima = {
        f"{score}, lambda {lam:g}": [scoring_rules.optimum(score, lam, p, 8) for p in PROBABILITIES]
        for score in ("l1", "brier", "log")
        for lam in (0.0, 0.5, 1.0)
    }
    near = np.array([0.98, 0.99, 0.97, 1.0, 0.99, 0.98, 0.99, 0.98])
    pushes = {
        name: [
            scoring_rules.saturated_push(objective, 1 - scale * (1 - near))
            for scale in (10.0, 1.0, 0.1)
        ]
        for name, objective in OBJECTIVES.items()
    }
    seen = {
        f"lambda {lam:g}": scoring_rules.optimum("brier", lam, 0.5, 8, q=0.95)
        for lam in (0.0, 0.5, 1.0)
    }
    return {
        "p": list(PROBABILITIES),
        "optimum": optima,
        "largest_push_of_a_saturated_group_0.15_0.015_0.0015_from_1": pushes,
        "optimum_when_the_response_shows_0.95_and_the_group_has_0.5": seen,
        "subgradient_variance_at_p_0.2_c_0.21": [
            scoring_rules.subgradient_variance(0.21, 0.2, G) for G in (1, 8)
        ],
    }


def write_theory(out: Path) -> None:
    """Write ``theory.json`` and its figures in ``out``, where the second world's records are."""
    run = rows(out / RECORDS)[0]
    drift = drift_of_run(run["dcpo"]["test"], run["base"]["test"]) | curve_of_run(
        out / RECORDS, "graphs.1/dcpo/1"
    )
    write_json(
        out / "theory.json",
        {"conflict": negative_share(2000), "properness": proper(), "drift": drift},
    )
    draw_conflict(out / "theory_conflict.png")
    draw_drift(drift, run["dcpo"]["test"].confidence, out / "theory_drift.png")


def draw_conflict(path: Path, n: int = 600) -> None:
    """Draw both inner products of over-confident policies with Cov(R, phi) > 0, against that
    covariance.
    """
    with figure(path, columns=2, width=4.6) as panels:
        for axes, loss, title in zip(panels, ("l1", "brier"), ("|c - t|", "(c - t)²"), strict=True):
            found = [fisher_conflict(*policy, loss) for policy in over_confident_policies(n)]
            covariances = [one.covariance for one in found]
            axes.plot(
                covariances,
                [one.stated for one in found],
                ".",
                ms=2.5,
                color=PALETTE[0],
                label="as stated",
            )
            axes.plot(
                covariances,
                [one.fixed for one in found],
                ".",
                ms=2.5,
                color=PALETTE[2],
                label="target held fixed",
            )
            axes.axhline(0, color="#777777", lw=0.8)
            axes.set(xlabel="Cov(R, φ)", ylabel="⟨∇J, ∇J_cal⟩", title=title)
            axes.legend(fontsize=6.5)


def draw_drift(found: dict[str, Any], stated: np.ndarray, path: Path) -> None:
    """Draw the drift of the stated confidence, and what the trained run states."""
    with figure(path, columns=2, width=4.6) as (drift, histogram):
        drift.plot(
            found["confidence"],
            found["drift"],
            color=PALETTE[0],
            label="paper: L1, lambda 0.5, group std",
        )
        drift.plot(
            found["confidence"],
            found["drift_brier"],
            color=PALETTE[2],
            label="Brier, lambda 0, mean only",
        )
        drift.axhline(0, color="#777777", lw=0.8)
        histogram.hist(stated[~np.isnan(stated)], bins=np.linspace(0, 1, 51), color=PALETTE[0])
        for axes in (drift, histogram):
            for point in found["stable"]:
                axes.axvline(point, color="#000000", ls=":", lw=1)
            axes.axvline(found["accuracy"], color="#777777", ls="--", lw=1, label="accuracy")
        drift.set(xlabel="stated confidence m", ylabel="E[A_c (c - m)]")
        drift.legend(fontsize=6.5)
        histogram.set(xlabel="confidence stated by the trained run", ylabel="test responses")
