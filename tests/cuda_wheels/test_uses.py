"""Everything that the package takes from Megatron, vLLM and Transformer Engine is in the installed
releases, with the arguments that it is given. Megatron's is checked wherever the tests run, the
others where the CUDA wheels are.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_dcpo.config.rules import FP8_ROLLOUTS
from megatron_dcpo.rollout.server_tensors import connection, described
from megatron_dcpo.weights.packed import MESSAGE_BYTES
from tests.cuda_wheels.needs import in_cuda_wheels
from tests.cuda_wheels.uses import PACKAGE, TYPES, files, uses
from tests.helpers.paths import REPOSITORY

import megatron_dcpo.runtime.distributed  # noqa: F401  isort: skip - Megatron, importable here


def of(path: Path, *foreign: str) -> tuple[str, str, tuple[str, ...]]:
    return path.read_text(), str(path.relative_to(PACKAGE)), foreign


@pytest.mark.parametrize(
    ("package", "path"),
    [
        *(pytest.param("megatron", path, id=f"megatron-{path.stem}") for path in files("megatron")),
        *(
            pytest.param("vllm", path, id=f"vllm-{path.stem}", marks=in_cuda_wheels)
            for path in files("vllm")
        ),
    ],
)
def test_the_package_has_what_is_used(package: str, path: Path) -> None:
    used = uses(*of(path, package))
    assert used.problems == []
    assert used.found


@in_cuda_wheels
def test_vllms_nccl_backend_takes_what_the_server_is_told() -> None:
    """``/init_weight_transfer_engine`` and ``/update_weights`` make these of their bodies."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    group = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    told = NCCLWeightTransferInitInfo(**connection(group))
    assert (told.packed, told.packed_buffer_size_bytes) == (True, MESSAGE_BYTES)
    made = NCCLWeightTransferUpdateInfo(**described({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}))
    assert (made.names, made.dtype_names, made.shapes) == (["w"], ["bfloat16"], [[2, 3]])


@in_cuda_wheels
@pytest.mark.parametrize("name", FP8_ROLLOUTS)
def test_vllm_quantizes_what_the_plan_counts(name: str) -> None:
    """Linear layers, by the methods that an update is handed over to, but no output layer. It reads
    its older name only when it loads.
    """
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from megatron_dcpo.rollout.vllm_weights import _FP8

    newer = "fp8_per_tensor" if name == "fp8" else name
    made = OnlineQuantizationConfig(resolve_quantization_config(newer, None))
    found = made.resolve_quant_method_cls(RowParallelLinear, "model.layers.0.mlp.down_proj")
    assert issubclass(found[-1], _FP8)
    assert made.resolve_quant_method_cls(ParallelLMHead, "lm_head") is None


@in_cuda_wheels
def test_transformer_engine_takes_what_the_stand_in_takes() -> None:
    """``signatures.json`` of the stand-in is read from the package that is compiled here."""
    tool = REPOSITORY / "tools" / "transformer_engine_signatures.py"
    spec = importlib.util.spec_from_file_location("transformer_engine_signatures", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package = Path(importlib.util.find_spec("transformer_engine").origin).parent
    recorded = json.loads(module.TARGET.read_text())
    assert recorded == {name: recorded[name] for name in module.PARTS}, "a part that is not checked"
    for name, (file, where) in module.PARTS.items():
        found = module.arguments(package / file, where)
        more = (
            module.arguments(package / module.PASSED_ON[name][0], where)
            if name in module.PASSED_ON
            else []
        )
        assert recorded[name] == (sorted({*found, *more}) if more else found), name


def test_tables_name_what_the_files_say() -> None:
    """An object of :data:`TYPES` that its file no longer names would be checked by nobody."""
    for name, expressions in TYPES.items():
        text = (PACKAGE / name).read_text()
        assert [e for e in expressions if e.split("[")[0].split(".")[-1] not in text] == [], name


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from megatron.core.models.gpt import GPTModell", "GPTModell"),
        ("from megatron.core.models.gtp import GPTModel", "No module named"),
        ("from megatron.core import parallel_state\nparallel_state.get_rank()", "has no get_rank"),
        (
            "from megatron.core.packed_seq_params import "
            "PackedSeqParams\nPackedSeqParams(qkv='thd')",
            "'qkv'",
        ),
        (
            "from megatron.core.dist_checkpointing.core import save_config\nsave_config(1)",
            "missing a required",
        ),
        (
            "from megatron.core.models.gpt import GPTModel\ndef f(gpt: GPTModel | None):\n    "
            "gpt.out_layer.weight",
            "GPTModel has no out_layer",
        ),
        (
            "from megatron.core.models.gpt import GPTModel\ndef f(gpt: GPTModel):\n    "
            "gpt.set_input_tensor()",
            "missing a required argument",
        ),
        (
            "from megatron.core.dist_checkpointing.strategies.torch import "
            "TorchDistLoadShardedStrategy as Base\n"
            "class A(Base):\n    def load(self, sharded): ...\n    def g(self):\n        "
            "self.loaded()",
            "load takes",
        ),
    ],
)
def test_what_a_release_could_move_is_found(line: str, problem: str) -> None:
    found = uses(line, "example.py", ("megatron",)).problems
    assert any(problem in one for one in found), found


def test_what_is_there_is_not_reported() -> None:
    lines = (
        "from megatron.core.models.gpt import GPTModel\n"
        "def f(gpt: GPTModel):\n    gpt.output_layer.weight\n    gpt.set_input_tensor(None)\n    "
        "gpt.rotary_pos_emb.inv_freq"
    )
    used = uses(lines, "example.py", ("megatron",))
    assert used.problems == []
    assert "RotaryEmbedding.inv_freq" in used.found
