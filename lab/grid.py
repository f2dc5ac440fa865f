"""The grid of the calibration lab: which methods, on which policies, with which seeds; one cell is one training run.

Everything a method changes stands in ``METHODS`` as overrides of one recipe, ``examples/lab/recipe.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_dcpo.errors import UserError, nearest

CENTRED_BRIER = (
    "objective.calibration_loss=brier",
    "objective.advantage_normalization_confidence=mean",
    "objective.weight_confidence=8",
)

PROPER = ("objective.preset=dcpo_proper", "objective.entropy_coef_confidence=0.02")
ADAPTER = (
    "objective.preset=dcpo_proper",
    "objective.confidence_parameters=adapter",
    "model.adapter.rank=16",
    "model.adapter.alpha=32",
    "optimizer.adapter_lr=2e-3",
)
TOKENS = (  # as examples/quickstart/dcpo_adapter.yaml
    "model.adapter.rank=4", "model.adapter.alpha=8", "judging.confidence_tokens=101", "optimizer.adapter_lr=2e-3",
)  # fmt: skip
BRIER_LAM0 = ("objective.calibration_loss=brier", "objective.lam=0")
MEAN = "objective.advantage_normalization=mean"


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    ``confidence``: the kind that the row of the method reports. ``start``: the method whose trained policy it
    starts from. ``kind``: ``base`` is not trained, ``confclass`` fits a classifier on its start's responses.
    """

    title: str
    overrides: tuple[str, ...] = ()
    kind: Literal["base", "train", "confclass"] = "train"
    confidence: Literal["verbal", "token", "posthoc"] = "verbal"
    start: str | None = None
    share_of_steps: float = 1.0


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "base": Method("base", kind="base"),
        "grpo": Method("GRPO", ("objective.name=grpo",)),
        "confclass": Method("ConfClass", kind="confclass", confidence="posthoc", start="grpo"),
        "rlcr": Method("RLCR", ("objective.name=rlcr",)),
        "ccgspg": Method("CCGSPG", ("objective.name=ccgspg",), confidence="token"),
        "coupled": Method("coupled (w/o decoupling)", ("objective.name=coupled",)),
        "posthoc": Method(
            "post-hoc (w/o on-policy)", ("objective.name=posthoc",), start="grpo", share_of_steps=2 / 3
        ),  # the paper adds 80 steps to 120
        "dcpo": Method("DCPO"),
        "dcpo_i": Method("DCPO-I (w/o group)", ("objective.lam=0",)),
        "dcpo_g": Method("DCPO-G (w/o instance)", ("objective.lam=1",)),
        "dcpo_proper": Method("DCPO-proper (ours)", PROPER),
        # lambda sweep of the paper's DCPO; 0, 0.5 and 1 are dcpo_i, dcpo and dcpo_g
        "dcpo_lam025": Method("DCPO, lambda 0.25", ("objective.lam=0.25",)),
        "dcpo_lam075": Method("DCPO, lambda 0.75", ("objective.lam=0.75",)),
        # towards the improved preset one step at a time, and that without one of its parts
        "brier_lam05": Method("Brier, mean-only A_c, lambda 0.5", CENTRED_BRIER),
        "brier_lam0": Method("Brier, mean-only A_c, lambda 0", (*CENTRED_BRIER, "objective.lam=0")),
        "brier_counterfactual": Method(
            "Brier, mean-only A_c, lambda 0, counterfactual",
            (*CENTRED_BRIER, "objective.lam=0", "objective.confidence_baseline=counterfactual"),
        ),
        "proper_sampled": Method("DCPO-proper, sampled digits", (*PROPER, "objective.confidence_gradient=sampled")),
        "proper_marker": Method("DCPO-proper, A_c on the marker", (*PROPER, "objective.marker_block=confidence")),
        "proper_plain": Method("DCPO-proper, no entropy bonus", ("objective.preset=dcpo_proper",)),
        # the referee's: a confidence with parameters of its own, or without any; authors' settings; the ladder from coupled
        # to decoupled, L1 or Brier, std or mean, with everything else equal (coupled, dcpo: L1, std)
        "adapter": Method("adapter, text and log-probs", (*ADAPTER, "objective.confidence_sees=logprobs")),
        "adapter_tokens": Method(
            "adapter, text and log-probs, tokens of its own",
            (*ADAPTER[:2], *TOKENS, "objective.confidence_sees=logprobs"),
        ),
        "adapter_text": Method("adapter, text", ADAPTER),
        "dcpo_reasoning": Method("DCPO, confidence not trained", ("objective.weight_confidence=0",)),
        "rlcr_authors": Method("RLCR, authors' settings", ("objective.name=rlcr", "objective.variant=original")),
        "ccgspg_unclipped": Method(
            "CCGSPG, gradients not clipped", ("objective.name=ccgspg", "optimizer.clip_grad=0"), confidence="token"
        ),
        "coupled_mean": Method("coupled, mean only", ("objective.name=coupled", MEAN)),
        "dcpo_mean": Method("DCPO, mean only", (MEAN,)),
        "coupled_brier": Method("coupled, Brier, lambda 0", ("objective.name=coupled", *BRIER_LAM0)),
        "dcpo_brier": Method("DCPO, Brier, lambda 0", BRIER_LAM0),
        "coupled_brier_mean": Method(
            "coupled, Brier, lambda 0, mean only", ("objective.name=coupled", *BRIER_LAM0, MEAN)
        ),
        "dcpo_brier_mean": Method("DCPO, Brier, lambda 0, mean only", (*BRIER_LAM0, MEAN)),
    }
)
MAIN = ("base", "dcpo_proper", "dcpo", "grpo", "rlcr", "coupled", "ccgspg", "dcpo_i", "dcpo_g", "posthoc", "confclass")
SWEEP = (
    "proper_sampled",
    "proper_marker",
    "proper_plain",
    "dcpo_lam025",
    "dcpo_lam075",
    "brier_counterfactual",
    "brier_lam05",
    "brier_lam0",
)
TRANSFER = ("base", "grpo", "dcpo", "dcpo_proper")
FAMILIES = ("qwen3", "llama", "large")


