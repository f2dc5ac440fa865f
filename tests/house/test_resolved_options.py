"""Every shipped configuration resolves to the same options as before they were declared once.

``resolved_options.json``: by configuration, what differs from the paper's settings, written down by
the former code.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dcpo.config import load_config
from megatron_dcpo.objectives import ObjectiveConfig, find_method, resolve
from megatron_dcpo.objectives.options import BLOCK_OPTIONS
from tests.helpers.shipped import TRAINED

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((Path(__file__).parent / "resolved_options.json").read_text())


def resolved(config: ObjectiveConfig) -> dict[str, object]:
    options, declared = resolve(config), find_method(config.name).own_options
    blocks = {option: list(options.blocks(option)) for option in BLOCK_OPTIONS}
    shared = {
        name: value
        for name, value in options.model_dump().items()
        if name.rpartition("_")[0] not in blocks
    }
    defaults = {
        name: default[0] if isinstance(default, tuple) else default
        for name, default in declared.items()
    }
    own = {name: value for name, value in shared.pop("options").items() if value != defaults[name]}
    return shared | blocks | own


def test_shipped_configurations_resolve_as_recorded() -> None:
    paper = resolved(ObjectiveConfig())
    changed = {
        str(file.relative_to(ROOT)): {
            name: value for name, value in options.items() if value != paper.get(name)
        }
        for file in TRAINED
        for options in [resolved(load_config(file).objective)]
    }
    assert {name: changed[name] for name in RECORDED} == RECORDED


def test_engine_and_trainer_in_bf16_are_corrected_and_watched() -> None:
    """Rounding alone makes them two policies; what has no importance ratio (CCGSPG) is watched."""
    configs = {str(file.relative_to(ROOT)): load_config(file) for file in TRAINED}
    bf16 = {name: config for name, config in configs.items() if config.model.params_dtype == "bf16"}
    assert len(bf16) > 40
    for name, config in bf16.items():
        corrected = "tis_level" in find_method(config.objective.name).reads
        assert resolve(config.objective).tis_level == ("token" if corrected else "none"), name
        assert config.rollout.logprob_diff_alarm > 0, name


def test_the_papers_defaults() -> None:
    """Table of the paper's settings: what ``objective: {}`` means."""
    options = resolve(ObjectiveConfig())
    assert (options.name, options.lam, options.calibration_loss, options.malformed_penalty) == (
        "dcpo",
        0.5,
        "l1",
        -1.0,
    )
    assert (options.clip_low, options.clip_high) == (0.2, 0.28)
    assert (options.ddof, options.loss_aggregation, options.dual_clip) == (0, "sequence_mean", 0.0)
    assert options.blocks("kl_coef") == options.blocks("entropy_coef") == (0.0, 0.0)
