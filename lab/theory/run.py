"""Write the theory's numbers (``theory.json``) and figures. Minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab.results import write_json
from lab.theory import estimators, scoring_rules
from lab.theory.drift import drift_of_run
from lab.theory.gradient_conflict import fisher_conflict, negative_share, over_confident_policies
from lab.world2 import RECORDS, rows
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure
from megatron_dcpo.objectives import ObjectiveConfig

PROPER: dict[str, Any] = {
    "lam": 0.0, "calibration_loss": "brier", "confidence_baseline": "counterfactual",
    "advantage_normalization_confidence": "batch_std",
}  # fmt: skip
CENTERED = PROPER | {  # one group at a time has no batch to take the scale from: a weight stands in for it
    "advantage_normalization_confidence": "mean", "weight_confidence": 8.0,
}  # fmt: skip
OBJECTIVES = {
    "L1, lambda 0 (DCPO-I)": ObjectiveConfig(lam=0.0),
    "L1, lambda 0.5 (paper)": ObjectiveConfig(),
    "L1, lambda 1 (DCPO-G)": ObjectiveConfig(lam=1.0),
    "Brier, std": ObjectiveConfig(lam=0.0, calibration_loss="brier"),
    "Brier, mean": ObjectiveConfig(**CENTERED | {"confidence_baseline": "group"}),
    "Brier, mean, counterfactual": ObjectiveConfig(**CENTERED),
    "Brier, batch_std, counterfactual (dcpo_proper)": ObjectiveConfig(**PROPER),
}
PROBABILITIES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)


def conflict(n: int) -> dict[str, Any]:
    """Compute the identities' largest error, and in how many of ``n`` policies each inner product is negative."""
    found = [
        fisher_conflict(*policy, loss) for policy in over_confident_policies(200) for loss in ("l1", "brier", "kl")
    ]
    errors = [(abs(a.fixed - a.fixed_identity), abs(a.stated - a.stated_identity)) for a in found]
    return {"policies": n, "largest_error_of_the_identities": float(np.max(errors)), "negative": negative_share(n)}


def proper(seeds: int, steps: int) -> dict[str, Any]:
    """Compute where the confidence should end (exact optimum) and where training ends (tabular policy)."""
    optima = {
        f"{score}, lambda {lam:g}": [scoring_rules.optimum(score, lam, p, 8) for p in PROBABILITIES]
        for score in ("l1", "brier", "log")
        for lam in (0.0, 0.5, 1.0)
    }
    ends: dict[str, Any] = {}
    for name, objective in OBJECTIVES.items():
        scale: dict[str, Any] = {"group_size": 8, "groups": 4, "steps": steps, "lr": 0.2}
        runs = [
            scoring_rules.settle(objective, PROBABILITIES, **scale, rng=np.random.default_rng(seed))
            for seed in range(seeds)
        ]
        means = np.array([[end.mean for end in run] for run in runs]).mean(0)
        ends[name] = {"mean": means.tolist(), "bias": float(np.abs(means - PROBABILITIES).mean())}
    near = np.array([0.98, 0.99, 0.97, 1.0, 0.99, 0.98, 0.99, 0.98])
    pushes = {
        name: [scoring_rules.saturated_push(objective, 1 - scale * (1 - near)) for scale in (10.0, 1.0, 0.1)]
        for name, objective in OBJECTIVES.items()
        if objective.advantage_normalization_confidence != "batch_std"  # there it depends on the rest of the batch
    }
    seen = {f"lambda {lam:g}": scoring_rules.optimum("brier", lam, 0.5, 8, q=0.95) for lam in (0.0, 0.5, 1.0)}
    return {
        "p": list(PROBABILITIES),
        "optimum": optima,
        "settles": ends,
        "push_of_a_saturated_group": {"distance_from_1": [0.15, 0.015, 0.0015], "largest_weighted_A_c": pushes},
        "optimum_when_the_response_shows_0.95_and_the_group_has_0.5": seen,
    }