@dataclass(frozen=True)
class Cell:
    """One method on one starting policy with one seed (of training and of evaluation)."""

    family: str  # or a pretraining of one: large.2
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}/{self.method}/seed{self.seed}"

    @property
    def needs(self) -> Cell | None:
        """The cell whose policy this one starts from."""
        start = METHODS[self.method].start
        return Cell(self.family, start, self.seed) if start else None


def grid(seeds: Sequence[int], families: Sequence[str] = FAMILIES) -> list[Cell]:
    """All cells, those that matter most first: the main table seed by seed, then sweeps, then other policies."""
    cells = [Cell("qwen3", method, seed) for seed in seeds for method in MAIN]
    cells += [Cell("qwen3", method, seed) for seed in seeds for method in SWEEP]
    cells += [Cell(family, method, seed) for family in FAMILIES[1:] for seed in seeds for method in TRANSFER]
    return [cell for cell in cells if cell.family in families]


def select(cells: Sequence[Cell], methods: str | None) -> list[Cell]:
    """The cells of ``methods`` (comma separated; all if None) and those they start from. Raises :class:`UserError`."""
    if not methods:
        return list(cells)
    names = known([name.strip() for name in methods.split(",") if name.strip()])
    wanted = set(names) | {start for name in names if (start := METHODS[name].start)}
    return [cell for cell in cells if cell.method in wanted]


def known(names: Sequence[str]) -> Sequence[str]:
    """``names``, if all are methods; raises :class:`UserError`."""
    for name in names:
        if name not in METHODS:
            near = nearest(name, METHODS, cutoff=0.0)
            raise UserError(f"unknown method {name!r}; did you mean {near!r}? ({', '.join(METHODS)})")
    return names
