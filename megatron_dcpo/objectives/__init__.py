"""Methods: one file each, registered here. Judgements in, token advantages and loss contributions out.

| file | what it holds |
|---|---|
| `options.py` | every option with its default, the presets |
| `advantages.py` | a group, the hybrid target, proper scores, the calibration reward, the normalised advantage |
| `policy_loss.py` | clipped loss, KL, entropy, importance weights, per token |
| `objective.py` | the steps the training loop calls |
| the others | one method each |
"""

from __future__ import annotations

from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.objectives import ccgspg, coupled, dcpo, grpo, posthoc, rlcr
from megatron_dcpo.objectives.objective import COUNT_NAMES, Method, Objective, Scored
from megatron_dcpo.objectives.options import PRESETS, ObjectiveConfig, expand_blocks, ignored_options
from megatron_dcpo.objectives.policy_loss import TokenBatch

__all__ = [
    "COUNT_NAMES",
    "METHODS",
    "Method",
    "Objective",
    "ObjectiveConfig",
    "Scored",
    "TokenBatch",
    "as_method",
    "build_objective",
    "resolve",
]

METHODS: dict[str, Method] = {
    "grpo": grpo.METHOD,
    "dcpo": dcpo.METHOD,
    "coupled": coupled.METHOD,
    "rlcr": rlcr.METHOD,
    "ccgspg": ccgspg.METHOD,
    "posthoc": posthoc.METHOD,
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective a configuration describes, every unset option filled in; raises as :func:`resolve`."""
    return Objective(resolve(config), METHODS[config.name])


def resolve(config: ObjectiveConfig) -> ObjectiveConfig:
    """Fill every unset option: explicit value, else the method's default, else the preset's, else the paper's.

    Raises :class:`UserError` for an unknown method, an option that the method ignores, and options that contradict.
    """
    if config.name not in METHODS:
        raise UserError(f"unknown objective {config.name!r}{did_you_mean(config.name, METHODS)}")
    method = METHODS[config.name]
    if ignored := ignored_options(config.explicit, method.options):
        readers = [name for name, other in METHODS.items() if ignored[0] in other.options]
        raise UserError(
            f"objective.{ignored[0]} has no effect with objective.name={config.name}; remove it (or set it to null), or "
            f"choose a method that reads it ({', '.join(readers)})"
        )
    defaults, preset = (expand_blocks(layer) for layer in (method.defaults(config), PRESETS[config.preset]))
    return ObjectiveConfig(**ObjectiveConfig().model_dump() | preset | defaults | config.explicit)


def as_method(config: ObjectiveConfig, name: str, **options: Any) -> ObjectiveConfig:
    """``config`` for another method: with ``options``, and without those that this method ignores."""
    ignored = ignored_options(config.explicit, METHODS[name].options)
    return config.changed(**dict.fromkeys(ignored), **{"name": name} | options)
