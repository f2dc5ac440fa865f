"""``mfu/train``: by hand, on a card of known speed, and left out where the speed is unknown."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import ParallelConfig
from megatron_dcpo.runtime import device
from megatron_dcpo.training import step_metrics
from megatron_dcpo.weights.arithmetic import sequence_flops
from megatron_dcpo.weights.layout import Layout
from tests.helpers.paths import REPOSITORY


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("a card of tomorrow", None),
    ],
)
def test_peak_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device.peak_tflops() == peak


def test_utilization_of_the_training_phase(monkeypatch):
    arch = read_architecture(REPOSITORY / "megatron_dcpo/planning/models/Qwen/Qwen3-8B")
    layout = Layout.of(ParallelConfig(tensor_model_parallel_size=2), transformer_engine=True)
    policy = SimpleNamespace(arch=arch, layout=layout, topology=SimpleNamespace(world_size=8))
    samples = [SimpleNamespace(length=2000)] * 16
    timers = SimpleNamespace(seconds={"train": 2.0})
    assert step_metrics.utilization(policy, samples, timers) == {}, "nothing on the CPU"
    monkeypatch.setattr(step_metrics, "peak_tflops", lambda: 989.0)
    found = step_metrics.utilization(policy, samples, timers)
    # 6 x parameters x tokens, and attention; over 2 s, 8 GPUs
    parameters = 8.19e9 - 151_936 * 4096  # without the embedding, which multiplies nothing
    attention = 3 * 36 * 2 * 4096 * 2000
    expected = (6 * parameters + attention) * 32_000 / 2.0 / 8 / 1e12
    assert found["tflops/train"] == pytest.approx(expected, rel=0.01)
    assert found["mfu/train"] == pytest.approx(found["tflops/train"] / 989.0)
    assert found["tflops/train"] == pytest.approx(
        3 * sequence_flops(arch, layout, tokens=32_000, length=2000) / 2.0 / 8 / 1e12
    )
    assert step_metrics.utilization(policy, samples, SimpleNamespace(seconds={})) == {}
