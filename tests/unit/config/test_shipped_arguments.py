"""Every shipped configuration gives Megatron and vLLM the arguments written down here: a change of
them is seen.
"""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
import yaml

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import ParallelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.plan import MODELS
from megatron_dcpo.policy import model
from megatron_dcpo.rollout import vllm_engine
from megatron_dcpo.runtime import device
from tests.helpers.paths import EXAMPLES, REPOSITORY
from tests.helpers.shipped import model_of
from tests.helpers.shipped_arguments import arguments, engine_arguments

STORED = json.loads((REPOSITORY / "tests" / "fixtures" / "shipped_arguments.json").read_text())
NAMES = sorted(STORED["engine"]["of"])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_before(name: str) -> None:
    found = arguments(EXAMPLES / name)
    for kind, values in found.items():
        assert values == STORED[kind]["different"][STORED[kind]["of"][name]], kind


def test_weight_gradients_are_fused_by_transformer_engine(monkeypatch):
    """Without Apex, which only Megatron's own linear layers need."""
    monkeypatch.setattr(device, "_CPU", device._GPU)
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    arch = read_architecture(model_of(EXAMPLES / "qwen3_8b" / "math" / "dcpo.yaml"))
    unfused = ParallelConfig(
        megatron={"apply_rope_fusion": False}
    )  # the other kernel that is not here
    for engine in (True, False):
        config = model.transformer_config(arch, unfused, torch.bfloat16, transformer_engine=engine)
        assert config.gradient_accumulation_fusion is engine


def test_a_kernel_that_is_not_installed_is_one_line():
    arch = read_architecture(model_of(EXAMPLES / "qwen3_30b_a3b" / "math" / "dcpo.yaml"))
    fused = ParallelConfig(megatron={"moe_permute_fusion": True})
    with pytest.raises(UserError, match="fused_permute"):
        model.transformer_config(arch, fused, torch.bfloat16)


def test_on_a_gpu_gemmas_activation_is_megatrons_fused_kernel(monkeypatch):
    """Megatron takes the kernel where it finds ``F.gelu``; what it computes is the tanh form."""
    from megatron.core.fusions.fused_bias_geglu import geglu

    arch = read_architecture(MODELS / "google" / "gemma-3-1b-it")
    on_cpu = model.transformer_config(arch, ParallelConfig(), torch.bfloat16)
    assert not on_cpu.bias_activation_fusion
    monkeypatch.setattr(device, "_CPU", device._GPU)
    unfused = ParallelConfig(megatron={"gradient_accumulation_fusion": False})
    on_gpu = model.transformer_config(arch, unfused, torch.bfloat16)
    assert on_gpu.bias_activation_fusion
    assert on_gpu.activation_func is F.gelu
    both = torch.linspace(-6, 6, 200).view(1, 200)
    gate, up = both.chunk(2, -1)
    computed = inspect.unwrap(geglu)(both)
    torch.testing.assert_close(computed, on_cpu.activation_func(gate) * up)
    assert (computed - F.gelu(gate) * up).abs().max() > 1e-4


def test_logits_in_fp32_on_a_gpu(monkeypatch, tmp_path):
    """``model.head_dtype`` auto: vLLM's own option for them, beside what a user overrides; not
    where a user says no.
    """
    monkeypatch.setattr(device, "_CPU", device._GPU)
    monkeypatch.setattr(vllm_engine, "total_memory", lambda: 0)
    path = EXAMPLES / "qwen3_8b" / "math" / "dcpo.yaml"

    def overrides(**more):
        values = yaml.safe_load(path.read_text())
        for section, options in more.items():
            values[section] |= options
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        return engine_arguments(tmp_path / "run.yaml", model_of(path)).get("hf_overrides")

    assert overrides() == "{'head_dtype': 'float32'}"
    assert overrides(model={"head_dtype": "model"}) is None
    own = {"vllm": {"hf_overrides": {"rope_theta": 1e6}}}
    assert overrides(rollout=own) == "{'head_dtype': 'float32', 'rope_theta': 1000000.0}"


@pytest.mark.parametrize(
    ("name", "known", "given", "expected"),
    [
        ("qwen3_30b_a3b", {"moe_backend"}, {}, "'triton'"),
        ("qwen3_30b_a3b", {"moe_backend"}, {"moe_backend": "auto"}, "'auto'"),
        ("qwen3_30b_a3b", set(), {}, None),
        ("qwen3_30b_a3b", None, {}, None),
        ("qwen3_8b", {"moe_backend"}, {}, None),
    ],
)
def test_kernels_of_experts_on_a_gpu(monkeypatch, tmp_path, name, known, given, expected):
    """Those into whose weights updates can be written, where vLLM has the option, unless a user
    names others.
    """
    monkeypatch.setattr(device, "_CPU", device._GPU)
    monkeypatch.setattr(vllm_engine, "total_memory", lambda: 0)
    monkeypatch.setattr(vllm_engine, "known_arguments", lambda: known)
    path = EXAMPLES / name / "math" / "dcpo.yaml"
    values = yaml.safe_load(path.read_text())
    values["rollout"]["vllm"] = {**values["rollout"].get("vllm", {}), **given}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = engine_arguments(tmp_path / "run.yaml", model_of(path))
    assert found.get("moe_backend") == expected
