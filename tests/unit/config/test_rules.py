"""The rules on what may not be combined: those that the model or the number of processes decides.

Those of a configuration alone are in ``tests/unit/test_config.py`` and where their part is tested.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import rules, validate
from megatron_dcpo.errors import UserError

DENSE = SimpleNamespace(
    num_experts=0,
    dense_ffn_hidden_size=0,
    shared_ffn_hidden_size=0,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=96,
    vocab_size=331,
    sliding_window=None,
    rotary_interleaved=False,
)
WINDOWS = SimpleNamespace(**{**vars(DENSE), "sliding_window": object()})
NEIGHBORS = SimpleNamespace(**{**vars(DENSE), "rotary_interleaved": True})
EXPERTS = SimpleNamespace(**{**vars(DENSE), "num_experts": 6})
CHUNKS = ([0, 1], [2, 3])


def config(**sections: Any) -> Any:
    values = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    for name, options in sections.items():
        values[name] = {**values.get(name, {}), **options}  # type: ignore[dict-item]
    return validate(values)


def refused_for(model: Any, sections: dict[str, Any], option: str) -> None:
    """The sections are refused for this model by the option's name, and not for a dense one."""
    of_run = config(**sections)
    rules.check_model_rules(of_run, DENSE, CHUNKS)
    with pytest.raises(UserError) as error:
        rules.check_model_rules(of_run, model, CHUNKS)
    assert option in str(error.value)


def test_adapted_layers_are_on_one_stage() -> None:
    on_top = {"model": {"adapter": {"layers": "last 2"}}}
    assert config(**on_top).model.adapter.layers == "last 2"
    with pytest.raises(UserError, match=r"model\.adapter\.layers"):
        config(**on_top, parallel={"pipeline_model_parallel_size": 2})


@pytest.mark.parametrize("layers", ["last", "last 0", "first 2", "6"])
def test_layers_of_an_adapter_are_the_last_ones(layers: str) -> None:
    with pytest.raises(UserError, match=r"model\.adapter\.layers"):
        config(model={"adapter": {"layers": layers}})


def test_a_greedy_validation_has_one_response() -> None:
    greedy = {"interval": 5, "benchmarks": "math500", "temperature": 0}
    assert config(evaluation=greedy).evaluation.samples == 1
    with pytest.raises(UserError, match=r"evaluation\.samples"):
        config(evaluation={**greedy, "samples": 4})


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"model": {"adapter": {}}}, "model.adapter"),
        ({"parallel": {"tensor_model_parallel_size": 2}}, "parallel.sequence_parallel=true"),
        (
            {"parallel": {"expert_model_parallel_size": 2}},
            "parallel.use_distributed_optimizer=true",
        ),
        (
            {
                "parallel": {
                    "recompute_granularity": "selective",
                    "megatron": {"recompute_modules": ["mlp"]},
                }
            },
            "parallel.megatron.recompute_modules=mlp",
        ),
        ({"rollout": {"engine": "server", "endpoint": "http://h/v1"}}, "rollout.engine=server"),
    ],
)
def test_what_is_wrong_with_experts_is_refused_for_them_alone(
    sections: dict[str, Any], option: str
) -> None:
    refused_for(EXPERTS, sections, option)


def test_routing_replay_needs_experts_and_megatrons_router() -> None:
    replayed = config(rollout={"routing_replay": True})
    rules.check_model_rules(replayed, EXPERTS, CHUNKS)
    with pytest.raises(UserError, match=r"rollout\.routing_replay"):
        rules.check_model_rules(replayed, DENSE, CHUNKS)
    fused = config(
        rollout={"routing_replay": True}, parallel={"megatron": {"moe_router_fusion": True}}
    )
    with pytest.raises(UserError, match="moe_router_fusion"):
        rules.check_model_rules(fused, EXPERTS, CHUNKS)


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"parallel": {"context_parallel_size": 2}}, True),
        ({"parallel": {"context_parallel_size": 2, "sequence_packing": True}}, True),
        (
            {
                "parallel": {
                    "context_parallel_size": 2,
                    "megatron": {"cp_comm_type": "all_gather"},
                    "sequence_packing": False,
                }
            },
            False,
        ),
        ({"parallel": {"context_parallel_size": 2}, "model": {"transformer_impl": "local"}}, False),
    ],
)
def test_windows_in_context_parallelism(sections: dict[str, Any], refused: bool) -> None:
    of_run = config(**sections)
    rules.check_model_rules(of_run, DENSE, CHUNKS)
    if not refused:
        rules.check_model_rules(of_run, WINDOWS, CHUNKS)
        return
    with pytest.raises(UserError, match="cp_comm_type=all_gather"):
        rules.check_model_rules(of_run, WINDOWS, CHUNKS)


def test_fused_rotations_of_packed_neighbors() -> None:
    fused = {"megatron": {"apply_rope_fusion": True}}
    refused_for(
        NEIGHBORS,
        {"parallel": {**fused, "sequence_packing": True}},
        "parallel.megatron.apply_rope_fusion",
    )
    for allowed in (fused, {"sequence_packing": True}):
        rules.check_model_rules(config(parallel=allowed), NEIGHBORS, CHUNKS)


def test_overlapped_messages_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"parallel\.megatron\.tp_comm_overlap"):
        config(parallel={"megatron": {"tp_comm_overlap": True}})
    config(parallel={"megatron": {"tp_comm_overlap": False}})


