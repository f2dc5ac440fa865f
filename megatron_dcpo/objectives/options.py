"""The options of every objective: what a user may set, the presets, and the resolved form the formulas read.

An option left unset (``None``) takes its value from the first layer that names it: the method's own defaults, the
preset, the preset ``paper``. A block option ``X`` (``weight``, ``clip_low``, ...) speaks for both blocks;
``X_reasoning`` and ``X_confidence`` speak for one and win over ``X`` of the same layer.
``docs/algorithms.md`` lists every option with its formula and the test that proves it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megatron_dcpo.errors import UserError

Preset = Literal["paper", "verl_compat", "dcpo_proper"]
Score = Literal["l1", "brier", "log", "spherical"]
Normalization = Literal["std", "mean", "none"]
ConfidenceNormalization = Normalization | Literal["batch_std"]
Placement = Literal["confidence", "reasoning", "both", "sentinel"]
Aggregation = Literal["sequence_mean", "token_mean", "block_mean"]
Fallback = Literal["eos", "none", "last_two"]
MarkerBlock = Literal["confidence", "reasoning"]
Baseline = Literal["group", "counterfactual"]
ConfidenceGradient = Literal["sampled", "digits"]

Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ClipLow = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Clamp = Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ObjectiveConfig:
    """Section ``objective`` of a run's configuration. ``None`` means: as the method and the preset have it."""

    name: str = "dcpo"
    preset: Preset = "paper"
    # Rewards
    lam: Unit | None = None
    leave_one_out: bool | None = None
    calibration_loss: Score | None = None
    score_clamp: Clamp | None = None
    malformed_penalty: Finite | None = None
    malformed_placement: Placement | None = None
    fallback: Fallback | None = None
    marker_block: MarkerBlock | None = None
    w: NonNegative | None = None
    variant: Literal["canonical", "original"] | None = None
    tokens: Literal["all", "confidence"] | None = None
    beta: NonNegative | None = None
    one_minus_c_clamp: Clamp | None = None
    # Advantages
    advantage_normalization: Normalization | None = None
    advantage_normalization_reasoning: Normalization | None = None
    advantage_normalization_confidence: ConfidenceNormalization | None = None
    confidence_baseline: Baseline | None = None
    confidence_gradient: ConfidenceGradient | None = None
    digit_damping: NonNegative | None = None
    ddof: Literal[0, 1] | None = None
    eps: NonNegative | None = None
    # Loss
    loss_aggregation: Aggregation | None = None
    mask_truncated: bool | None = None
    weight: NonNegative | None = None
    weight_reasoning: NonNegative | None = None
    weight_confidence: NonNegative | None = None
    clip_low: ClipLow | None = None
    clip_low_reasoning: ClipLow | None = None
    clip_low_confidence: ClipLow | None = None
    clip_high: NonNegative | None = None
    clip_high_reasoning: NonNegative | None = None
    clip_high_confidence: NonNegative | None = None
    dual_clip: NonNegative | None = None
    kl_coef: NonNegative | None = None
    kl_coef_reasoning: NonNegative | None = None
    kl_coef_confidence: NonNegative | None = None
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    entropy_coef: Finite | None = None
    entropy_coef_reasoning: Finite | None = None
    entropy_coef_confidence: Finite | None = None
    tis_level: Literal["none", "token", "sequence"] | None = None
    tis_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def __post_init__(self) -> None:
        from megatron_dcpo.objectives import METHODS  # the registry imports the methods, which import this file

        if self.name not in METHODS:
            near = difflib.get_close_matches(self.name, METHODS, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown objective {self.name!r}; did you mean {near!r}? ({', '.join(METHODS)})")
        if self.dual_clip is not None and 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be 0 (off) or greater than 1, not {self.dual_clip}")

    def resolve(self) -> Options:
        """Fill every unset option: explicit value, else method default, else preset, else preset ``paper``."""
        from megatron_dcpo.objectives import METHODS

        layers = (dataclasses.asdict(self), METHODS[self.name].defaults(self), PRESETS[self.preset], PRESETS["paper"])
        values: dict[str, Any] = {"name": self.name, "preset": self.preset}
        for field in dataclasses.fields(Options):
            if field.name in BLOCK_OPTIONS:
                values[field.name] = Blocks(*(_first(layers, f"{field.name}_{block}", field.name) for block in BLOCKS))
            elif field.name not in values:
                values[field.name] = _first(layers, field.name)
        options = Options(**values)
        if options.confidence_gradient == "digits" and options.advantage_normalization.confidence == "std":
            raise UserError(
                "objective.confidence_gradient=digits does not know a group's standard deviation; set "
                "objective.advantage_normalization_confidence to batch_std, mean or none, or confidence_gradient to sampled"
            )
        return options


class Blocks(NamedTuple):
    """One value per block."""

    reasoning: Any
    confidence: Any


@dataclasses.dataclass(frozen=True)
class Options:
    """:class:`ObjectiveConfig` with every value filled in; this is what the formulas read.

    Args (symbols of the paper in brackets):
        lam: share of the group accuracy in the target of the confidence [lambda].
        leave_one_out: the group accuracy of response i leaves R_i out.
        calibration_loss: proper (or not: ``l1``) score of the confidence against its target.
        score_clamp: ``log`` scores c clamped to [score_clamp, 1 - score_clamp].
        malformed_penalty, malformed_placement: what a response without a valid confidence gets, and where.
        fallback: confidence block of a response without a marker.
        marker_block: which block the marker's tokens belong to.
        w: weight of the calibration reward in the scalar reward of ``coupled`` and ``rlcr``.
        variant: ``rlcr`` only. tokens: ``posthoc`` only. beta, one_minus_c_clamp: ``ccgspg`` only.
        advantage_normalization, ddof, eps: (x - mean) / (std_ddof + eps), x - mean, or x; of the confidence block also
            ``batch_std``, x - mean over the root mean square of the whole mini-batch (``dcpo`` and ``posthoc``).
        confidence_baseline: what R_c is compared with, the other responses' R_c or, ``counterfactual``, the score their
            confidences would have had on this response's target (``dcpo`` only).
        confidence_gradient: what trains the decimals of a valid confidence, A_c of the sampled digit or, ``digits``, the
            scores of all digits (``dcpo`` only).
        digit_damping: of the natural gradient over the digits, in units of the probability 1/K of each of K choices.
        loss_aggregation: 1/(N_sequences |o_i|), 1/N_tokens, or 1/N_block per token; N are global counts.
        mask_truncated: truncated responses train nothing (they still count in the group statistics).
        weight: multiplies all terms of a block's loss. clip_low, clip_high: the ratio stays in [1-low, 1+high].
        dual_clip: bound of the loss for negative advantages, in multiples of -A; 0 is off.
        kl_coef, kl_estimator: KL loss against the reference policy. entropy_coef: entropy bonus.
        tis_level, tis_cap: truncated importance sampling between engine and trainer.
    """

    name: str
    preset: Preset
    lam: float
    leave_one_out: bool
    calibration_loss: Score
    score_clamp: float
    malformed_penalty: float
    malformed_placement: Placement
    fallback: Fallback
    marker_block: MarkerBlock
    w: float
    variant: Literal["canonical", "original"]
    tokens: Literal["all", "confidence"]
    beta: float
    one_minus_c_clamp: float
    advantage_normalization: Blocks
    confidence_baseline: Baseline
    confidence_gradient: ConfidenceGradient
    digit_damping: float
    ddof: int
    eps: float
    loss_aggregation: Aggregation
    mask_truncated: bool
    weight: Blocks
    clip_low: Blocks
    clip_high: Blocks
    dual_clip: float
    kl_coef: Blocks
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: Blocks
    tis_level: Literal["none", "token", "sequence"]
    tis_cap: float


BLOCKS = Blocks._fields
BLOCK_OPTIONS = ("advantage_normalization", "weight", "clip_low", "clip_high", "kl_coef", "entropy_coef")

PRESETS: dict[str, dict[str, Any]] = {
    # The paper where it is explicit; the intent of the released code where it is silent.
    "paper": {
        "lam": 0.5,
        "leave_one_out": False,
        "calibration_loss": "l1",
        "score_clamp": 0.01,
        "malformed_penalty": -1.0,
        "malformed_placement": "confidence",
        "fallback": "eos",
        "marker_block": "confidence",
        "w": 1.0,
        "variant": "canonical",
        "tokens": "all",
        "beta": 0.01,
        "one_minus_c_clamp": 1e-4,
        "advantage_normalization": "std",
        "confidence_baseline": "group",
        "confidence_gradient": "sampled",
        "digit_damping": 0.01,
        "ddof": 0,
        "eps": 1e-6,
        "loss_aggregation": "sequence_mean",
        "mask_truncated": False,
        "weight": 1.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 0.0,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
        "tis_level": "none",
        "tis_cap": 2.0,
    },
    # The intent of the released code with its four defects repaired. Its KL loss needs a reference policy, so it
    # stays an explicit choice (kl_coef: 0.001).
    "verl_compat": {
        "calibration_loss": "brier",
        "malformed_placement": "sentinel",
        "fallback": "last_two",
        "ddof": 1,
        "loss_aggregation": "token_mean",
        "dual_clip": 3.0,
    },
    # What the paper's theorem asks for: a strictly proper score; the response's own label, since the confidence sees the
    # response. The noise of the single label, which lam was to reduce, goes with the counterfactual baseline and without
    # a bias. One scale for all groups: a group's own std would turn the tiny differences of a saturated group into a push
    # to 0 or 1; none at all would let the small rewards near the optimum be drowned by the accuracy's. All digits at once:
    # what is hardly ever said is tried all the same, without the noise of sampling it. And the marker answers for the
    # correctness: where A_c trains it, giving up early with a confidence of 0 is rewarded.
    "dcpo_proper": {
        "lam": 0.0,
        "calibration_loss": "brier",
        "advantage_normalization_confidence": "batch_std",
        "confidence_baseline": "counterfactual",
        "confidence_gradient": "digits",
        "marker_block": "reasoning",
    },
}


def _first(layers: tuple[Mapping[str, Any], ...], *names: str) -> Any:
    for layer in layers:
        for name in names:
            if layer.get(name) is not None:
                return layer[name]
    raise KeyError(names[0])
