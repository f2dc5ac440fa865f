"""The theory of the paper on cases small enough to be exact, as numbers (``theory.json``) and figures. Minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab.publish import write_json
from lab.theory import estimators, mode_collapse, scoring_rules
from lab.theory.gradient_conflict import LOSSES, decoupled_conflict, fisher_conflict
from lab.theory.tag_credit import share_that_gives_up
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure
from megatron_dcpo.objectives import ObjectiveConfig
from megatron_dcpo.objectives.options import Preset

SAMPLED: dict[str, Any] = {"preset": "dcpo_proper", "confidence_gradient": "sampled"}  # a table of levels has no digits
CENTRED: dict[str, Any] = {  # one group at a time has no batch to take the scale from: a weight stands in for it
    **SAMPLED, "advantage_normalization_confidence": "mean", "weight_confidence": 8.0,
}  # fmt: skip
OBJECTIVES = {
    "L1, lambda 0 (DCPO-I)": ObjectiveConfig(lam=0.0),
    "L1, lambda 0.5 (paper)": ObjectiveConfig(),
    "L1, lambda 1 (DCPO-G)": ObjectiveConfig(lam=1.0),
    "Brier, std": ObjectiveConfig(lam=0.0, calibration_loss="brier"),
    "Brier, mean": ObjectiveConfig(**CENTRED, confidence_baseline="group"),
    "log, mean": ObjectiveConfig(**CENTRED, confidence_baseline="group", calibration_loss="log"),
    "Brier, mean, counterfactual": ObjectiveConfig(**CENTRED),
    "Brier, batch_std, counterfactual (dcpo_proper)": ObjectiveConfig(**SAMPLED),
}
GIVING_UP: dict[str, Preset] = {"DCPO": "paper", "DCPO-proper": "dcpo_proper"}
PROBABILITIES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
GROUP_SIZES = (1, 2, 4, 8, 16, 32)


def measure(seeds: int = 4, steps: int = 1200) -> dict[str, Any]:
    """All numbers of the theory."""
    return {
        "conflict": conflict(),
        "estimator": estimator(),
        "collapse": collapse_numbers(),
        "properness": proper(seeds, steps),
        "noise": noise(),
        "digits": digits(),
        "giving_up": giving_up(),
    }


def conflict() -> dict[str, Any]:
    """The identity's largest error over random policies, and the inner product along over- to under-confidence."""
    rng = np.random.default_rng(0)
    error, masked = 0.0, 0.0
    for _ in range(500):
        size = int(rng.integers(2, 12))
        logits, R, phi = rng.normal(0, 2, size), (rng.random(size) < 0.5).astype(float), rng.random(size)
        for loss in LOSSES:
            found = fisher_conflict(logits, R, phi, loss)
            error = max(error, abs(found.inner - found.identity) / max(1.0, abs(found.identity)))
    for _ in range(50):
        R = (rng.random(3) < 0.5).astype(float)
        levels = np.array([0.1, 0.4, 0.8, 1.0])
        masked = max(masked, abs(decoupled_conflict(rng.normal(0, 1, 3), rng.normal(0, 1, (3, 4)), R, levels)))
    R, phi = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0.9, 0.7, 0.8, 0.4])
    targets = np.linspace(0.02, 0.98, 49)
    along = [fisher_conflict(np.zeros(4), R, phi, "brier", float(t)) for t in targets]
    return {
        "policies": 500 * len(LOSSES),
        "largest_error_of_the_identity": error,
        "largest_inner_product_when_masked": masked,
        "confidence": along[0].confidence,
        "targets": targets.tolist(),
        "inner": [a.inner for a in along],
        "cosine": [a.cosine for a in along],
    }


def estimator() -> dict[str, Any]:
    """Variance of the group target and of the L1 subgradient, exact and sampled, at p = 0.3."""
    rng, p = np.random.default_rng(0), 0.3
    return {
        "p": p,
        "group_size": list(GROUP_SIZES),
        "target_variance": [estimators.target_variance(p, G) for G in GROUP_SIZES],
        "target_variance_sampled": [estimators.sampled_target_variance(p, G, 100_000, rng) for G in GROUP_SIZES],
        "subgradient_variance": {
            str(c): [estimators.subgradient_variance(c, p, G) for G in GROUP_SIZES] for c in (0.35, 0.6, 0.9)
        },
    }