def test_recomputed_units_divide_every_chunk() -> None:
    units = config(
        parallel={"recompute_granularity": "full", "megatron": {"recompute_num_layers": 2}}
    )
    rules.check_model_rules(units, DENSE, CHUNKS)
    with pytest.raises(UserError, match=r"recompute_num_layers=2"):
        rules.check_model_rules(units, DENSE, ([0, 1], [2]))


def test_the_number_of_processes() -> None:
    rules.check_processes(config(parallel={"tensor_model_parallel_size": 2}), 4)
    with pytest.raises(UserError, match="tensor_model_parallel_size=2"):
        rules.check_processes(config(parallel={"tensor_model_parallel_size": 2}), 3)
    with pytest.raises(UserError, match=r"rollout\.tensor_model_parallel_size=2"):
        rules.check_processes(config(rollout={"tensor_model_parallel_size": 2}), 3)
    server = {"engine": "server", "endpoint": "http://h/v1"}
    of_server = config(rollout={**server, "tensor_model_parallel_size": 2})
    rules.check_processes(of_server, 3)  # its engines have other GPUs


def test_the_gpus_of_a_server_are_whole_engines() -> None:
    server = {"engine": "server", "endpoint": "http://h/v1"}
    of_server = config(rollout={**server, "tensor_model_parallel_size": 4})
    rules.check_engine_gpus(of_server, 8, "--engines")
    with pytest.raises(UserError, match=r"parallel_size=4 .*--engines"):
        rules.check_engine_gpus(of_server, 6, "--engines")


@pytest.mark.parametrize(
    ("section", "key", "option", "value"),
    [
        ("parallel", "megatron", "fp8", "hybrid"),
        ("parallel", "megatron", "fp8_param", True),
        ("parallel", "megatron", "fp4", "e2m1"),
        ("parallel", "megatron", "fp8_param_gather", True),
        ("parallel", "megatron", "quant_recipe", "x"),
        ("rollout", "vllm", "quantization", "awq"),
        ("rollout", "vllm", "quantization", "mxfp8"),
        ("rollout", "vllm", "quantization_config", {"linear": "fp8_per_block"}),
        ("rollout", "vllm", "kv_cache_dtype", "fp8"),
    ],
)
def test_fewer_bits_are_refused_by_name(section: str, key: str, option: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        config(**{section: {key: {option: value}}})
    assert f"{section}.{key}.{option}" in str(error.value)
    config(**{section: {key: {option: None}}})


FP8 = {"vllm": {"quantization": "fp8_per_block", "kv_cache_dtype": "auto"}}
BF16 = {"params_dtype": "bf16"}
CORRECTED = {"tis_level": "token"}


@pytest.mark.parametrize("quantization", rules.FP8_ROLLOUTS)
@pytest.mark.parametrize("correction", [CORRECTED, {"old_logprobs": "engine"}])
@pytest.mark.parametrize("engine", ["auto", "vllm", "server"])
def test_fp8_rollouts_of_a_corrected_policy_in_bf16(
    quantization: str, correction: dict[str, str], engine: str
) -> None:
    rollout = {"engine": engine, "vllm": {"quantization": quantization}}
    if engine == "server":
        rollout["endpoint"] = "http://h/v1"
    found = config(model=BF16, objective=correction, rollout=rollout)
    assert found.rollout.quantization == quantization


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"model": BF16}, "objective.tis_level"),
        (
            {"model": {"params_dtype": "fp32"}, "objective": CORRECTED},
            "model.params_dtype=bf16",
        ),
        (
            {
                "model": BF16,
                "objective": CORRECTED,
                "rollout": {**FP8, "engine": "transformers"},
            },
            "rollout.engine",
        ),
    ],
)
def test_other_fp8_rollouts_are_refused_by_name(sections: dict[str, Any], option: str) -> None:
    with pytest.raises(UserError) as error:
        config(**{"rollout": FP8, **sections})
    assert "rollout.vllm.quantization=fp8_per_block" in str(error.value)
    assert option in str(error.value)
    assert "\n" not in str(error.value)


def test_fp8_rollouts_are_of_plain_layers() -> None:
    sections = {"model": BF16, "objective": CORRECTED, "rollout": FP8}
    refused_for(EXPERTS, sections, "rollout.vllm.quantization")


def test_servers_and_their_addresses() -> None:
    server = {"engine": "server", "endpoint": "http://a:1/v1, http://b:1"}
    two = config(rollout=server)
    assert two.rollout.endpoint == ("http://a:1/v1", "http://b:1")
    rules.check_processes(two, 2)
    with pytest.raises(UserError, match=r"rollout\.endpoint .*2 servers"):
        rules.check_processes(two, 1)
    twice = {**server, "endpoint": ["http://a:1/v1", "http://a:1/"]}
    with pytest.raises(UserError, match=r"rollout\.endpoint names http://a:1 twice"):
        config(rollout=twice)


def test_every_rule_of_a_configuration_is_broken_by_none_of_the_defaults() -> None:
    """And no two rows of the table say the same."""
    rules.check_configuration(config(), "defaults")
    said = [(conflict.when, conflict.says) for conflict in rules.CONFLICTS]
    assert len(said) == len(set(said)) > 20