def noise() -> dict[str, Any]:
    """Compare the variance of the confidence gradient under the group's and the counterfactual baseline."""
    levels, rng = np.linspace(0, 1, 21), np.random.default_rng(0)
    found = []
    for center, width, p in ((0.9, 0.05, 0.4), (0.9, 0.05, 0.9), (0.7, 0.1, 0.7), (0.5, 0.1, 0.5), (0.1, 0.05, 0.1)):
        logits = -0.5 * ((levels - center) / width) ** 2
        group, counterfactual = (
            estimators.confidence_gradient_noise(
                ObjectiveConfig(**CENTERED | {"confidence_baseline": name}), p, logits, levels, 8, 3000, rng
            )
            for name in ("group", "counterfactual")
        )
        unbiased = group.variance * (8 / 7) ** 2  # the group's mean contains the response itself
        found.append({"says": center, "accuracy": p, "variance_ratio": counterfactual.variance / unbiased})
    return {"group_size": 8, "rows": found}


def write_theory(out: Path, seeds: int = 4, steps: int = 1200) -> dict[str, Any]:
    """Write ``theory.json`` and its figures in ``out``; the drift needs the second world's records there."""
    out.mkdir(parents=True, exist_ok=True)
    found = {"conflict": conflict(2000), "properness": proper(seeds, steps), "noise": noise()}
    if (out / RECORDS).is_file():
        runs = rows(out / RECORDS)[0]
        found["drift"] = drift_of_run(runs["dcpo"]["test"], runs["base"]["test"])
        draw_drift(found["drift"], runs["dcpo"]["test"].confidence, out / "theory_drift.png")
    write_json(out / "theory.json", found)
    draw_properness(found["properness"], out / "theory_properness.png")
    return found


def draw_drift(found: dict[str, Any], stated: np.ndarray, path: Path) -> None:
    """Draw the drift of the stated confidence, and what the trained run states."""
    with figure(path, columns=2, width=4.6) as (drift, histogram):
        drift.plot(found["confidence"], found["drift"], color=PALETTE[0], label="paper: L1, lambda 0.5, group std")
        drift.plot(found["confidence"], found["drift_brier"], color=PALETTE[2], label="Brier, lambda 0, mean only")
        drift.axhline(0, color="#777777", lw=0.8)
        for point in found["stable"]:
            drift.axvline(point, color=PALETTE[0], ls=":", lw=1)
        drift.axvline(found["accuracy"], color="#777777", ls="--", lw=1, label="accuracy")
        drift.set(xlabel="stated confidence m", ylabel="E[A_c (c - m)]")
        drift.legend(fontsize=6.5)
        histogram.hist(stated[~np.isnan(stated)], bins=np.linspace(0, 1, 51), color=PALETTE[0])
        for point in found["stable"]:
            histogram.axvline(point, color="#000000", ls=":", lw=1)
        histogram.axvline(found["accuracy"], color="#777777", ls="--", lw=1)
        histogram.set(xlabel="confidence stated by the trained run", ylabel="test responses")


def draw_properness(found: dict[str, Any], path: Path) -> None:
    """Draw the best confidence of each score, and where tabular training ends, against p."""
    with figure(path, columns=2, width=4.6) as (optimum, settled):
        for name, values in found["optimum"].items():
            if name.startswith(("l1", "brier, lambda 0.5")):
                optimum.plot(found["p"], values, "o-", ms=3, label=name)
        for name, end in found["settles"].items():
            settled.plot(found["p"], end["mean"], "o-", ms=3, label=name)
        for axes, label in ((optimum, "best confidence, G = 8"), (settled, "confidence after training")):
            axes.plot([0, 1], [0, 1], ":", color="#777777", lw=1)
            axes.set(xlabel="p", ylabel=label, xlim=(0, 1), ylim=(-0.02, 1.02))
            axes.legend(fontsize=6, loc="lower right")
