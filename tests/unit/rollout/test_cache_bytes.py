"""The cache of a vLLM engine that shares its host's memory, and how the lack of it is said; which
vLLM is taken, and on which stream.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import vllm_host
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_host import cache_bytes, check_fp8_device, check_release
from megatron_dcpo.runtime import device
from megatron_dcpo.training import run as training_run
from tests.helpers.paths import QUICKSTART, REPOSITORY

ARCH = read_architecture(REPOSITORY / "megatron_dcpo" / "planning" / "models" / "Qwen" / "Qwen3-8B")
TOKEN = 2 * 36 * 8 * 128 * 2  # keys and values of 36 layers, 8 groups of 128, bf16
WEIGHTS = 2 * 8_190_735_360
OPTIONS = EngineOptions(max_model_len=4024, max_num_seqs=8, gpu_memory_utilization=0.5)


def test_what_the_requests_need_is_enough():
    """4024 tokens are 32 blocks of 128; one request more than run at once, for vLLM's own use."""
    assert cache_bytes(ARCH, OPTIONS, 10**12, ranks=1) == 9 * 32 * 128 * TOKEN


def test_the_ranks_of_a_host_share_what_is_there():
    available = 80 * 10**9
    assert (
        cache_bytes(ARCH, replace(OPTIONS, max_num_seqs=512), available, ranks=1)
        == 40 * 10**9 - WEIGHTS
    )
    assert (
        cache_bytes(ARCH, replace(OPTIONS, max_num_seqs=512), available, ranks=2)
        == 20 * 10**9 - WEIGHTS
    )
    together = 2 * (
        cache_bytes(ARCH, replace(OPTIONS, max_num_seqs=512), available, ranks=2) + WEIGHTS
    )
    assert together <= available * OPTIONS.gpu_memory_utilization


def test_weights_in_fp8_leave_room_for_the_cache():
    """A byte less for each weight of the linear layers, not for embedding and output layer."""
    linear = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    options = replace(OPTIONS, max_num_seqs=512, arguments={"quantization": "fp8_per_block"})
    assert options.quantization == "fp8_per_block"
    assert cache_bytes(ARCH, options, 80 * 10**9, ranks=1) == 40 * 10**9 - WEIGHTS + linear


@pytest.mark.parametrize(("capability", "can"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_products_in_fp8_is_said_in_one_line(monkeypatch, capability, can):
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(vllm_host, "device_name", lambda: "NVIDIA A100")
    check_fp8_device(None)
    if can:
        check_fp8_device("fp8_per_block")
        return
    with pytest.raises(
        UserError, match=r"rollout\.vllm\.quantization=fp8_per_block.*8\.9"
    ) as refused:
        check_fp8_device("fp8_per_block")
    assert "NVIDIA A100" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_host_that_is_too_small_is_named_in_one_line():
    with pytest.raises(UserError, match="no memory for vLLM on this host") as refused:
        cache_bytes(ARCH, OPTIONS, 80 * 10**9, ranks=4)
    assert "a request of 4024 tokens takes 0.60 GB" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_asked_for_is_taken():
    assert (
        cache_bytes(
            ARCH, replace(OPTIONS, arguments={"kv_cache_memory_bytes": 64 << 20}), 10**9, ranks=8
        )
        == 64 << 20
    )


def test_the_cache_is_made_for_the_responses_of_a_step():
    many = replace(OPTIONS, max_num_seqs=512, responses=64)
    assert cache_bytes(ARCH, many, 10**12, ranks=1) == cache_bytes(
        ARCH, replace(OPTIONS, max_num_seqs=64), 10**12, ranks=1
    )


def test_another_release_of_vllm_is_refused(monkeypatch):
    check_release()  # of what is installed, or not
    monkeypatch.setattr(vllm_host, "version", lambda package: "0.34.1")
    with pytest.raises(
        UserError,
        match=r"vllm 0\.34\.1 is installed, supported is 0\.32 or 0\.33; pip install "
        r"'vllm==0\.32\.\*'",
    ):
        check_release()


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["rollout.engine=vllm", "rollout.tensor_model_parallel_size=2"], 1),
        (["rollout.engine=vllm"], 0),
        (["rollout.engine=transformers"], 0),
        (["rollout.engine=server", "rollout.endpoint=http://h:1/v1"], 0),
        (
            [
                "rollout.engine=server",
                "rollout.endpoint=http://h:1/v1",
                "rollout.weight_transfer=nccl",
            ],
            1,
        ),
    ],
)
def test_vllm_chooses_its_stream_before_the_policy_is_built(monkeypatch, options, taken):
    chosen = []
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    torch_utils = ModuleType("vllm.utils.torch_utils")
    torch_utils.current_stream = lambda: chosen.append("stream")
    monkeypatch.setitem(sys.modules, "vllm.utils.torch_utils", torch_utils)
    monkeypatch.setattr(vllm_host, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_host, "capabilities", lambda: SimpleNamespace(separate_memory=True))

    def build_policy(*_, **__):
        raise RuntimeError(f"after {len(chosen)}")

    monkeypatch.setattr(training_run, "build_policy", build_policy)
    config = load_config(QUICKSTART / "dcpo.yaml", options)
    monkeypatch.setattr(training_run, "read_inputs", lambda config: SimpleNamespace(sources=[]))
    monkeypatch.setattr(training_run, "open_topology", lambda config: SimpleNamespace(rank=1))
    monkeypatch.setattr(training_run, "start_watch", lambda *_: None)
    monkeypatch.setattr(training_run, "_check_same_prompts", lambda sources: None)
    with pytest.raises(RuntimeError, match=f"after {taken}"), training_run.build(config):
        pass
