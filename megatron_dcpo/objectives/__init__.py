"""Methods: one file each, registered here. Judgements in, token advantages and loss contributions out.

| file | what it holds |
|---|---|
| `options.py` | every option, the presets, how unset options resolve |
| `advantages.py` | a group, the hybrid target, the normalised advantage |
| `scores.py` | proper scores and the calibration reward |
| `policy_loss.py` | clipped loss, KL, entropy, importance weights, per token |
| `objective.py` | the steps the training loop calls |
| the others | one method each |
"""

from __future__ import annotations

from megatron_dcpo.objectives import ccgspg, coupled, dcpo, grpo, posthoc, rlcr
from megatron_dcpo.objectives.objective import COUNT_NAMES, Method, Objective, Scored
from megatron_dcpo.objectives.options import ObjectiveConfig, Options
from megatron_dcpo.objectives.policy_loss import DigitBatch, TokenBatch

__all__ = [
    "COUNT_NAMES",
    "METHODS",
    "DigitBatch",
    "Method",
    "Objective",
    "ObjectiveConfig",
    "Options",
    "Scored",
    "TokenBatch",
    "build_objective",
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
    """The objective a configuration describes, every unset option filled in."""
    return Objective(config.resolve(), METHODS[config.name])
