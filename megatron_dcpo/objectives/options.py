"""The options of every objective, declared once: :class:`ObjectiveConfig`, whose defaults are the
paper's settings.

The presets (``presets.py``) and the methods' own defaults override these. A block option ``X``
(``weight``, ``kl_coef``, ...) is short for ``X_reasoning`` and ``X_confidence``; a specific name
takes precedence over the short one. ``docs/algorithms.md`` lists every option with its formula and
the test that proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
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


# Own options of the package's methods, which may stand in the section without ``options``.
OWN_OPTIONS = ("w", "variant", "tokens", "beta", "confidence_baseline", "abstain_penalty")


class ObjectiveConfig(BaseModel):
    """The method, and what its formulas read. The text below an option is its meaning
    (``config/reference.py``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "dcpo"
    """The method: grpo, dcpo, coupled, rlcr, ccgspg, posthoc, or one of yours, my_method.py:METHOD.
    """
    preset: Preset = "paper"
    """Other defaults for all options of the section (docs/algorithms.md#6-presets)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options; the package's methods may have theirs in the section itself."""
    lam: Unit = 0.5
    """Share of the group's accuracy in the target of the confidence, next to the response's own
    label [lambda].
    """
    calibration_loss: Literal["l1", "brier", "log", "spherical"] = "l1"
    """Score of the confidence against its target; all but l1 are proper."""
    malformed_penalty: Finite = -1.0
    """Reward of a response without a valid confidence, where malformed_placement puts it."""
    malformed_placement: Literal["confidence", "reasoning", "both", "sentinel"] = "confidence"
    """Reward that malformed_penalty is for: it replaces R_c, is added to R, or both; sentinel
    scores c = -1.
    """
    fallback: Literal["eos", "none", "last_two"] = "eos"
    """Confidence block of a response without a confidence tag: its EOS, no token, or its last two.
    """
    marker_block: Literal["confidence", "reasoning"] = "confidence"
    """Block that the tokens of the confidence tag belong to."""
    advantage_normalization_reasoning: Normalization = "std"
    """Advantage of x in its group: (x - mean) / (std + eps), x - mean, or x (none); reasoning
    block.
    """
    advantage_normalization_confidence: ConfidenceNormalization = "std"
    """Normalization for the confidence block; batch_std (dcpo, posthoc): x - mean over its root
    mean square in the mini-batch.
    """
    ddof: Literal[0, 1] = 0
    """What is subtracted from G in the standard deviation of a group: 0 population, 1 sample."""
    eps: NonNegative = 1e-6
    """Added to the standard deviation that an advantage is divided by."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before max_response_length over which R falls by up to overlong_penalty (0: off;
    DAPO).
    """
    overlong_penalty: NonNegative = 1.0
    """What a response of max_response_length loses of its R, with overlong_buffer."""
    loss_aggregation: Literal["sequence_mean", "token_mean", "block_mean", "constant"] = (
        "sequence_mean"
    )
    """Weight of a token: 1/(N_sequences |o_i|), 1/N_tokens, 1/N_block, or 1/(N_sequences
    max_response_length) (constant, Dr.GRPO); N counts the whole mini-batch.
    """
    max_response_length: Annotated[int, Field(ge=0)] = 0
    """Tokens that overlong_buffer and loss_aggregation=constant are relative to (0:
    rollout.max_response_length).
    """
    block_groups: Literal["all", "signal"] = "all"
    """Groups that each block trains on and whose responses its denominators count: all of the
    mini-batch, or those with a signal in that block (the default of rollout.filter_groups).
    """
    mask_truncated: bool = False
    """Truncated responses train nothing; they still count in the statistics of their group."""
    weight_reasoning: NonNegative = 1.0
    """Factor of all terms of the loss on reasoning tokens."""
    weight_confidence: NonNegative = 1.0
    """Factor of all terms of the loss on confidence tokens."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability: of a token, or its geometric mean over the response (GSPO).
    """
    clip: Literal["ppo", "cispo"] = "ppo"
    """A clipped ratio stops the gradient (ppo), or is the weight of the gradient of the log-prob
    (cispo).
    """
    clip_low: ClipLow = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: NonNegative = 0.0
    """Largest loss of a token with a negative advantage A, in multiples of -A; above 1 (0: off)."""
    kl_coef_reasoning: NonNegative = 0.0
    """Factor of the KL loss against the starting policy on reasoning tokens."""
    kl_coef_confidence: NonNegative = 0.0
    """Factor of the KL loss against the starting policy on confidence tokens."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Gradient of the KL loss where the policy sampled: none, of KL(policy || reference), of
    KL(reference || policy).
    """
    teacher: str = ""
    """Model with the policy's tokenizer that is distilled, with a distill_coef: the directory of a
    Hugging Face checkpoint, or the address of a vLLM server (empty: none).
    """
    distill_coef_reasoning: NonNegative = 0.0
    """Factor of log pi_teacher - log pi_old, which is added to the advantage of a reasoning token.
    """
    distill_coef_confidence: NonNegative = 0.0
    """The same on confidence tokens; it draws the confidence to the teacher's, which is about the
    teacher's answers.
    """
    entropy_coef_reasoning: Finite = 0.0
    """Factor of the entropy bonus on reasoning tokens."""
    entropy_coef_confidence: Finite = 0.0
    """Factor of the entropy bonus on confidence tokens."""
    entropy_target: NonNegative = 0.0
    """Entropy of the reasoning in nats, up to which an entropy_coef_reasoning acts that adapts to
    it (0: off).
    """
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs of the sampled tokens the ratio divides by; engine saves the forward pass
    before several updates.
    """
    tis_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weights between engine and trainer: of a token, a sequence, or its geometric mean.
    """
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """Importance weights outside [tis_floor, tis_cap] are brought there, or train nothing."""
    tis_floor: NonNegative = 0.0
    """Least importance weight; below tis_cap."""
    tis_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Largest importance weight."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        expanded: dict[str, Any] = {"name": "dcpo", "preset": "paper"}
        expanded.update(expand_blocks(values))
        own_options = {name: expanded.pop(name) for name in OWN_OPTIONS if name in expanded}
        if own_options:
            expanded["options"] = {**(expanded.get("options") or {}), **own_options}
        return expanded

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be 0 (off) or greater than 1, not {self.dual_clip}")
        if self.dual_clip and self.clip == "cispo":
            raise ValueError("dual_clip goes with clip=ppo: cispo has no unclipped term to bound")
        if self.entropy_target and self.entropy_coef_reasoning < 0:
            raise ValueError(
                "entropy_target needs entropy_coef_reasoning >= 0, the coefficient that it begins "
                "with"
            )
        if self.old_logprobs == "engine" and self.tis_level != "none":
            raise ValueError(
                "old_logprobs=engine goes with tis_level=none: its ratio is against the engine "
                "already"
            )
        if self.tis_floor >= self.tis_cap:
            raise ValueError(f"tis_floor={self.tis_floor:g} must be below tis_cap={self.tis_cap:g}")
        return self

    @property
    def teacher_is_served(self) -> bool:
        """Return whether the teacher is behind a server, and none of its weights are here."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def teacher_directory(self) -> str:
        """Return the directory of a teacher whose weights are on these devices; empty: of none."""
        return "" if self.teacher_is_served else self.teacher

    @property
    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by the user or by
        :func:`megatron_dcpo.objectives.resolve`.
        """
        explicit = {}
        for name in type(self).model_fields:
            if name in self.model_fields_set:
                explicit[name] = getattr(self, name)
        return explicit

    def changed(self, **options: object) -> ObjectiveConfig:
        """Return this configuration with other ``options``, checked; ``None`` unsets one."""
        own_options = dict(self.options)
        for name in OWN_OPTIONS:
            if name in options:
                own_options[name] = options.pop(name)
        values = self.explicit
        values.update(expand_blocks(options, keep_unset=True))
        values["options"] = {
            name: value for name, value in own_options.items() if value is not None
        }
        return ObjectiveConfig(**values)

    @property
    def weights(self) -> tuple[float, float]:
        """Return the factors of the two blocks, in the order of :data:`BLOCKS`."""
        return self.weight_reasoning, self.weight_confidence

    def blocks(self, option: str) -> tuple[Any, ...]:
        """Return the values of a block option, in the order of :data:`BLOCKS`."""
        return tuple(getattr(self, f"{option}_{block}") for block in BLOCKS)


def option_names() -> tuple[str, ...]:
    """Return every name that a user may write in the section, with the short names of the block
    options and the methods' own options.
    """
    return (*ObjectiveConfig.model_fields, *BLOCK_OPTIONS, *OWN_OPTIONS)


def expand_blocks(values: Mapping[str, Any], keep_unset: bool = False) -> dict[str, Any]:
    """Replace ``X`` by ``X_reasoning`` and ``X_confidence``, unless these are given. ``None`` means
    not set.
    """
    expanded = {name: value for name, value in values.items() if keep_unset or value is not None}
    for option in BLOCK_OPTIONS:
        if option in expanded:
            value = expanded.pop(option)
            both_blocks = {f"{option}_{block}": value for block in BLOCKS}
            expanded = {**both_blocks, **expanded}
    return expanded


# The options that methods read. Every method reads COMMON.
COMMON = frozenset(
    {
        "name",
        "preset",
        "fallback",
        "marker_block",
        "loss_aggregation",
        "mask_truncated",
        "kl_estimator",
        "max_response_length",
        "entropy_target",
        "weight_reasoning",
        "weight_confidence",
        "kl_coef_reasoning",
        "kl_coef_confidence",
        "entropy_coef_reasoning",
        "entropy_coef_confidence",
    }
)
CLIPPED_LOSS = frozenset(
    {
        "block_groups",
        "ratio",
        "clip",
        "clip_low",
        "clip_high",
        "dual_clip",
        "old_logprobs",
        "tis_level",
        "tis_mode",
        "tis_floor",
        "tis_cap",
        "teacher",
        "distill_coef_reasoning",
        "distill_coef_confidence",
    }
)
CALIBRATION_REWARD = frozenset(
    {"lam", "calibration_loss", "malformed_penalty", "malformed_placement"}
)
REASONING_ADVANTAGE = frozenset(
    {"advantage_normalization_reasoning", "ddof", "eps", "overlong_buffer", "overlong_penalty"}
)
CONFIDENCE_ADVANTAGE = frozenset(("advantage_normalization_confidence", "ddof", "eps"))


def normalization_of_the_confidence(
    options: ObjectiveConfig, reads: Set[str]
) -> tuple[str, str] | None:
    """Return the option, and its value, by which the advantages are normalized that a stated
    confidence gets: its own, or those of the whole response. None if no reward of the method
    depends on it.
    """
    for name, needs in (
        ("advantage_normalization_confidence", CONFIDENCE_ADVANTAGE),
        ("advantage_normalization_reasoning", CALIBRATION_REWARD),
    ):
        if name in reads and needs & reads:
            return name, getattr(options, name)
    return None


def ignored_options(explicit: Mapping[str, Any], read: Iterable[str]) -> list[str]:
    """Return the options of ``explicit`` that are not in ``read``. A short name is read if one of
    its blocks is.
    """
    read = set(read)
    ignored = []
    for name, value in explicit.items():
        option, _, block = name.rpartition("_")
        other_block = "confidence" if block == "reasoning" else "reasoning"
        twin = f"{option}_{other_block}"
        short = option in BLOCK_OPTIONS and twin in read and explicit.get(twin) == value
        if name not in read and not short:
            ignored.append(name)
    return ignored
