"""The options of every objective, declared once: :class:`ObjectiveConfig`, whose defaults are the paper's settings.

The presets (``presets.py``) and the methods' own defaults are overrides of these. A block option ``X`` (``weight``,
``kl_coef``, ...) is short for ``X_reasoning`` and ``X_confidence``; a specific name wins over the short one.
``docs/algorithms.md`` lists every option with its formula and the test that proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_dcpo.types import BLOCKS

Preset = Literal["paper", "verl_compat", "dcpo_proper"]
Normalization = Literal["std", "mean", "none"]
ConfidenceNormalization = Normalization | Literal["batch_std"]

Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ClipLow = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

BLOCK_OPTIONS = ("advantage_normalization", "weight", "kl_coef", "entropy_coef")


# Options that one or two of the package's methods declare as their own; they may stand in the section without ``options``.
OWN_OPTIONS = ("w", "variant", "tokens", "beta", "confidence_baseline", "abstain_penalty")


class ObjectiveConfig(BaseModel):
    """Section ``objective`` of a run's configuration; also, with every preset applied, what the formulas read.

    Args (symbols of the paper in brackets):
        name: the method, a key of ``objectives.METHODS`` or an import path, ``my_method.py:METHOD``; options: its own.
            preset: overrides of the defaults, see ``PRESETS``.
        lam: share of the group accuracy in the target of the confidence [lambda].
        calibration_loss: score of the confidence against its target; all but ``l1`` are proper.
        malformed_penalty, malformed_placement: what a response without a valid confidence gets, and where.
        fallback: confidence block of a response without a confidence tag.
        marker_block: which block the tokens of the confidence tag belong to.
        advantage_normalization, ddof, eps: (x - mean) / (std_ddof + eps), x - mean, or x; of the confidence block also
            ``batch_std``, x - mean over the root mean square of the whole mini-batch (``dcpo`` and ``posthoc``).
        overlong_buffer, overlong_penalty: a soft length penalty on the reasoning's reward, which falls from 0 to
            -overlong_penalty over the last ``overlong_buffer`` tokens before ``max_response_length``; 0 is off (DAPO).
        loss_aggregation: 1/(N_sequences |o_i|), 1/N_tokens, 1/N_block, or 1/(N_sequences max_response_length) per token
            (``constant``, Dr.GRPO); N are global counts. max_response_length: tokens; by default that of ``rollout``.
        mask_truncated: truncated responses train nothing (they still count in the group statistics).
        weight: multiplies all terms of a block's loss. ratio: pi / pi_old of a token, or its geometric mean over a response
            (GSPO). clip_low, clip_high: the ratio stays in [1-low, 1+high]. clip: outside, ``ppo`` stops the gradient and
            ``cispo`` goes on with the bound as the weight of grad log pi.
        dual_clip: bound of the loss for negative advantages, in multiples of -A; 0 is off.
        entropy_target, entropy_delta: the coefficient of the reasoning begins at ``entropy_coef_reasoning``, rises by
            ``entropy_delta`` after a step whose reasoning has less entropy than the target (nats; 0 is off), else falls, and
            acts while the entropy is at most the target (Skywork-OR1).
        kl_coef, kl_estimator: KL loss against the reference policy, by the gradient it has where the policy sampled: ``k1``
            none, ``k2`` that of KL(policy || reference), ``k3`` of KL(reference || policy). entropy_coef: entropy bonus.
        tis_level: importance weights between engine and trainer, of a token, a sequence, or its geometric mean. tis_mode:
            what lies outside [tis_floor, tis_cap] is brought there (``truncate``) or trains nothing (``mask``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "dcpo"
    preset: Preset = "paper"
    options: dict[str, Any] = Field(default_factory=dict)
    # Rewards
    lam: Unit = 0.5
    calibration_loss: Literal["l1", "brier", "log", "spherical"] = "l1"
    malformed_penalty: Finite = -1.0
    malformed_placement: Literal["confidence", "reasoning", "both", "sentinel"] = "confidence"
    fallback: Literal["eos", "none", "last_two"] = "eos"
    marker_block: Literal["confidence", "reasoning"] = "confidence"
    # Advantages
    advantage_normalization_reasoning: Normalization = "std"
    advantage_normalization_confidence: ConfidenceNormalization = "std"
    ddof: Literal[0, 1] = 0
    eps: NonNegative = 1e-6
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    overlong_penalty: NonNegative = 1.0
    # Loss
    loss_aggregation: Literal["sequence_mean", "token_mean", "block_mean", "constant"] = "sequence_mean"
    max_response_length: Annotated[int, Field(ge=0)] = 0
    mask_truncated: bool = False
    weight_reasoning: NonNegative = 1.0
    weight_confidence: NonNegative = 1.0
    ratio: Literal["token", "sequence"] = "token"
    clip: Literal["ppo", "cispo"] = "ppo"
    clip_low: ClipLow = 0.2
    clip_high: NonNegative = 0.28
    dual_clip: NonNegative = 0.0
    kl_coef_reasoning: NonNegative = 0.0
    kl_coef_confidence: NonNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef_reasoning: Finite = 0.0
    entropy_coef_confidence: Finite = 0.0
    entropy_target: NonNegative = 0.0
    entropy_delta: NonNegative = 0.005
    tis_level: Literal["none", "token", "sequence", "geometric"] = "none"
    tis_mode: Literal["truncate", "mask"] = "truncate"
    tis_floor: NonNegative = 0.0
    tis_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: Any) -> Any:
        defaults = {"name": "dcpo", "preset": "paper"}
        if not isinstance(values, Mapping):
            return values
        values = expand_blocks(values)
        own = {name: values.pop(name) for name in OWN_OPTIONS if name in values}
        return defaults | values | ({"options": {**(values.get("options") or {}), **own}} if own else {})

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be 0 (off) or greater than 1, not {self.dual_clip}")
        if self.dual_clip and self.clip == "cispo":
            raise ValueError("dual_clip goes with clip=ppo: cispo has no unclipped term to bound")
        if self.entropy_target and self.entropy_coef_reasoning < 0:
            raise ValueError("entropy_target needs entropy_coef_reasoning >= 0, the coefficient that it begins with")
        if self.tis_floor >= self.tis_cap:
            raise ValueError(f"tis_floor={self.tis_floor:g} must be below tis_cap={self.tis_cap:g}")
        return self

    @property
    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by the user or by :func:`megatron_dcpo.objectives.resolve`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def changed(self, **options: Any) -> ObjectiveConfig:
        """Return this configuration with other ``options``, checked; ``None`` unsets one."""
        own = self.options | {name: options.pop(name) for name in OWN_OPTIONS if name in options}
        own = {name: value for name, value in own.items() if value is not None}
        return ObjectiveConfig(**self.explicit | expand_blocks(options, keep_unset=True) | {"options": own})

    def blocks(self, option: str) -> tuple[Any, ...]:
        """Return the values of a block option, in the order of :data:`BLOCKS`."""
        return tuple(getattr(self, f"{option}_{block}") for block in BLOCKS)


