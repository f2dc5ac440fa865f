"""Every shipped configuration gives Megatron and vLLM the arguments written down here: a change of
them is seen.
"""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import ParallelConfig
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
