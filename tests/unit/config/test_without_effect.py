"""Options that change nothing because another one is off: a line names each of them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcpo.config import validate
from megatron_dcpo.config.supervised_sections import supervised_without_effect, validate_supervised
from megatron_dcpo.config.without_effect import options_without_effect
from megatron_dcpo.errors import UserError

SOURCES = [{"path": "a.jsonl", "template": "raw", "columns": {"answer": "a"}}]
SERVER = {"engine": "server", "endpoint": "http://h:1/v1"}


def lines_of(sections: dict[str, Any]) -> list[str]:
    values: dict[str, Any] = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    for name, options in sections.items():
        values[name] = {**values.get(name, {}), **options}
    return options_without_effect(validate(values))


@pytest.mark.parametrize(
    ("sections", "named", "read_with"),
    [
        ({"evaluation": {"benchmarks": "math500"}}, "evaluation.benchmarks", {"interval": 5}),
        (
            {"rollout": {"engine": "transformers", "vllm": {"max_model_len": 9}}},
            "rollout.vllm.max_model_len",
            {"engine": "vllm"},
        ),
        ({"rollout": {**SERVER, "vllm": {"seed": 9}}}, "rollout.vllm.seed", {"vllm": {}}),
        (
            {"rollout": {"engine": "transformers", "gpu_memory_utilization": 0.4}},
            "rollout.gpu_memory_utilization",
            {"engine": "auto"},
        ),
        ({"rollout": {"max_refills": 9}}, "rollout.max_refills", {"filter_groups": "any"}),
        ({"data": {"path": SOURCES, "template": "grpo"}}, "data.template", {"path": "d"}),
        (
            {"data": {"path": SOURCES, "columns": {"answer": "b"}}},
            "data.columns",
            {"path": "d"},
        ),
        ({"objective": {"clip_high": 0.4}}, "objective.clip_high", {"old_logprobs": "engine"}),
        ({"objective": {"ratio": "sequence"}}, "objective.ratio", {"old_logprobs": "engine"}),
        (
            {"training": {"micro_batch_size": 2}, "parallel": {"sequence_packing": True}},
            "training.micro_batch_size",
            {"sequence_packing": False},
        ),
        (
            {"training": {"max_tokens_per_micro_batch": 99}, "parallel": {}},
            "training.max_tokens_per_micro_batch",
            {"sequence_packing": True},
        ),
        ({"training": {"steps": 9, "profile_steps": [12]}}, "profile_steps", {"steps": 12}),
        (
            {"optimizer": {"lr_warmup_iters": 2}, "training": {"steps": 2}},
            "optimizer.lr_warmup_iters",
            {"steps": 3},
        ),
        (
            {
                "model": {"path": "m", "adapter": {}},
                "training": {"offload_optimizer_during_rollout": True},
            },
            "offload_optimizer_during_rollout",
            {"offload_optimizer_during_rollout": False},
        ),
    ],
)
def test_an_option_that_changes_nothing_is_named(
    sections: dict[str, Any], named: str, read_with: dict[str, Any]
) -> None:
    """``read_with`` are options of the section that is named last, with which it is read."""
    (line,) = lines_of(sections)
    assert named in line
    last = list(sections)[-1]
    assert lines_of({**sections, last: {**sections[last], **read_with}}) == []


def test_the_defaults_have_no_such_option() -> None:
    assert lines_of({}) == []
    assert lines_of({"objective": {"preset": "verl_compat"}}) == []
    values = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    assert supervised_without_effect(validate_supervised(values)) == []
    sampling = {**values, "logging": {"samples_interval": 3}}
    (line,) = supervised_without_effect(validate_supervised(sampling))
    assert "logging.samples_interval" in line
    epochs = {**values, "training": {"steps": 3, "epochs": 2}}
    (line,) = supervised_without_effect(validate_supervised(epochs))
    assert "training.epochs" in line


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"optimizer": {"min_lr": 1e-7}}, "optimizer.min_lr"),
        (
            {
                "data": {"path": "reasoning_gym:chain_sum"},
                "judging": {"verifier": "my_reward.py:verify"},
            },
            "judging.verifier",
        ),
        (
            {
                "data": {"path": [{"path": "a.jsonl", "verifier": "exact"}]},
                "judging": {"verifier": "my_reward.py:verify"},
            },
            "judging.verifier",
        ),
        ({"data": {"path": [{"path": "reasoning_gym:t?size=9", "size": 8}]}}, "size"),
        ({"objective": {"tis_cap": 3.0}}, "objective.tis_cap"),
        ({"objective": {"kl_estimator": "k1"}}, "objective.kl_estimator"),
        ({"objective": {"overlong_penalty": 0.5}}, "objective.overlong_penalty"),
        (
            {"objective": {"preset": "verl_compat", "malformed_penalty": -3.0}},
            "objective.malformed_penalty",
        ),
        (
            {"objective": {"advantage_normalization": "mean", "ddof": 1}},
            "objective.ddof",
        ),
    ],
)
def test_what_is_never_meant_is_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        lines_of(sections)
    assert named in str(error.value)