def collapse_numbers(runs: int = 12, steps: int = 1500) -> dict[str, Any]:
    """Entropy and top probability of a tabular policy with five right answers of eight: exact flow, and GRPO's groups."""
    R = np.array([1.0] * 5 + [0.0] * 3)
    exact = mode_collapse.exact_flow(np.zeros(8), R, steps, 0.5)
    found: dict[str, Any] = {"right_answers": 5, "exact": {"entropy": exact.entropy.tolist()[::25]}}
    for G in (2, 8, 32):
        sampled = [
            mode_collapse.grpo_flow(np.zeros(8), R, steps, 0.5, G, np.random.default_rng(s)) for s in range(runs)
        ]
        found[f"G{G}"] = {
            "entropy": np.mean([t.entropy for t in sampled], 0).tolist()[::25],
            "top": np.mean([t.top for t in sampled], 0).tolist()[::25],
            "accuracy": np.mean([t.accuracy for t in sampled], 0).tolist()[::25],
        }
    return found


def proper(seeds: int, steps: int) -> dict[str, Any]:
    """Where the confidence should end (exact optimum) and where training ends (tabular policy, the trainer's advantages)."""
    optima = {
        f"{score}, lambda {lam:g}": [scoring_rules.optimum(score, lam, p, 8) for p in PROBABILITIES]
        for score in ("l1", "brier", "log")
        for lam in (0.0, 0.5, 1.0)
    }
    ends: dict[str, Any] = {}
    for name, objective in OBJECTIVES.items():
        runs = [
            scoring_rules.settle(
                objective, PROBABILITIES, group_size=8, groups=4, steps=steps, lr=0.2, rng=np.random.default_rng(seed)
            )
            for seed in range(seeds)
        ]
        means = np.array([[end.mean for end in run] for run in runs])
        ends[name] = {
            "mean": means.mean(0).tolist(),
            "bias": float(np.abs(means.mean(0) - PROBABILITIES).mean()),
            "spread_over_seeds": float(means.std(0).mean()),
        }
    near = np.array([0.98, 0.99, 0.97, 1.0, 0.99, 0.98, 0.99, 0.98])
    pushes = {
        name: [scoring_rules.saturated_push(objective, 1 - scale * (1 - near)) for scale in (10.0, 1.0, 0.1)]
        for name, objective in OBJECTIVES.items()
        if objective.advantage_normalization_confidence != "batch_std"  # there it depends on the rest of the batch
    }
    seen = {
        f"lambda {lam:g}": scoring_rules.optimum("brier", lam, 0.5, 8, q=0.95) for lam in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    return {
        "p": list(PROBABILITIES),
        "optimum": optima,
        "settles": ends,
        "push_of_a_saturated_group": {"distance_from_1": [0.15, 0.015, 0.0015], "largest_weighted_A_c": pushes},
        "optimum_when_the_response_shows_0.95_and_the_group_has_0.5": seen,
    }


def noise() -> dict[str, Any]:
    """Variance of the confidence gradient under the group's and the counterfactual baseline, by the stated confidence."""
    levels, rng = np.linspace(0, 1, 21), np.random.default_rng(0)
    rows = []
    for centre, width, p in ((0.9, 0.05, 0.4), (0.9, 0.05, 0.9), (0.7, 0.1, 0.7), (0.5, 0.1, 0.5), (0.1, 0.05, 0.1)):
        logits = -0.5 * ((levels - centre) / width) ** 2
        group, counterfactual = (
            estimators.confidence_gradient_noise(
                ObjectiveConfig(**CENTRED, confidence_baseline=name), p, logits, levels, 8, 3000, rng
            )
            for name in ("group", "counterfactual")
        )
        unbiased = group.variance * (8 / 7) ** 2  # the group's mean contains the response itself
        rows.append({"says": centre, "accuracy": p, "variance_ratio": counterfactual.variance / unbiased})
    return {"group_size": 8, "rows": rows}


def digits(steps: int = 1000, lr: float = 1.0) -> dict[str, Any]:
    """Which first digit training finds for problems that are right in 3.5 % of the cases, by the damping.

    ``start``: how often the lab's starting policy states each first digit of its 3x2 products, in five seeds' responses.
    """
    start, p = [0.002, 0.007, 0.024, 0.057, 0.073, 0.115, 0.16, 0.182, 0.153, 0.227], 0.035
    paths = {
        "sampled" if damping is None else f"{damping:g}": scoring_rules.first_digit(
            damping, p, start, steps=steps, lr=lr
        )
        for damping in (0.0, 0.01, 1.0, None)
    }
    levels = np.arange(10) / 10 + 0.05
    return {
        "p": p,
        "start": start,
        "confidence": {name: (path @ levels)[::20].tolist() for name, path in paths.items()},
        "first_digit_in_the_end": {name: int(path[-1].argmax()) for name, path in paths.items()},
    }


def giving_up(p: float = 0.35, steps: int = 400) -> dict[str, Any]:
    """Probability of giving up along training, with the marker in either block."""
    shared: dict[str, Any] = {"p": p, "start": 0.02, "steps": steps, "prompts": 16, "group_size": 8, "lr": 0.3}
    share = {
        f"{name}, marker: {block}": share_that_gives_up(
            ObjectiveConfig(preset=preset, marker_block=block), **shared, rng=np.random.default_rng(0)
        )[::10].tolist()
        for name, preset in GIVING_UP.items()
        for block in ("confidence", "reasoning")
    }
    return {**shared, "share": share}


def write_theory(out: Path, seeds: int = 4, steps: int = 1200) -> dict[str, Any]:
    """``theory.json`` and its figures in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    found = measure(seeds, steps)
    write_json(out / "theory.json", found)
    draw_conflict(found["conflict"], out / "theory_conflict.png")
    draw_estimator(found["estimator"], found["noise"], out / "theory_estimator.png")
    draw_collapse(found["collapse"], out / "theory_collapse.png")
    draw_properness(found["properness"], found["digits"], out / "theory_properness.png")
    draw_giving_up(found["giving_up"], out / "theory_giving_up.png")
    return found


def draw_conflict(found: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        axes.plot(found["targets"], found["inner"], color=PALETTE[0])
        axes.axhline(0, color="#777777", lw=0.8)
        axes.axvline(found["confidence"], color=PALETTE[1], ls="--", lw=1, label="mean confidence of the policy")
        axes.set(xlabel="accuracy the confidence should equal", ylabel="inner product, Fisher metric")
        axes.set_title("accuracy against calibration; left of the line: over-confident", fontsize=8)
        axes.legend()


def draw_estimator(found: dict[str, Any], noise: dict[str, Any], path: Path) -> None:
    with figure(path, columns=3) as (target, subgradient, ratio):
        target.loglog(found["group_size"], found["target_variance"], "-", label="p(1 - p)/G")
        target.loglog(found["group_size"], found["target_variance_sampled"], "o", ms=4, label="sampled")
        target.set(xlabel="G", ylabel="variance of the group accuracy")
        target.legend()
        for c, values in found["subgradient_variance"].items():
            subgradient.plot(found["group_size"], values, "o-", ms=3, label=f"c = {c}")
        subgradient.set(xlabel="G", ylabel=f"variance of sign(c - t), p = {found['p']}", xscale="log")
        subgradient.legend()
        rows = noise["rows"]
        ratio.bar(range(len(rows)), [row["variance_ratio"] for row in rows], color=PALETTE[2])
        ratio.set_xticks(range(len(rows)), [f"says {r['says']:g}\nis {r['accuracy']:g}" for r in rows])
        ratio.axhline(1, color="#777777", lw=0.8)
        ratio.set_ylabel("gradient variance,\ncounterfactual / group baseline")


def draw_collapse(found: dict[str, Any], path: Path) -> None:
    with figure(path, columns=2) as (entropy, top):
        for name, run in found.items():
            if name == "right_answers":
                continue
            steps = 25 * np.arange(len(run["entropy"]))
            entropy.plot(steps, run["entropy"], label="exact gradient" if name == "exact" else f"G = {name[1:]}")
            if "top" in run:
                top.plot(steps, run["top"], label=f"G = {name[1:]}")
        entropy.axhline(np.log(found["right_answers"]), color="#777777", ls=":", lw=1)
        entropy.set(xlabel="step", ylabel="entropy (nats)", ylim=(0, None))
        top.set(xlabel="step", ylabel="probability of the likeliest answer", ylim=(0, 1))
        entropy.legend()


def draw_properness(found: dict[str, Any], digits: dict[str, Any], path: Path) -> None:
    with figure(path, columns=3) as (optimum, settled, digit):
        for name, values in digits["confidence"].items():
            label = "the sampled digit, in expectation" if name == "sampled" else f"all digits, damping {name}"
            digit.plot(20 * np.arange(len(values)), values, label=label)
        digit.axhline(digits["p"], color="#777777", ls=":", lw=1)
        digit.set(xlabel="step", ylabel=f"mean confidence, p = {digits['p']:g}", ylim=(0, None))
        digit.legend(fontsize=6.5)
        for name, values in found["optimum"].items():
            if name.startswith(("l1", "brier, lambda 0.5")):
                optimum.plot(found["p"], values, "o-", ms=3, label=name)
        for name, end in found["settles"].items():
            settled.plot(found["p"], end["mean"], "o-", ms=3, label=name)
        for axes, label in ((optimum, "best confidence"), (settled, "confidence after training")):
            axes.plot([0, 1], [0, 1], ":", color="#777777", lw=1)
            axes.set(xlabel="p", ylabel=label, xlim=(0, 1), ylim=(-0.02, 1.02))
            axes.legend(fontsize=6.5, loc="lower right")


def draw_giving_up(found: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for name, values in found["share"].items():
            axes.plot(10 * np.arange(len(values)), values, label=name)
        axes.set(xlabel="step", ylabel="share of responses without reasoning", ylim=(0, 1))
        axes.legend()
