"""Options: layers of defaults, names, what a method ignores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.objectives import ObjectiveConfig, registered_methods, resolve
from megatron_dcpo.objectives.advantages import scored_confidence
from megatron_dcpo.objectives.options import OWN_OPTIONS
from tests.helpers.objective_cases import judgement, objective


def test_options_resolve_explicit_then_method_then_preset() -> None:
    assert resolve(ObjectiveConfig()).lam == 0.5
    assert resolve(ObjectiveConfig(name="rlcr")).lam == 0.0
    assert resolve(ObjectiveConfig(name="rlcr", lam=0.3)).lam == 0.3
    proper = resolve(ObjectiveConfig(preset="dcpo_proper"))
    assert proper.blocks("advantage_normalization") == ("std", "batch_std")
    assert proper.blocks("weight") == (1.0, 1.0)
    assert proper.options == {"confidence_baseline": "counterfactual"}
    assert resolve(ObjectiveConfig(preset="dcpo_proper", weight=2.0)).blocks("weight") == (2.0, 2.0)
    assert resolve(ObjectiveConfig(name="rlcr", preset="dcpo_proper")).blocks("weight") == (
        1.0,
        1.0,
    )
    assert resolve(ObjectiveConfig(kl_coef=0.3, kl_coef_confidence=0.1)).blocks("kl_coef") == (
        0.3,
        0.1,
    )
    assert (
        resolve(ObjectiveConfig(name="ccgspg", preset="verl_compat")).loss_aggregation
        == "sequence_mean"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 1.5}, "less than or equal to 1"),
        ({"lam": float("nan")}, "finite"),
        ({"preset": "papr"}, "verl_compat"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"dual_clip": 0.5}, "greater than 1"),
        ({"ddof": 2}, "0 or 1"),
        ({"lamda": 0.5}, "Extra inputs are not permitted"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**options)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(UserError, match="unknown objective 'dcop'; did you mean 'dcpo'"):
        objective(name="dcop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "grpo", "lam": 0.5},
            "objective.lam has no effect with objective.name=grpo.*dcpo, coupled, rlcr, posthoc",
        ),
        (
            {"name": "rlcr", "variant": "original", "w": 0.5},
            "objective.w has no effect with objective.variant=original",
        ),
        ({"name": "dcpo", "w": 0.5}, r"objective.w has no effect.*\(coupled, rlcr\)"),
        ({"name": "ccgspg", "clip_low": 0.1}, "objective.clip_low has no effect"),
        (
            {"name": "coupled", "advantage_normalization_confidence": "mean"},
            "advantage_normalization_confidence has no",
        ),
        ({"name": "rlcr", "confidence_baseline": "group"}, r"\(dcpo, ternary\)"),
        ({"name": "posthoc", "beta": 0.1}, r"\(ccgspg\)"),
    ],
)
def test_options_that_a_method_ignores_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        objective(**options)


def test_a_short_name_is_accepted_where_one_block_reads_it_and_null_unsets() -> None:
    assert (
        resolve(
            ObjectiveConfig(name="grpo", advantage_normalization="mean")
        ).advantage_normalization_reasoning
        == "mean"
    )
    assert resolve(ObjectiveConfig(name="grpo", lam=None)).name == "grpo"
    assert resolve(ObjectiveConfig(name="dcpo", w=1.0).changed(w=None)).options == {
        "confidence_baseline": "group"
    }


def test_every_option_is_read_by_a_method_and_every_method_names_real_options() -> None:
    read = frozenset().union(*(method.reads for method in registered_methods().values()))
    assert read | {"options"} == set(ObjectiveConfig.model_fields)
    assert set(OWN_OPTIONS) == {
        name for method in registered_methods().values() for name in method.own_options
    }


def test_options_of_a_method_are_checked() -> None:
    assert objective(name="rlcr", variant="original").options.options["variant"] == "original"
    assert objective(name="rlcr", options={"w": 0.3}).options.options == {
        "w": 0.3,
        "variant": "canonical",
    }
    for options, message in (
        (
            {"name": "rlcr", "variant": "new"},
            "objective.variant=new: expected one of canonical, original",
        ),
        (
            {"name": "ccgspg", "beta": "much"},
            "objective.beta='much': expected a value like its default, 0.01",
        ),
        ({"name": "grpo", "options": {"gamma": 1}}, "objective.options.gamma: .*grpo"),
    ):
        with pytest.raises(UserError, match=message):
            objective(**options)


@pytest.mark.parametrize(
    ("text", "finished", "scored"),
    [
        ("\\boxed{1}\nCONFIDENCE: 0.8", True, 0.8),
        ("\\boxed{1}\nCONFIDENCE: -0.3", True, -0.3),
        ("\\boxed{1}\nCONFIDENCE: 2.5", True, 2.5),
        ("\\boxed{1}\nCONFIDENCE: 10.5", True, 10.5),
        ("\\boxed{1}\nCONFIDENCE: 85%", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 8e-1", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 0,8", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 0.8.", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 0.8 sure", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 00.5", True, 0.5),
        ("\\boxed{1}\nCONFIDENCE: 0.8\nCONFIDENCE: 0.9", True, -1.0),
        ("CONFIDENCE: 0.8\n\\boxed{1}", True, -1.0),
        ("\\boxed{1}\nCONFIDENCE: 0.8", False, -1.0),
        ("\\boxed{1}\nConfidence: 0.8", True, -1.0),
        ("\\boxed{1}", True, -1.0),
    ],
)
def test_numbers_that_the_released_code_reads_otherwise(
    text: str, finished: bool, scored: float
) -> None:
    """The table of docs/algorithms.md#6-presets: what ``verl_compat`` scores."""
    options = resolve(ObjectiveConfig(preset="verl_compat"))
    parsed = parse_confidence(text, marker="CONFIDENCE:", finished=finished)
    read = replace(
        judgement("p", 1.0, parsed.confidence, status=parsed.status), stated=parsed.stated
    )
    assert scored_confidence(read, options) == scored