def option_names() -> tuple[str, ...]:
    """Return every name a user may write in the section: short names of the block options and own options of the package's
    methods included."""
    return (*ObjectiveConfig.model_fields, *BLOCK_OPTIONS, *OWN_OPTIONS)


def expand_blocks(values: Mapping[str, Any], keep_unset: bool = False) -> dict[str, Any]:
    """Replace ``X`` by ``X_reasoning`` and ``X_confidence`` where these are not given; ``None`` means not set."""
    given = {name: value for name, value in values.items() if keep_unset or value is not None}
    for option in BLOCK_OPTIONS:
        if option in given:
            value = given.pop(option)
            given = {f"{option}_{block}": value for block in BLOCKS} | given
    return given


# What a method reads. Every method reads COMMON.
def _both(*options: str) -> set[str]:
    return {f"{option}_{block}" for option in options for block in BLOCKS}


COMMON = frozenset(
    {"name", "preset", "fallback", "marker_block", "loss_aggregation", "mask_truncated", "kl_estimator"}
    | {"max_response_length", "entropy_target", "entropy_delta"}
    | _both("weight", "kl_coef", "entropy_coef")
)
CLIPPED_LOSS = frozenset(("ratio", "clip", "clip_low", "clip_high", "dual_clip"))
CLIPPED_LOSS |= {"tis_level", "tis_mode", "tis_floor", "tis_cap"}
CALIBRATION_REWARD = frozenset(("lam", "calibration_loss", "malformed_penalty", "malformed_placement"))
REASONING_ADVANTAGE = frozenset(("advantage_normalization_reasoning", "ddof", "eps"))
REASONING_ADVANTAGE |= {"overlong_buffer", "overlong_penalty"}
CONFIDENCE_ADVANTAGE = frozenset(("advantage_normalization_confidence", "ddof", "eps"))


def ignored_options(explicit: Mapping[str, Any], read: Iterable[str]) -> list[str]:
    """Return the options of ``explicit`` that are not in ``read``. A short name counts where one of its blocks is read."""
    read = set(read)
    ignored = []
    for name, value in explicit.items():
        option, _, block = name.rpartition("_")
        twin = f"{option}_{'confidence' if block == 'reasoning' else 'reasoning'}"
        short = option in BLOCK_OPTIONS and twin in read and explicit.get(twin) == value
        if name not in read and not short:
            ignored.append(name)
    return ignored
