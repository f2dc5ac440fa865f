"""Megatron's ``GPTModel`` of Transformer Engine's layers, against the weight table. A process of
its own.

    python -m tests.cuda_wheels.layers          prints one JSON object: of every layout, what
    differs

The packages are the real ones. What a GPU would answer is made up here: that there is one, which,
and the groups of the ranks, which are torch's fake ones. The parameters are allocated on the host
(on the meta device Transformer Engine leaves out the marks of tensor parallelism); nothing is
computed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

HOST = torch.device("cpu")


class _H100:
    major, minor, name, multi_processor_count, total_memory = (9, 0, "NVIDIA H100", 132, 80 << 30)


def pretend() -> None:
    """Before Megatron and Transformer Engine are imported, which ask as they are."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_properties = lambda device=None: _H100
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.current_device = lambda: HOST
    cuda.Stream = MagicMock(name="Stream")
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self


DENSE: tuple[dict[str, Any], ...] = (
    {},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
)
EXPERTS: tuple[dict[str, Any], ...] = (
    {},
    {"expert_model_parallel_size": 4},
    {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True},
    {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "Qwen3ForCausalLM": ({}, DENSE),
    "Qwen2ForCausalLM": ({"tie_word_embeddings": True}, DENSE[:3]),
    "LlamaForCausalLM": ({}, DENSE[:3]),
    "Qwen3MoeForCausalLM": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 192,
            "norm_topk_prob": True,
        },
        EXPERTS,
    ),
}
_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 1021,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


def name_of(family: str, options: dict[str, Any]) -> str:
    return " ".join([family.removesuffix("ForCausalLM"), *(f"{k}={v}" for k, v in options.items())])


CASES = {
    name_of(family, options): (family, changes, options)
    for family, (changes, layouts) in FAMILIES.items()
    for options in layouts
}


def differences(
    family: str, changes: dict[str, Any], options: dict[str, Any]
) -> tuple[int, list[str]]:
    """(parameters compared, what differs) over all ranks and virtual stages of a layout."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from megatron_dcpo.architectures.config_json import parse_architecture
    from megatron_dcpo.conversion.parameters import extra_states
    from megatron_dcpo.policy import model as policy
    from megatron_dcpo.weights.layout import Layout
    from megatron_dcpo.weights.planner import sharded_dimensions
    from tests.distributed.cases.common import parallel_config

    policy.current_device = lambda: HOST
    CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()  # the generator is the GPU's
    arch = parse_architecture({"architectures": [family], **_SIZES, **changes})
    parallel = parallel_config({"use_distributed_optimizer": True, **options})
    layout = Layout.of(parallel, transformer_engine=True)
    compared, found = 0, []
    world = layout.width * layout.pipeline_model_parallel_size
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(
            layout.tensor_model_parallel_size,
            layout.pipeline_model_parallel_size,
            options.get("virtual_pipeline_model_parallel_size"),
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        for virtual in range(layout.virtual_pipeline_model_parallel_size):
            at = layout.at(rank % layout.width, rank // layout.width, virtual)
            config = policy.transformer_config(
                arch, parallel, torch.bfloat16, transformer_engine=True
            )
            gpt = policy._build_chunk(arch, layout, config, at)
            built = {name: tuple(p.shape) for name, p in gpt.named_parameters()}
            said = table(arch, layout, at)
            compared += len(built)
            found += [
                f"rank {rank} stage {virtual}: {name}: built {built.get(name)}, table "
                f"{said.get(name)}"
                for name in sorted(built.keys() | said.keys())
                if built.get(name) != said.get(name)
            ]
            marked = {
                n for n, p in gpt.named_parameters() if getattr(p, "tensor_model_parallel", False)
            }
            cut = {n for n, dim in sharded_dimensions(arch, layout, at).items() if dim is not None}
            found += [f"rank {rank}: {name} is not marked as cut" for name in sorted(cut - marked)]
            if world == 1 and not options:
                parts = nested_values(gpt.sharded_state_dict())
                extra = {part.unique_key for part in parts if part.key.endswith("_extra_state")}
                found += [
                    f"extra state {key} in one of the two"
                    for key in sorted(extra ^ extra_states(arch).keys())
                ]
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return compared, found


def table(arch: Any, layout: Any, at: Any) -> dict[str, tuple[int, ...]]:
    """Of every parameter of a chunk the shape that the weight table fills: its copies, and the
    padding of a vocabulary.
    """
    from megatron_dcpo.weights.planner import padded_vocab_size, plan
    from megatron_dcpo.weights.table import hf_shapes

    shapes = hf_shapes(arch)
    copies = defaultdict(list)
    for copy in plan(arch, layout, at):
        copies[copy.megatron].append(copy)
    result = {}
    for name, parts in copies.items():
        shape = list(shapes[parts[0].hf])
        shape[parts[0].dim] = max(part.start + part.length for part in parts)
        assert sum(part.length for part in parts) == shape[parts[0].dim], (
            "every number of a parameter is filled once"
        )
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            shape[0] = padded_vocab_size(arch, layout) // layout.tensor_model_parallel_size
        result[name] = tuple(shape)
    assert all(math.prod(shape) for shape in result.values())
    return result


def main() -> None:
    pretend()
    from megatron_dcpo.runtime import megatron_on_cpu

    megatron_on_cpu.ensure()
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert HAVE_TE, "Megatron does not find Transformer Engine"
    print(json.dumps({name: differences(*case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
