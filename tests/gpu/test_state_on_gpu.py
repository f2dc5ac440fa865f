"""State of a training on a GPU: saved and resumed, off the device and back, measured against the
plan, packed and padded.

The functions are those of ``tests/distributed/test_device_cases.py``, which runs them on the CPU.
"""

import json

import pytest
import torch

from megatron_dcpo.runtime.device import current_device, empty_cache
from tests.gpu import checks, needs
from tests.helpers import memory
from tests.helpers.launch import torchrun, torchrun_all
from tests.helpers.shipped import MODELS

pytestmark = needs.CUDA
SIZES = {"prompt_tokens": 512, "response_tokens": 1536, "micro_batch_size": 2}


def on_gpu(what, out, processes=1, **options):
    return torchrun("device", processes, out, {"what": what, **options})


@pytest.fixture(scope="module")
def qwen3_06b(tmp_path_factory):
    """Random weights in the shape of Qwen3-0.6B, 1.2 GB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("qwen3_0.6b")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODELS / "Qwen" / "Qwen3-0.6B")
    with current_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    empty_cache()  # other processes need the room
    return path


@pytest.mark.parametrize("layers", needs.LAYERS)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=needs.gpus(2))])
def test_resumption_is_bit_for_bit(tiny_models, tmp_path, layers, processes):
    """The distributed optimizer, saved in the background while training goes on."""
    model = str(tiny_models("qwen3", True))
    for result in on_gpu(
        "save_and_resume",
        tmp_path,
        processes,
        model=model,
        dtype="bf16",
        layers=layers,
        distributed=True,
    ):
        checks.save_and_resume(result)


@pytest.mark.parametrize("layers", needs.LAYERS)
@pytest.mark.parametrize("families", checks.FAMILIES)
def test_packed_is_padded_is_transformers(tiny_models, tmp_path, families, layers):
    """Transformer Engine's attention on packed sequences has kernels for bf16 only."""
    dtypes = ("fp32", "bf16")[layers != "local" :]
    common = {"what": "logprobs", "layers": layers}
    jobs = [
        ("device", common | {"model": str(tiny_models(*one)), "dtype": t})
        for one in checks.FAMILIES[families]
        for t in dtypes
    ]
    for (_, options), (result,) in zip(jobs, torchrun_all(jobs, 1, tmp_path), strict=True):
        checks.logprobs(result, options["dtype"])


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed optimizer"])
def test_what_a_rollout_does_without_leaves_the_device(qwen3_06b, tmp_path, distributed):
    """torch allocates in blocks of 512 bytes: less than a MB for all tensors together."""
    options = {
        "model": str(qwen3_06b),
        "dtype": "bf16",
        "layers": "local",
        "distributed": distributed,
    }
    (result,) = on_gpu("offload", tmp_path, **options)
    checks.offload(result, rounding=2 << 20)
    given_back = 1e9 * (result["device_gb"][0] - result["device_gb"][1])
    assert given_back >= 0.9 * (result["reference"] + result["optimizer"]), (
        "the driver has it, not torch's cache"
    )


@pytest.mark.parametrize("layers", needs.LAYERS)
def test_memory_is_what_the_plan_says(qwen3_06b, tmp_path, record_property, layers):
    options = {
        "model": str(qwen3_06b),
        "dtype": "bf16",
        "layers": layers,
        "distributed": True,
        **SIZES,
    }
    (result,) = on_gpu("memory", tmp_path, **options)
    rows = memory.compare(result["measured"], result["predicted"])
    record_property("memory against the plan", f"{layers} layers: {memory.shown(rows)}")
    print(json.dumps(result))
    assert not memory.problems(rows)
